"""Small runs of `collc train`."""

import io
import os
import signal

from rich.console import Console

from collc.training.lm import config
from collc.training.lm import train as lm

STEPS = 10


def tiny(path, **given):
    fields = dict(
        model="tiny",
        batch=8,
        seq=16,
        steps=STEPS,
        evaluation_batches=1,
        evaluate_every=4,
        side_by_side=0,
    )
    return config.TrainConfig(**{**fields, "folder": path, **given})


def train(run, *callbacks):
    console = Console(file=io.StringIO(), width=120)
    summary = lm.train(run, console, callbacks)
    return summary, console.file.getvalue()


def stop_at(step, number=signal.SIGTERM):
    return lambda event: os.kill(os.getpid(), number) if event.step == step else None
