"""What a traced program asks of XLA: the collectives of its schedules, and of its own lax calls."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from collc.lowering.primitive import OURS, carried
from collc.lowering.sends import Asked, hlo_dtype, in_mesh_order, of_schedule

# By the name that jax binds: the parameter with the axes, what XLA calls it, and what it reduces by.
LAX = {
    "psum": ("axes", "all-reduce", "add"),
    "psum_invariant": ("axes", "all-reduce", "add"),  # psum under check_vma=True
    "pmax": ("axes", "all-reduce", "max"),
    "pmin": ("axes", "all-reduce", "min"),
    "all_gather": ("axis_name", "all-gather", ""),
    "all_gather_invariant": ("axis_name", "all-gather", ""),
    "reduce_scatter": ("axis_name", "reduce-scatter", "add"),
    "all_to_all": ("axis_name", "all-to-all", ""),
    "ppermute": ("axis_name", "collective-permute", ""),
    "pbroadcast": ("axis_name", "collective-broadcast", ""),
    "ragged_all_to_all": ("axis_name", "ragged-all-to-all", ""),
}


def asked(jaxpr: Any) -> tuple[Asked, ...]:
    """What a traced program asks for in one call, in the order of the program.

    ``jaxpr``: of ``jax.jit(step).trace(...)``, or of ``jax.make_jaxpr``. Loops multiply. Of a
    conditional the branch that sends most counts, all but which a receipt refuses anyway.
    """
    return tuple(_walk(jaxpr, 1, _Mesh()))


class _Mesh(NamedTuple):
    """The axes here, and which of them are manual."""

    sizes: Mapping[str, int] = {}
    manual: frozenset[str] = frozenset()

    @property
    def automatic(self) -> bool:
        return any(n > 1 for axis, n in self.sizes.items() if axis not in self.manual)

    def inside(self, eqn: Any) -> "_Mesh":
        """The mesh within a shard_map."""
        p = eqn.params
        manual = p.get("newly_manual_axes") or p["manual_axes"]  # jax 0.12, 0.10
        return _Mesh(dict(p["mesh"].shape), self.manual | set(manual))


def _walk(jaxpr: Any, times: int | None, mesh: _Mesh) -> Iterator[Asked]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == OURS:
            found = _ours(eqn, mesh)
        elif name in LAX:
            found = _lax(eqn, mesh)
        elif name == "cond":
            branches = [list(_walk(branch, times, mesh)) for branch in params["branches"]]
            found = max(branches, key=lambda each: sum(a.bytes * (a.count or 1) for a in each))
            yield from found
            continue
        else:
            inner = times
            if name == "scan":
                inner = None if times is None else times * params["length"]
            elif name == "while":
                inner = None
            here = mesh.inside(eqn) if name == "shard_map" else mesh
            for value in params.values():
                for sub in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                        yield from _walk(sub, inner, here)
            continue
        for one in found:
            n = None if times is None or one.count is None else times * one.count
            yield replace(one, count=n)


def _lax(eqn: Any, mesh: _Mesh) -> Iterator[Asked]:
    sizes = mesh.sizes
    key, kind, reduction = LAX[eqn.primitive.name]
    named = eqn.params[key]
    named = [a for a in (named if isinstance(named, tuple | list) else (named,)) if a in sizes]
    axes = tuple(a for a in sizes if a in named and sizes[a] > 1)
    edges = eqn.params.get("axis_index_groups")
    if kind == "collective-permute":
        edges = eqn.params["perm"]
    if not axes or edges == ():
        return
    listed = None if edges is None else in_mesh_order(edges, named, axes, sizes)
    for var in eqn.outvars:
        aval = var.aval
        if aval.size:
            dtype = hlo_dtype(aval.dtype)
            name = eqn.primitive.name
            one = Asked(kind, axes, listed, dtype, aval.size, 1, name, False, reduction)
            yield replace(one, free=mesh.automatic)


def _ours(eqn: Any, mesh: _Mesh) -> Iterator[Asked]:
    p = eqn.params
    shards = p["shards"] if len(p["shards"]) == len(eqn.invars) else [None] * len(eqn.invars)
    for var, k in zip(eqn.invars, shards, strict=True):
        aval = var.aval
        if not aval.size:
            continue
        dtype, wire = carried(aval.dtype, p["wire"], p["accumulate"])
        for one in of_schedule(p["proved"].by, p["op"], wire, aval.shape, dtype):
            if k is None or one.elements % k:
                yield replace(one, free=mesh.automatic)
            else:
                yield replace(one, elements=one.elements // k)
