"""Types: which state each axis is in before a schedule, and after it."""

from dataclasses import dataclass
from typing import Any

from collc.errors import ScheduleError
from collc.language.algebra import Beside, Leaf, Schedule, Then
from collc.language.states import ROOT, kind_between

State = tuple[str, tuple[Any, ...]]  # the state's name, and which root it means, see ``_root``


@dataclass(frozen=True)
class Type:
    """The state of each axis before and after. The axis of an unplaced schedule is ""."""

    before: dict[str, State]
    after: dict[str, State]

    def signature(self) -> dict[str, tuple[str, str]]:
        return {axis: (state[0], self.after[axis][0]) for axis, state in self.before.items()}

    @property
    def roots(self) -> int:
        """How many ranks share the state root, before or after; 1 where none does."""
        return max(roots_of(s) for s in (*self.before.values(), *self.after.values()))

    def __str__(self) -> str:
        signature = self.signature()
        pairs = list(signature.values())
        if len(set(pairs)) == 1:
            return f"{','.join(b for b, _ in pairs)} -> {','.join(a for _, a in pairs)}"
        # Where axes differ, which is which matters.
        return ", ".join(f"{axis} {b} -> {a}" for axis, (b, a) in signature.items())


def roots_of(state: State) -> int:
    """How many ranks share the root that a state means; 1 where it means none."""
    return state[1][2] if state[1] else 1


def type_of(s: Schedule) -> Type:
    """The type of a normal form."""
    match s:
        case Leaf():
            before, after = ((k, _root(s) if k == ROOT else ()) for k in _ends(s))
            axes = s.axes or ("",)
            return Type(dict.fromkeys(axes, before), dict.fromkeys(axes, after))
        case Then(parts=parts):
            return chain(parts)
        case Beside(parts=parts):
            return same(parts)
    raise TypeError(f"not a normal form: {s!r}")


def same(parts: tuple[Schedule, ...]) -> Type:
    """The one type of parts that stand side by side, or a ScheduleError."""
    first = parts[0].type
    for part in parts[1:]:
        if part.type != first:
            raise ScheduleError(
                f"{parts[0]} | {part}: the parts differ in type: {_by_axis(first)} beside "
                f"{_by_axis(part.type)}. Every part has to do the same on the same axes."
            )
    if first.roots > 1:  # each part would be cut among them, not the whole
        raise ScheduleError(
            f"{' | '.join(map(str, parts))}: what stands side by side cannot begin or end at "
            f"{first.roots} roots. Put each push before its pull: (push >> pull) | (push >> pull)."
        )
    return first


def _ends(leaf: Leaf) -> tuple[str, str]:
    return leaf.facing.before, leaf.facing.after


def _root(leaf: Leaf) -> tuple[Any, ...]:
    # Rank 0 is rank 0 on every axis; any other root is told apart by how it got its name.
    moved = leaf.relabels or leaf.roots > 1
    return (leaf.axes, leaf.relabels, leaf.roots) if moved else ()


def _by_axis(t: Type) -> str:
    signature = t.signature().items()
    return ", ".join(f"{axis} {b} -> {a}".strip() for axis, (b, a) in signature)


def chain(parts: tuple[Schedule, ...]) -> Type:
    """The type of parts one after another. Raises ScheduleError where two do not meet."""
    before: dict[str, State] = {}
    after: dict[str, State] = {}
    by: dict[str, Schedule] = {}
    for part in parts:
        step = part.type
        _adjoin(part, after, by)
        for axis, needed in step.before.items():
            found = after.get(axis)
            if found is not None and found != needed:
                place = axis or "its axis"
                if found[0] == needed[0] and roots_of(found) != roots_of(needed):
                    raise ScheduleError(
                        f"{part} needs {_counted(needed)} on {place}, but {by[axis]} leaves "
                        f"{_counted(found)}. Take as many."
                    )
                if found[0] == needed[0]:
                    raise ScheduleError(
                        f"{part} needs another root on {place} than the one that {by[axis]} "
                        "leaves. Relabel both alike."
                    )
                drop = kind_between(needed[0], found[0])
                remedy = (
                    f"Drop the second {drop.name.rsplit('_')[-1]}."
                    if drop and found[0] == step.after[axis][0]
                    else f"Put something between that makes {found[0]} {needed[0]}, or drop one."
                )
                raise ScheduleError(
                    f"`{part}` needs {place} to be {needed[0]}, but after `{by[axis]}` it is "
                    f"{found[0]}. {remedy}"
                )
            if found is None:
                before[axis] = needed
        after.update(step.after)
        by.update(dict.fromkeys(step.after, part))
    return Type(before, after)


def _counted(state: State) -> str:
    k = roots_of(state)
    return f"{k} root{'s' * (k > 1)}"


def _adjoin(part: Schedule, after: dict[str, State], by: dict[str, Schedule]) -> None:
    """Refuses work on other axes while several roots hold the buffer: it might cut it otherwise."""
    before = part.type.before
    left = next((a for a, state in after.items() if roots_of(state) > 1), None)
    if left is not None and left not in before:
        raise ScheduleError(
            f"`{part}` stands behind `{by[left]}`, which ends at {roots_of(after[left])} roots on "
            f"{left}. Nothing may come between those and what begins there: move it."
        )
    asked = next((a for a, state in before.items() if roots_of(state) > 1), None)
    if asked is not None and after and asked not in after:
        raise ScheduleError(
            f"`{part}` begins at {roots_of(before[asked])} roots on {asked}, but "
            f"`{[*by.values()][-1]}` stands before it, which does not end there. Move it."
        )
