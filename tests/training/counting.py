"""A run of `collc.fit` whose step does nothing, and what it leaves."""

import importlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from collc.training.checkpoints import checkpoint

fitting = importlib.import_module("collc.training.fitting.fit")  # the package has a function fit


@dataclass
class Fake:
    """A run that counts; `at` maps a step to what happens in it."""

    at: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    validation: float = 0.5
    data: Callable = field(default=lambda t: t)
    shown: str = ""

    def step(self, state, t):
        self.steps.append(t)
        self.at.get(t, lambda: None)()
        return state + 1, self.losses.get(t, 1 / (t + 1))

    def evaluate(self, state):
        self.evaluated.append(int(state))
        return self.validation

    def run(self, folder, **given):
        console = Console(file=io.StringIO(), width=100)
        given = {"steps": 10, "save_every": 4, "evaluate_every": 5, "keep": 9, **given}
        try:
            return fitting.fit(
                self.step,
                0,
                self.data,
                folder=folder,
                evaluate=self.evaluate,
                tokens=100,
                profile=0,
                console=console,
                **given,
            )
        finally:
            self.shown = console.file.getvalue()


def saved(folder):
    return list(checkpoint.steps(folder / "checkpoints"))


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def told(folder):
    """What stopped the run, by its report."""
    return json.loads((folder / "report.json").read_text())["stopped"]


def values(folder):
    """The lines without times."""
    keep = ("step", "loss", "validation_loss")
    return [{k: r[k] for k in keep if k in r} for r in lines(folder)]


def kill(number, times=1):
    def now():
        for _ in range(times):
            os.kill(os.getpid(), number)

    return now


def at_step(number, act):
    return lambda event: act(event) if event.step == number else None


def refuse(event):
    raise OSError("no more")
