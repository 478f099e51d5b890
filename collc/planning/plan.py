"""Plans: one schedule for each axis of a mesh, put together for every collective."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from collc.analysis.certificate import Certificate, certify
from collc.errors import MeshError, PlanError, StepError, nearest
from collc.language.algebra import Schedule
from collc.language.foreign import shown
from collc.language.ir import integer
from collc.language.states import COLLECTIVES
from collc.machine.topology import Machine
from collc.planning.agree import compare
from collc.planning.by_size import BySize
from collc.planning.compose import composed, native
from collc.planning.registry import Algorithm, algorithm
from collc.planning.site import Chosen, Site, site_of
from collc.planning.tune import Tuned, tune
from collc.receipts.timing import USES


@dataclass(frozen=True)
class Plan:
    """Which schedule each axis of a mesh takes. Made by ``collc.plan``; hashable.

    ``digest`` covers what every schedule of the plan does on its mesh, so that two plans are equal
    only where they send the same between the same devices. ``tuned``: what a sweep chose. ``site``:
    the machine that the plan is priced on; ``chosen``: what was chosen by price there.
    """

    mesh: Mesh | AbstractMesh = field(repr=False)
    sizes: tuple[tuple[str, int], ...]
    algorithms: tuple[tuple[str, Algorithm], ...] = field(compare=False)
    digest: str
    tuned: Tuned | None = field(default=None, compare=False)
    site: Site | None = field(default=None, compare=False, repr=False)
    chosen: Chosen | None = field(default=None, compare=False, repr=False)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that the plan schedules, in mesh order, outermost first."""
        return tuple(axis for axis, _ in self.algorithms)

    @property
    def ranks(self) -> int:
        """The number of ranks over all of the plan's axes."""
        return math.prod(n for axis, n in self.sizes if axis in self.axes)

    def schedule(
        self, collective: str, axes: Sequence[str] | None = None, *, size: int | None = None
    ) -> Schedule:
        """The schedule of a collective over all axes of the plan, or some of them.

        Inner axes scatter first and gather last. An axis whose schedule has no scatter form reduces at
        its level. One that has no form of the collective takes XLA's own, but for an all-reduce.
        Raises PlanError there, and for axes that are none of the plan's. ``size``: the bytes of
        a rank's full buffer, by which a plan that was tuned, or made for a machine, chooses.
        """
        if collective not in COLLECTIVES:
            raise PlanError(
                f"a plan has no {collective!r}. {nearest(str(collective), COLLECTIVES)}"
            )
        if size is not None and (integer(size) is None or size < 0):
            raise PlanError(
                f"size is a number of bytes, not {shown(size)}. Give 0 or more, or None."
            )
        if axes is not None and not isinstance(axes, list | tuple):
            raise PlanError(
                f"axes is a tuple of axis names, not {shown(axes)}. Write {self.axes!r}, or some of it."
            )
        given = self.axes if axes is None else tuple(axes)
        for axis in given:
            if axis not in self.axes:
                raise PlanError(
                    f"the plan does not schedule axis {axis!r}. {nearest(axis, self.axes)}"
                )
        chosen = tuple(a for a in self.axes if a in given)
        if not chosen:
            raise PlanError(f"{collective} over no axis. Name one of {', '.join(self.axes)}.")
        if collective != "all_reduce" and given != chosen:
            # In lax the order says how chunks are numbered; a sum has no chunks.
            raise PlanError(
                f"{collective} over {', '.join(given)}: a plan numbers ranks in the mesh's order, "
                f"{', '.join(chosen)}. Name the axes so, or pass a schedule."
            )
        if chosen == self.axes:
            return self.by_size(collective).at(size)
        return composed(dict(self.algorithms), collective, chosen)

    def by_size(self, collective: str) -> BySize:
        """The schedules of a collective over all axes of the plan; one for all sizes where named."""
        if self.chosen is not None:
            return self.chosen.of(collective)
        if self.tuned is not None and collective == "all_reduce":
            return self.tuned.choices
        if self.tuned is not None:
            return BySize(((0, native(collective) @ self.axes),))
        return BySize(((0, composed(dict(self.algorithms), collective, self.axes)),))

    @property
    def collectives(self) -> tuple[str, ...]:
        """Those that the plan has: all, but no all_reduce where an axis's algorithm has none."""
        sums = all(own.all_reduce is not None for _, own in self.algorithms)
        return tuple(c for c in COLLECTIVES if sums or c != "all_reduce")

    def meaning(self, collective: str) -> str:
        """The text of a collective's schedule; "none" where the plan has none."""
        return str(self.schedule(collective)) if collective in self.collectives else "none"

    def certificate(self, collective: str) -> Certificate:
        """The proof of a collective over all axes of the plan."""
        return certify(self.schedule(collective), dict(self.sizes))

    @property
    def text(self) -> str:
        """The plan's source: readable, and ``Plan.load`` takes it back.

        Raises PlanError where it could not, since a schedule is known by another name or by none.
        """
        from collc.planning import saved

        return saved.text(self)

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.sizes)
        auto = self.tuned is not None or self.chosen is not None
        choice = ", ".join(
            f"{json.dumps(a)}: {json.dumps('auto' if auto else x.source)}"
            for a, x in self.algorithms
        )
        more = "" if self.tuned is None else f', use="{self.tuned.use}"'
        more += "" if self.site is None else f", machine={json.dumps(str(self.site.machine))}"
        return f"collc.plan(mesh({mesh}), {{{choice}}}{more})"

    def save(self, path: str | Path) -> None:
        """Writes the plan as text. Raises PlanError if it cannot, or ``load`` could not read it back."""
        text = self.text
        try:
            Path(path).write_text(text, encoding="utf-8")
        except (OSError, TypeError, ValueError) as e:
            raise PlanError(f"cannot write the plan {path}: {e}") from None

    @staticmethod
    def load(path: str | Path, mesh: Mesh | AbstractMesh) -> "Plan":
        """Reads a plan back. Raises PlanError where the file, the mesh or a schedule has changed."""
        _check_mesh(mesh)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, TypeError, ValueError) as e:
            raise PlanError(f"cannot read the plan {path}: {e}") from None
        from collc.planning import saved

        return _compared(saved.read(text, mesh, str(path)))

    def explain(self) -> str:
        """What the plan does for each collective, against its lower bound and against XLA's own."""
        from collc.planning.explain import explain

        return explain(self)


def check_plan(plan: Any, caller: str) -> None:
    """Raises StepError for what is no plan."""
    if not isinstance(plan, Plan):
        raise StepError(f"{caller} takes a plan, not {plan!r}. See collc.plan.")


def plan(
    mesh: Mesh | AbstractMesh,
    axes: Mapping[str, str | Schedule] | Literal["auto"],
    *,
    use: str | None = None,
    machine: str | Machine | None = None,
) -> Plan:
    """A plan for a mesh: the name of an algorithm or a schedule for each axis that it schedules.

    Axes that are left out stay with XLA. Every schedule is proved here and now. ``"auto"``, for all
    axes or for each of some, has a short sweep on this machine choose the all-reduce by size, now or
    at an earlier call; the other collectives are XLA's own. ``use`` says for what: "fresh" values
    (the default), "donated" ones, or "intermediate" ones of a larger program, as a step's gradients.

    With a ``machine``, such as "dgx-h100:4", nothing is run: ``"auto"`` chooses every collective by
    its price there, for a mesh without devices too, and ``explain()`` says why; named schedules are
    priced. The machine's devices 0, 1, ... are those of the mesh's runtime, by process and id.

    Raises PlanError for unknown names and for what is neither an all-reduce nor an all-to-all,
    MeshError for unknown axes, ProofError for a schedule that is not right, MachineError for a
    machine that cannot be, or that the mesh does not fit.
    With several processes all make the same plans in the same order, and compare them here.
    """
    _check_mesh(mesh)
    if isinstance(axes, str) and axes == "auto":
        axes = dict.fromkeys(mesh.axis_names, "auto")
    if not isinstance(axes, Mapping) or not axes:
        raise PlanError(
            'a plan needs a schedule for at least one axis, as in {"gpu": "ring"}, or "auto"; not '
            f"{shown(axes)}. A schedule over several axes is given where it is used: "
            "collc.pmean(x, schedule)."
        )
    if machine is not None and use is not None:
        raise PlanError(
            f"use={use!r} is for what is measured here, machine= for what is predicted. Drop one."
        )
    _known(mesh, axes)
    where = None if machine is None else site_of(mesh, machine)
    automatic = [axis for axis, own in axes.items() if isinstance(own, str) and own == "auto"]
    if not automatic:
        if use is not None:
            raise PlanError(
                f'use={use!r} has an effect on "auto" only, which no axis takes. Drop it.'
            )
        return _compared(make(mesh, axes, site=where))
    if len(automatic) < len(axes):
        rest = ", ".join(axis for axis in axes if axis not in automatic)
        raise PlanError(
            f'"auto" chooses for all axes of a plan together, but {rest} has a schedule of its own. '
            'Name one for each of them, or "auto".'
        )
    chosen = tuple(a for a in mesh.axis_names if a in axes)
    if where is not None:
        return _compared(priced(mesh, chosen, where))
    use = "fresh" if use is None else use
    if use not in USES:
        raise PlanError(
            f"use is {', '.join(USES)}, not {use!r}. Name one, or leave it out for fresh."
        )
    return _compared(make(mesh, dict.fromkeys(chosen, "native"), tune(mesh, chosen, use)))


def priced(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], where: Site) -> Plan:
    """The plan over some axes of a mesh, in its order, that chooses by price on its site."""
    return make(mesh, dict.fromkeys(axes, "native"), site=where, chosen=where.choose(axes))


def _known(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> None:
    for axis in axes:
        if axis not in mesh.axis_names:
            raise MeshError(f"the mesh has no axis {axis!r}. {nearest(axis, mesh.axis_names)}")


def make(
    mesh: Mesh | AbstractMesh,
    axes: Mapping[str, str | Schedule],
    tuned: Tuned | None = None,
    site: Site | None = None,
    chosen: Chosen | None = None,
) -> Plan:
    """A plan that this process alone knows of: not compared with the other processes' yet."""
    _known(mesh, axes)
    named = tuple((a, algorithm(axes[a])) for a in mesh.axis_names if a in axes)
    for axis, own in named:
        if own.all_reduce is None and own.get("all_to_all") is None:
            has = " and ".join(name for name, _ in own.schedules)
            raise PlanError(
                f"{own.source} alone is no plan for {axis}: of the collectives it has {has}, but an "
                "all-reduce takes all_reduce, reduce_scatter and all_gather, or reduce and broadcast. "
                "Name a module that has them, or one schedule of both (first >> second)."
            )
    sizes = {a: mesh.shape[a] for a in mesh.axis_names}
    digests = [(axis, own.digest(axis, sizes)) for axis, own in named]
    by_size = [] if tuned is None else [("", tuned.choices)]
    for collective, choices in [*by_size, *(() if chosen is None else chosen.choices)]:
        lines = [f"{collective} {line}".strip() for line in choices.lines]
        digests += zip(lines, choices.digests(sizes), strict=True)
    ordered = tuple(sizes.items())
    digest = hashlib.sha256(f"{ordered} {digests}".encode()).hexdigest()[:16]
    made = Plan(mesh, ordered, named, digest, tuned, site, chosen)
    for collective in made.collectives:
        made.certificate(collective)
    return made


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(f"a plan is for a jax mesh, not {mesh!r}. See jax.make_mesh.")


def _compared(made: Plan) -> Plan:
    compare("plans", {"plan": str(made), "digest": made.digest})
    return made
