"""What a job has left: whether its losses, its samples and its parameters are as they have to be."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Left:
    """What a job has left. ``losses``: of the lines of its metrics, in their order, by step.

    ``samples``: by host, a row for each step that it finished, also those that were lost later.
    ``copies``: digests of the parameters on each device of each host at the end.
    """

    losses: Sequence[tuple[int, float]]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    copies: Sequence[str]

    @property
    def consumed(self) -> dict[int, list[int]]:
        """By step the samples of all hosts that count: of the last attempt that took the step."""
        last: dict[int, int] = {}
        for rows in self.samples.values():
            for row in rows:
                last[row["step"]] = max(last.get(row["step"], 0), row["attempt"])
        found: dict[int, list[int]] = {step: [] for step in sorted(last)}
        for rows in self.samples.values():
            for row in rows:
                if row["attempt"] == last[row["step"]]:
                    found[row["step"]] += row["ids"]
        return found


def left(run: Path, notes: Path) -> Left:
    """Reads what the processes wrote."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Left(
        [(row["step"], row["loss"]) for row in metrics],
        {path.stem: _rows(path) for path in sorted(notes.glob("*.samples"))},
        [digest for path in sorted(notes.glob("*.end")) for digest in json.loads(path.read_text())],
    )


def trouble(found: Left, undisturbed: Left, steps: int, rows: int, copies: int) -> list[str]:
    """What is wrong with a job of so many steps, whole epochs of ``rows`` samples; nothing if all is
    as it has to be. ``copies``: on how many devices the parameters are.

    Of the samples it is looked at twice, whether each epoch has each of them once, and whether each
    step has those that it had when nobody disturbed it.
    """
    wrong = []
    if [step for step, _ in found.losses] != list(range(1, steps + 1)):
        wrong.append("the metrics do not have each step once")
    if found.losses != undisturbed.losses:
        pairs = zip(found.losses, undisturbed.losses)
        first = next((a[0] for a, b in pairs if a != b), "the last ones")
        wrong.append(f"losses differ from step {first} on")
    consumed = found.consumed
    if missing := set(range(1, steps + 1)) - set(consumed):
        wrong.append(f"nobody consumed the samples of steps {sorted(missing)}")
    batch = sum(map(len, undisturbed.consumed.values())) // steps
    for epoch in range(steps * batch // rows):
        first = epoch * rows // batch + 1
        ids = Counter(i for s in range(first, first + rows // batch) for i in consumed.get(s, []))
        lost = rows - len(ids)
        again = sum(times > 1 for times in ids.values())
        if lost or again:
            wrong.append(f"epoch {epoch}: {lost} samples lost, {again} repeated")
    if {s: sorted(ids) for s, ids in consumed.items()} != {
        s: sorted(ids) for s, ids in undisturbed.consumed.items()
    }:
        wrong.append("some steps have other samples")
    if len(found.copies) != copies or len(set(found.copies)) != 1:
        wrong.append(
            f"{len(found.copies)} copies of the parameters, {len(set(found.copies))} kinds"
        )
    elif found.copies != undisturbed.copies:
        wrong.append("other parameters at the end")
    return wrong


def _rows(path: Path) -> list[dict[str, Any]]:
    """A line of a process that was killed may be cut off, and the next one begins after it."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.endswith("}"):
            found.append(json.loads(line[line.rindex("{") :]))
    return found


def resumed(found: Left, attempt: int) -> int | None:
    """The step from which the first attempt that took one went on, of this one and those after it."""
    taken = [
        (row["attempt"], row["step"])
        for rows in found.samples.values()
        for row in rows
        if row["attempt"] >= attempt
    ]
    return min(taken)[1] - 1 if taken else None
