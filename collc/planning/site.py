"""Where a plan is priced: a mesh on a machine, with the costs and rankings that are worked out there."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from jax.sharding import AbstractMesh, Mesh

from collc.language.states import COLLECTIVES
from collc.machine import nccl
from collc.machine.placement import Placement, placed
from collc.machine.readers.merge import is_file
from collc.machine.text import machine as read
from collc.machine.topology import Machine
from collc.machine.words import split
from collc.planning.by_size import BySize
from collc.planning.choose import Ranking
from collc.planning.curves import Costs


@dataclass(frozen=True)
class Chosen:
    """What was chosen by price: for each collective the schedules by size."""

    choices: tuple[tuple[str, BySize], ...]

    def of(self, collective: str) -> BySize:
        return dict(self.choices)[collective]


@dataclass(frozen=True, eq=False)
class Site:
    """A mesh on a machine. What is worked out there lives as long as the site."""

    placement: Placement

    @property
    def machine(self) -> Machine:
        return self.placement.machine

    @cached_property
    def costs(self) -> Costs:
        """Of all schedules on the mesh."""
        return Costs(self.placement)

    @cached_property
    def error(self) -> float:
        """How far the model is from posted logs, relative and median."""
        return nccl.error(self.machine, math.prod(self.placement.sizes.values()))

    @cached_property
    def _rankings(self) -> dict[tuple[tuple[str, ...], str], Ranking]:
        return {}

    def ranking(self, axes: tuple[str, ...], collective: str) -> Ranking:
        """All candidates for a collective over some of the mesh's axes."""
        key = axes, collective
        if key not in self._rankings:
            self._rankings[key] = Ranking(self.costs, axes, collective, self.error)
        return self._rankings[key]

    def choose(self, axes: tuple[str, ...]) -> Chosen:
        """The choices for all collectives."""
        return Chosen(tuple((c, self.ranking(axes, c).choices()) for c in COLLECTIVES))


def site_of(mesh: Mesh | AbstractMesh, machine: str | Machine) -> Site:
    """The site of a mesh. Raises MachineError where the machine cannot be, or the mesh does not fit.

    The machine's devices 0, 1, ... are those of the mesh's runtime, by process and then by id.
    """
    sizes = tuple((a, mesh.shape[a]) for a in mesh.axis_names)
    order = _order(mesh)
    if isinstance(machine, Machine) or any(is_file(part) for part in split(machine).parts):
        return Site(placed(read(machine), dict(sizes), order))
    return _in_words(machine, sizes, order)


@lru_cache(maxsize=2)
def _in_words(
    machine: str, sizes: tuple[tuple[str, int], ...], order: tuple[int, ...] | None
) -> Site:
    """Kept, so that a plan is quickly made again; a file may have changed, words mean the same."""
    return Site(placed(read(machine), dict(sizes), order))


def _order(mesh: Mesh | AbstractMesh) -> tuple[int, ...] | None:
    """The machine's device of each rank; None where it is the rank, as in a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        return None
    own = list(mesh.devices.flat)
    everyone = {*own, *own[0].client.devices()}
    at = {d: i for i, d in enumerate(sorted(everyone, key=lambda d: (d.process_index, d.id)))}
    found = tuple(at[d] for d in own)
    return None if found == tuple(range(len(own))) else found
