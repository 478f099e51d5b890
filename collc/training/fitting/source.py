"""What `fit` trains on: a function of t or an iterator, and its position in a checkpoint."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from collc.errors import CheckpointError, DataError
from collc.planning.agree import meet
from collc.training.fitting.feed import has_position


class Source:
    """Batches for the steps of a run, in turn: a function is asked for batch t, an iterator for its
    next item.

    ``position`` is what a checkpoint needs so that a resumed run sees the batches that it would have
    seen, as text: where an iterator is, of each process, since each has its own part; and what
    ``feed`` knows of its batches (``facts``), which have to be those of the run that was saved.
    Raises DataError for what is no data, or has too few steps.
    """

    def __init__(self, data: Any, steps: int) -> None:
        self._function: Any = data if callable(data) else None
        self._items: Any = data
        self._facts: Mapping[str, Any] | None = getattr(data, "facts", None)
        known = getattr(data, "steps", None)
        if isinstance(known, int) and known < steps:
            raise DataError(
                f"The data has {known} batches, but steps is {steps}. Train fewer steps, or more epochs."
            )
        if self._function is None:
            try:
                self._items = iter(self._items)
            except TypeError:
                raise DataError(
                    f"data is {type(data).__name__}: a function from t to batch t, or something to "
                    "iterate over, is needed."
                ) from None
        self._can = self._function is not None or has_position(self._items)

    def take(self, t: int) -> Any:
        """Batch t. DataError where an iterator has ended."""
        if self._function is not None:
            return self._function(t)
        try:
            return next(self._items)
        except StopIteration:
            raise DataError(
                f"The data ended before step {t + 1}. Train fewer steps, or give it more epochs."
            ) from None

    def position(self) -> str:
        """This process's position; "" of a function of which nothing is known."""
        if self._function is not None:
            return json.dumps({"facts": dict(self._facts)}) if self._facts is not None else ""
        return _text(self._items.get_state()) if self._can else ""

    def notes(self, position: str) -> dict[str, Any]:
        """What a checkpoint notes: the positions of all processes, None where there is none."""
        said = meet("note the position of the data", position)
        return {"data": list(said.values()) if self._can else None}

    def check_resumable(self) -> None:
        """Raises DataError where a resumed run would see other batches."""
        if not self._can:
            raise DataError(
                f"resume=True, but a {type(self._items).__name__} cannot say where it was: the resumed "
                "run would see other batches. Give data as a function of t (feed.batches), or as an "
                "iterator with get_state() and set_state(), as Grain's."
            )

    def resume(self, notes: dict[str, Any], process: int) -> None:
        """Go to where the checkpoint's run was. Raises CheckpointError, DataError."""
        self.check_resumable()
        saved = notes.get("data")
        if self._function is not None and saved is not None and all(map(_of_function, saved)):
            self._check_same(saved[process if len(saved) > process else 0])
            return
        if self._function is not None or not saved or any(map(_of_function, saved)):
            raise CheckpointError(
                "The run that saved the checkpoint had another kind of data: a function of t there or "
                "here, an iterator in the other. Resume with the data of that run."
            )
        here = len(meet("resume the data"))
        if len(saved) != here:
            raise CheckpointError(
                f"The checkpoint has the positions of {len(saved)} processes' data, but there are "
                f"{here}. Resume with as many processes, or give data as a function of t (feed.local)."
            )
        self._items.set_state(_value(saved[process]))

    def _check_same(self, saved: str) -> None:
        """Raises DataError for other batches than those of the run that was saved, as far as ``feed``
        knows them: other functions are taken at their word.
        """
        was: dict[str, Any] = json.loads(saved)["facts"] if saved else {}
        now = dict(self._facts or {})
        differ = [
            f"{name} was {was.get(name, 'missing')}, and is {now.get(name, 'missing')}"
            for name in dict.fromkeys([*was, *now])
            if was.get(name) != now.get(name)
        ]
        if was and now and differ:
            raise DataError(
                f"The run that saved the checkpoint had other batches: {'; '.join(differ)}. Resume with "
                "the data of that run, or start in a fresh folder."
            )


def _of_function(position: str) -> bool:
    return not position or "facts" in json.loads(position)


def _text(state: Any) -> str:
    """A position as text. DataError for what JSON does not keep as it is."""
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode()})
    try:
        text = json.dumps({"json": state}, allow_nan=False)
        if json.loads(text)["json"] == state:
            return text
    except (TypeError, ValueError):
        pass
    raise DataError(
        f"get_state() of the data returns {state!r}, which a checkpoint cannot hold. Return bytes, or "
        "lists, numbers, texts and dicts with texts as keys."
    )


def _value(text: str) -> Any:
    found = json.loads(text)
    return found["json"] if "json" in found else base64.b64decode(found["bytes"])
