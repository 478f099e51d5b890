"""Plans as text: what the file of a plan says, and the way back."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from collc.analysis.certificate import certify
from collc.errors import CollcError, PlanError, ScheduleError
from collc.language.algebra import Schedule
from collc.language.states import COLLECTIVES
from collc.planning.by_size import BySize
from collc.planning.plan import Plan, make
from collc.planning.site import Chosen, site_of
from collc.planning.tune import Tuned
from collc.receipts.timing import USES


@dataclass(frozen=True)
class _Said:
    """What the lines of a text say. Digests are those of when the plan was made.

    ``axes``: of each one its digest and its source. ``kept``: (digest, schedule) of each choice.
    """

    sizes: dict[str, int]
    axes: dict[str, tuple[str, str]]
    meanings: dict[str, str]
    machine: str
    tuned: Tuned | None
    chosen: Chosen | None
    kept: list[tuple[str, Schedule]]


def text(plan: Plan) -> str:
    """The plan's source, with a digest of everything that it sends.

    Raises PlanError where it could not be read back.
    """
    made = "\n".join(_lines(plan)) + "\n"
    try:
        read(made, plan.mesh, "its text")
    except PlanError as e:
        raise PlanError(
            f"the plan cannot be saved: {e} Name its schedules and its machine by text, those of a "
            "file as 'path/to/file.py:name'."
        ) from e
    return made


def _lines(plan: Plan) -> Iterator[str]:
    sizes = dict(plan.sizes)
    yield "# A plan of collc: one schedule for each mesh axis."
    yield "collc-plan 1"
    yield f"mesh {_mesh(sizes)}"
    for axis, own in plan.algorithms:
        yield f"axis {axis} {own.digest(axis, sizes)} = {own.source}"
    if plan.tuned is not None:
        yield from _choices(f"tuned {plan.tuned.use}", plan.tuned.choices, sizes)
    if plan.site is not None:
        yield f"machine {_digest(str(plan.site.machine))} {plan.site.machine}"
    if plan.chosen is not None:
        for collective, own in plan.chosen.choices:
            yield from _choices(f"chosen {collective}", own, sizes)
    for collective in COLLECTIVES:
        yield f"{collective} = {plan.meaning(collective)}"


def _choices(what: str, own: BySize, sizes: Mapping[str, int]) -> Iterator[str]:
    for digest, line in zip(own.digests(sizes), own.lines, strict=True):
        yield f"{what} {digest} {line}"


def read(text: str, mesh: Mesh | AbstractMesh, path: str) -> Plan:
    """The plan of a text, checked against what its schedules are now."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or lines[0].split() != ["collc-plan", "1"]:
        raise PlanError(
            f"{path} is no plan of collc: it has to begin with 'collc-plan 1'. Give a file that "
            "Plan.save has written."
        )
    try:
        said = _said(lines[1:])
    except (ValueError, ScheduleError) as e:
        raise PlanError(f"{path} is damaged ({e}). Make the plan again.") from None
    now = {a: mesh.shape[a] for a in mesh.axis_names}
    if now != said.sizes:
        raise PlanError(
            f"{path} is for the mesh {_mesh(said.sizes)}, but this one is {_mesh(now)}. Load it for "
            "such a mesh, or make a new plan."
        )
    try:
        site = site_of(mesh, said.machine) if said.machine else None
    except CollcError as e:
        raise PlanError(f"{path}: its machine {said.machine} cannot be used: {e}") from e
    named = {axis: source for axis, (_, source) in said.axes.items()}
    try:
        result = make(mesh, named, said.tuned, site, said.chosen)
    except CollcError as e:
        raise PlanError(f"{path}: its schedules cannot be used any more: {e}") from e
    for axis, own in result.algorithms:
        then, source = said.axes[axis]
        _unchanged(path, source, f"on {axis} ", then, own.digest(axis, now))
    for then, schedule in said.kept:
        _unchanged(path, str(schedule), "", then, certify(schedule, now).digest)
    for collective, schedule in said.meanings.items():
        current = result.meaning(collective)
        if current != schedule:
            raise PlanError(
                f"{path} is damaged, or of another version: {collective} is {schedule} there, but "
                f"{current} is what its axes mean. Make the plan again."
            )
    return result


def _said(lines: Iterable[str]) -> _Said:
    """What the lines say. Raises ValueError or ScheduleError where they are none of a plan's."""
    sizes: dict[str, int] = {}
    axes: dict[str, tuple[str, str]] = {}
    meanings: dict[str, str] = {}
    machine = ""
    by_size: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for line in lines:
        word, rest = line.split(maxsplit=1)
        if word == "mesh":
            sizes = {a: int(n) for a, n in (pair.split("=") for pair in rest.split())}
        elif word == "axis":
            left, source = rest.split(" = ", 1)
            axis, digest = left.split()
            axes[axis] = digest, source
        elif word in ("tuned", "chosen"):
            name, digest, choice = rest.split(maxsplit=2)
            by_size.setdefault((word, name), []).append((digest, choice))
        elif word == "machine":
            digest, _, said = rest.partition(" ")
            if machine or not said:
                raise ValueError("its machine is said twice, or without a digest")
            machine = said
            if digest != _digest(machine):
                raise ValueError(f"its machine is {machine}, which it was not made for")
        elif word in COLLECTIVES:
            meanings[word] = rest.removeprefix("= ")
        else:
            raise ValueError(word)
    if set(meanings) != set(COLLECTIVES):
        raise ValueError("it ends too early")
    choices = {key: BySize.read(line for _, line in own) for key, own in by_size.items()}
    kept = [
        (digest, schedule)
        for key, own in by_size.items()
        for (digest, _), (_, schedule) in zip(own, choices[key].entries, strict=True)
    ]
    tuned, chosen = _tuned(choices), _chosen(choices)
    if chosen is not None and (not machine or tuned is not None):
        raise ValueError("it was chosen for a machine, but does not say all of that")
    return _Said(sizes, axes, meanings, machine, tuned, chosen, kept)


def _tuned(choices: Mapping[tuple[str, str], BySize]) -> Tuned | None:
    uses = [use for word, use in choices if word == "tuned"]
    if not uses:
        return None
    if len(uses) > 1:
        raise ValueError("it is tuned for several uses")
    (use,) = uses
    if use not in USES:
        raise ValueError(f"tuned for {use!r}, which is none of {', '.join(USES)}")
    return Tuned(use, choices["tuned", use].entries)


def _chosen(choices: Mapping[tuple[str, str], BySize]) -> Chosen | None:
    own = {name: by_size for (word, name), by_size in choices.items() if word == "chosen"}
    if not own:
        return None
    if set(own) != set(COLLECTIVES):
        raise ValueError("it was chosen for a machine, but does not say all of that")
    return Chosen(tuple((collective, own[collective]) for collective in COLLECTIVES))


def _unchanged(path: str, what: str, where: str, then: str, now: str) -> None:
    """Raises PlanError where a schedule sends something else than when the plan was made."""
    if then != now:
        raise PlanError(
            f"{path}: {what} does something else {where}today than when the plan was made (digest "
            f"{then} then, {now} now). Bring its file back, or make a new plan."
        )


def _digest(machine: str) -> str:
    return hashlib.sha256(machine.encode()).hexdigest()[:16]


def _mesh(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in sizes.items())
