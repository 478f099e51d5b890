"""Plans as text: what the file of a plan says, and the way back."""

from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import AbstractMesh, Mesh

from collc.analysis.certificate import certify
from collc.errors import CollcError, PlanError, ScheduleError
from collc.language.states import COLLECTIVES
from collc.planning.plan import Plan, digest_of, make, placed_on
from collc.planning.tune import Tuned, read_choices
from collc.receipts.timing import USES


def text(plan: Plan) -> str:
    """The plan's source, with a digest of everything that it sends."""
    size = dict(plan.sizes)
    lines = ["# A plan of collc: one schedule for each mesh axis.", "collc-plan 1"]
    lines += [f"mesh {_mesh(size)}"]
    lines += [f"axis {axis} {digest_of(a, axis, size)} = {a.source}" for axis, a in plan.algorithms]
    if plan.tuned is not None:
        for (_, schedule), line in zip(plan.tuned.choices, plan.tuned.lines, strict=True):
            lines.append(f"tuned {plan.tuned.use} {certify(schedule, size).digest} {line}")
    if plan.chosen is not None:
        lines.append(f"machine {plan.chosen.machine}")
        for collective, choices in plan.chosen.choices:
            for least, schedule in choices:
                digest = certify(schedule, size).digest
                lines.append(f"chosen {collective} {digest} {least} = {schedule}")
    lines += [f"{collective} = {plan.meaning(collective)}" for collective in COLLECTIVES]
    return "\n".join(lines) + "\n"


def read(text: str, mesh: Mesh | AbstractMesh, path: str) -> Plan:
    """The plan of a text, checked against what its schedules are now."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or lines[0].split() != ["collc-plan", "1"]:
        raise PlanError(f"{path} is no plan of collc: it has to begin with 'collc-plan 1'.")
    named: dict[str, str] = {}
    digests: dict[str, str] = {}
    meanings: dict[str, str] = {}
    sizes: dict[str, int] = {}
    tuned: dict[str, list[tuple[str, str]]] = {}
    priced: dict[str, list[tuple[str, str]]] = {}
    machine = ""
    try:
        for line in lines[1:]:
            word, rest = line.split(maxsplit=1)
            if word == "mesh":
                sizes = {a: int(n) for a, n in (pair.split("=") for pair in rest.split())}
            elif word == "axis":
                left, source = rest.split(" = ", 1)
                axis, digest = left.split()
                named[axis], digests[axis] = source, digest
            elif word == "tuned":
                use, digest, line = rest.split(maxsplit=2)
                tuned.setdefault(use, []).append((digest, line))
            elif word == "machine":
                machine = rest
            elif word == "chosen":
                collective, digest, line = rest.split(maxsplit=2)
                priced.setdefault(collective, []).append((digest, line))
            elif word in COLLECTIVES:
                meanings[word] = rest.removeprefix("= ")
            else:
                raise ValueError(word)
        if set(meanings) != set(COLLECTIVES):
            raise ValueError("it ends too early")
        if len(tuned) > 1:
            raise ValueError("it is tuned for several uses")
        by_size = None
        for use, own in tuned.items():
            if use not in USES:
                raise ValueError(f"tuned for {use!r}, which is none of {', '.join(USES)}")
            by_size = Tuned(use, read_choices([line for _, line in own]))
        if priced and (set(priced) != set(COLLECTIVES) or not machine or tuned):
            raise ValueError("it was chosen for a machine, but does not say all of that")
        choices = tuple((c, read_choices([line for _, line in own])) for c, own in priced.items())
    except (ValueError, ScheduleError) as e:
        raise PlanError(f"{path} is damaged ({e}). Make the plan again.") from None
    now = {a: mesh.shape[a] for a in mesh.axis_names}
    if now != sizes:
        raise PlanError(f"{path} is for the mesh {_mesh(sizes)}, but this one is {_mesh(now)}.")
    try:
        on = replace(placed_on(mesh, machine), choices=choices) if machine else None
    except CollcError as e:
        raise PlanError(f"{path}: its machine {machine} cannot be used: {e}") from e
    try:
        result = make(mesh, named, by_size, on)
    except CollcError as e:
        raise PlanError(f"{path}: its schedules cannot be used any more: {e}") from e
    for axis, own in result.algorithms:
        was, is_now = digests[axis], digest_of(own, axis, now)
        _unchanged(path, named[axis], f"on {axis} ", was, is_now)
    kept = [(own, by_size.choices) for own in tuned.values() if by_size is not None]
    kept += [(priced[collective], own) for collective, own in choices]
    for own, known in kept:
        for (digest, _), (_, schedule) in zip(own, known, strict=True):
            _unchanged(path, str(schedule), "", digest, certify(schedule, now).digest)
    for collective, schedule in meanings.items():
        current = result.meaning(collective)
        if current != schedule:
            raise PlanError(
                f"{path} is damaged, or of another version: {collective} is {schedule} there, but "
                f"{current} is what its axes mean. Make the plan again."
            )
    return result


def _unchanged(path: str, what: str, where: str, then: str, now: str) -> None:
    """Raises PlanError where a schedule sends something else than when the plan was made."""
    if then != now:
        raise PlanError(
            f"{path}: {what} does something else {where}today than when the plan was made (digest "
            f"{then} then, {now} now). Bring its file back, or make a new plan."
        )


def _mesh(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in sizes.items())
