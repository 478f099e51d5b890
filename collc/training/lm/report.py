"""What a run says before it begins and when it has ended."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from collc.training.fitting.progress import clock, say
from collc.training.lm.compare import SideBySide
from collc.training.lm.config import TrainConfig
from collc.training.lm.data import Corpus
from collc.training.lm.folder import PLAN, SUMMARY, RunFolder, resume_command

FEW = 400  # steps, those of the demo: with fewer, a loss above the entropies is no surprise
SHOWN = 40  # lines of a plan's explanation that a terminal gets; the whole is in the run folder


@dataclass(frozen=True)
class Summary:
    """How a run ended. Losses and entropies are in nats per byte of validation text. `seconds` is
    the training alone, compilation included, as far as the metrics go back; `tokens_per_s` is over
    that time.

    `interrupted` is 0 if the run is finished, else the number of the signal that stopped it. Then
    `side_by_side` is None, and `validation` too if the signal came before it.
    """

    folder: Path
    step: int
    steps: int
    parameters: int
    validation: float | None
    validation_bytes: int
    unigram: float
    bigram: float
    seconds: float
    tokens_per_s: float
    side_by_side: SideBySide | None
    interrupted: int = 0

    @property
    def exit_status(self) -> int:
        """What a shell expects: 0, or 128 and the signal (130 for Ctrl-C, 143 for SIGTERM)."""
        return 128 + self.interrupted if self.interrupted else 0

    @property
    def resume_command(self) -> str:
        return resume_command(self.folder)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "folder": str(self.folder)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        both = fields["side_by_side"]
        return cls(**{**fields, "side_by_side": both and SideBySide(**both)})

    @classmethod
    def finished(cls, folder: Path) -> Self | None:
        """What the run in a folder left when it was finished; None if it is not."""
        try:
            text = (folder / SUMMARY).read_text(encoding="utf-8")
            summary = cls.from_json({**json.loads(text), "folder": folder})
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return None if summary.interrupted or summary.validation is None else summary


def opening(
    console: Console,
    explanation: str,
    run: RunFolder,
    config: TrainConfig,
    corpus: Corpus,
    parameters: int,
    devices: int,
) -> None:
    """The plan, the text, the model, the folder."""
    lines = explanation.rstrip().splitlines()
    if len(lines) > SHOWN:
        rest = len(lines) - SHOWN
        lines[SHOWN:] = [f"... {rest} more lines: the plan is in {run.path / PLAN}"]
    say(console, "\n".join(lines) + "\n")
    batch, seq = config.batch, config.seq
    say(
        console,
        f"text   {len(corpus.train):,} bytes of {corpus.train_files} files to train on, "
        f"{len(corpus.validation):,} bytes of {corpus.validation_files} other files to validate\n"
        f"model  {config.model}: {parameters:,} parameters; {batch} × {seq} bytes a step, "
        f"{batch // devices} × {seq} on each of {devices} devices\n"
        f"run    {run.path}",
    )


def closing(console: Console, summary: Summary) -> None:
    """How the run ended: interrupted and how to go on, or losses, times and the comparison."""
    if summary.interrupted:
        say(console, f"Stopped and saved after step {summary.step} of {summary.steps}. To go on:")
        say(console, f"  {summary.resume_command}")
        if summary.validation is not None:
            say(console, "The comparison with jax.lax.pmean was skipped; that command does it.")
    if summary.validation is None:
        return
    console.print(_losses(summary, summary.validation))
    counted = {"unigram": summary.unigram, "bigram": summary.bigram}
    beaten = [name for name, nats in counted.items() if summary.validation < nats]
    few = summary.step < FEW
    below = "below" if beaten else "not yet below" if few else "NOT below"
    end = f": {summary.step} steps are few." if few and not beaten else "."
    which = " and the ".join(beaten or ["unigram"])
    say(console, f"The loss on unseen files is {below} the {which} entropy of the same text{end}")
    if summary.side_by_side:
        say(console, _compared(summary.side_by_side))
    say(
        console,
        f"Trained at {summary.tokens_per_s:,.0f} tokens/s for {clock(summary.seconds)}, with "
        f"compiling and validation. "
        f"Everything is in {summary.folder}",
    )


def _losses(summary: Summary, validation: float) -> Table:
    title = f"{summary.step} steps, {summary.parameters:,} parameters"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("nats per byte", justify="right")
    table.add_column("bits per byte", justify="right")
    for name, nats, style in (
        ("unigram entropy", summary.unigram, ""),
        ("bigram entropy", summary.bigram, ""),
        ("validation loss", validation, "bold"),
    ):
        table.add_row(name, f"{nats:.3f}", f"{nats / math.log(2):.3f}", style=style)
    return table


def _compared(both: SideBySide) -> str:
    if both.ratio_low <= 1 <= both.ratio_high:
        verdict = "no measurable difference"
    else:
        verdict = f"{'lax' if both.ratio > 1 else 'collc'} is faster here"
    return (
        f"Side by side with jax.lax.pmean, {both.steps} steps:\n"
        f"  parameters  differ by at most {both.largest_difference:.1e} ({both.where}), "
        f"having moved by up to {both.largest_change:.1e}\n"
        f"  time        {both.plan_ms:.1f} ms a step, lax {both.lax_ms:.1f} ms; collc/lax "
        f"{both.ratio:.2f} (quartiles {both.ratio_low:.2f} to {both.ratio_high:.2f}): {verdict}"
    )
