"""The one primitive that collc binds, for every collective and every schedule.

A jaxpr shows one equation with the schedule's name; its transpose is the same primitive with the
dual schedule, and it is lowered to rounds only when XLA asks for code.

Operands are cut along dimension 0 alone (see ``lower``). Under ``check_vma=True`` the output's type
drops the axes over which the certificate has proved that all replicas are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collc.analysis.certificate import Certificate, certify
from collc.errors import MeshError, ProofError, ScheduleError
from collc.language.expand import permutation
from collc.language.states import KINDS, PARTIAL, REPLICA, ROOT
from collc.lowering.lower import frame, lower
from collc.lowering.ranks import rank_in
from collc.lowering.wire import Cast, Plain, Widened, Wire

OURS = "collc_collective"
collective_p = Primitive(OURS)
collective_p.multiple_results = True


@dataclass(frozen=True)
class Proved:
    """A certificate as the parameter of an equation, where it prints on one line."""

    by: Certificate

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.by.sizes)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return repr(self.by)


def bind(
    xs: Sequence[jax.Array],
    certificate: Certificate,
    *,
    op: str,
    wire: Wire,
    accumulate: str | None = None,
    drop: bool = True,
    shards: Sequence[int | None] = (),
) -> list[jax.Array]:
    """Binds the primitive for operands [s, ...] of one dtype each.

    ``op``: "sum", "mean", "max" or "min". ``accumulate``: the dtype in which sums of narrower
    floating-point operands are kept, the operand's own by default. ``drop``: whether a replicated
    output is typed so, as ``psum``'s is and ``all_gather``'s is not. ``shards``: over how many devices
    automatic axes shard each operand, None where XLA decides; a note for receipts, without effect.
    """
    if not isinstance(certificate, Certificate):
        raise ProofError(f"nothing is lowered without a certificate, which {certificate!r} is not.")
    schedule = certificate.schedule
    kind = schedule.collective
    if kind is None:
        raise ScheduleError(
            f"{schedule}: {schedule.type}. One collective does the same on all its axes; "
            "this one does not."
        )
    return collective_p.bind(
        *xs,
        schedule=schedule,
        kind=kind.name,
        axes=schedule.axes,
        op=op,
        proved=Proved(certificate),
        wire=wire,
        accumulate=accumulate,
        drop=drop and kind.after == REPLICA,
        shards=tuple(shards),
    )


def _impl(*xs: jax.Array, **params: Any) -> list[jax.Array]:
    raise ScheduleError(
        f"{params['schedule']} runs inside jax.shard_map only, where its axes are manual."
    )


def _shape(kind: str, ranks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    size, *rest = shape
    match kind:
        case "reduce_scatter" | "scatter":
            return (size // ranks, *rest)
        case "all_gather" | "gather":
            return (size * ranks, *rest)
    return (size, *rest)


def _abstract(*xs: Any, proved: Proved, kind: str, axes: Any, drop: bool, **_: Any) -> Any:
    n = proved.ranks
    outs = []
    for x in xs:
        varying = x.manual_axis_type.varying
        after = varying - set(axes) if drop else varying
        outs.append(
            x.update(
                shape=_shape(kind, n, x.shape),
                weak_type=False,
                manual_axis_type=x.manual_axis_type.update(varying=after),
            )
        )
    return outs


def is_narrower(dtype: Any, accumulate: str | None) -> bool:
    """Whether sums of a dtype are kept in a wider one."""
    return (
        accumulate is not None
        and jnp.issubdtype(dtype, jnp.floating)
        and jnp.dtype(dtype).itemsize < jnp.dtype(accumulate).itemsize
    )


def carried(dtype: Any, wire: Wire, accumulate: str | None) -> tuple[Any, Wire]:
    """The dtype in which sums of an operand are kept, and the format in which it travels."""
    if not is_narrower(dtype, accumulate):
        return dtype, wire
    # Sums that are kept wider travel as narrow as they came.
    return jnp.dtype(accumulate), Cast(dtype.name) if wire == Plain() else wire


def _code(
    *xs: jax.Array,
    op: str,
    proved: Proved,
    wire: Wire,
    accumulate: str | None,
    kind: str,
    **_: Any,
) -> list[jax.Array]:
    n = proved.ranks
    # Nothing is sent for an empty operand.
    done = [x if x.size else jnp.zeros(_shape(kind, n, x.shape), x.dtype) for x in xs]
    for dtype in dict.fromkeys(x.dtype for x in xs if x.size):
        own = [i for i, x in enumerate(xs) if x.dtype == dtype and x.size]
        kept, format = carried(dtype, wire, accumulate)
        values = [xs[i].astype(kept) for i in own]
        outs = lower(proved.by, "sum" if op == "mean" else op, format, values)
        for i, y in zip(own, outs, strict=True):
            done[i] = (y / n if op == "mean" else y).astype(dtype)
    return done


# ---- derivatives ----------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    if params["op"] in ("max", "min") and any(type(t) is not ad.Zero for t in tangents):
        # As in lax: p{max,min} have none.
        raise NotImplementedError(f"Differentiation rule for 'p{params['op']}' not implemented")
    outs = collective_p.bind(*primals, **params)
    if all(type(t) is ad.Zero for t in tangents):
        return outs, [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outs]
    return outs, collective_p.bind(*map(ad.instantiate_zeros, tangents), **params)


def _transpose(cts: Sequence[Any], *xs: Any, **params: Any) -> list[Any]:
    kind = KINDS[params["kind"]]
    axes: tuple[str, ...] = params["axes"]
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in xs]
    result: list[Any] = list(cts)
    given = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    for i in range(len(cts)):
        if i not in given:
            result[i] = ad.Zero(avals[i].to_tangent_aval())
    if not given:
        return result
    typed = params["drop"] and set(axes) <= set(avals[given[0]].manual_axis_type.varying)
    here = [cts[i] for i in given]
    if params["shards"]:
        params = {**params, "shards": tuple(params["shards"][i] for i in given)}
    if typed:
        # The output is one value for all ranks, so the cotangent arrives whole, and once.
        outs = [_from_replica(kind.name, ct, params) for ct in here]
    else:
        dual = certify(params["schedule"].reversed(), params["proved"].sizes)
        if isinstance(wire := params["wire"], Widened):
            sums = KINDS[kind.dual].before == PARTIAL
            params = {**params, "accumulate": wire.dtype if sums else None}
        outs = collective_p.bind(
            *here,
            **{
                **params,
                "schedule": dual.schedule,
                "proved": Proved(dual),
                "kind": kind.dual,
                "drop": False,
            },
        )
        if kind.before == "root":
            outs = [_at_roots(params, ct) for ct in outs]
    for i, out in zip(given, outs, strict=True):
        result[i] = out
    return result


def _from_replica(kind: str, ct: jax.Array, params: dict[str, Any]) -> jax.Array:
    ct = lax.pcast(ct, params["axes"], to="varying")
    sizes = params["proved"].sizes
    n = math.prod(sizes.values())
    match kind:
        case "all_reduce":
            return ct / n if params["op"] == "mean" else ct
        case "all_gather":
            k = ct.shape[0] // n
            order = frame(params["schedule"], sizes).axes
            return lax.dynamic_slice_in_dim(ct, rank_in(order, sizes) * k, k)
        case "broadcast":
            return _at_roots(params, ct)
    raise ScheduleError(f"{params['schedule']}: no derivative for a {kind} typed as replicated")


def _at_roots(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """What this device is the root of, on every axis, in the operand of a broadcast; else zeros."""
    sizes = params["proved"].sizes
    here = jnp.ones(1, bool)
    for leaf in params["schedule"].leaves():
        if leaf.facing.before != ROOT:
            continue
        n = math.prod(sizes[a] for a in leaf.axes)
        roots = permutation(leaf.relabels, n)[: leaf.roots]
        here = here & (rank_in(leaf.axes, sizes) == roots.astype("int32"))
    if len(here) > 1:
        # Equal parts of dimension 0, of which the last may be short.
        size = len(x)
        here = jnp.repeat(here, -(-size // len(here)))[:size]
    return jnp.where(here.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


# ---- batching -------------------------------------------------------------------------------------


def _batch(vmapped: Any, xs: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    if vmapped.name in params["axes"]:
        raise MeshError(
            f"{params['schedule']}: vmap has an axis {vmapped.name!r} here, which hides the mesh's. "
            "Give vmap's axis_name another name."
        )
    moved = [x if d is None else jnp.moveaxis(x, d, 1) for x, d in zip(xs, dims, strict=True)]
    outs = collective_p.bind(*moved, **params)
    return outs, [d if d is None else 1 for d in dims]


collective_p.def_impl(_impl)
collective_p.def_abstract_eval(_abstract)
ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.fancy_primitive_batchers[collective_p] = _batch
mlir.register_lowering(collective_p, mlir.lower_fun(_code, multiple_results=True))
