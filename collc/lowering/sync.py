"""An identity whose transpose is a mean over the ranks: what ``collc.sync`` binds.

    y = collc_sync x          -->   x' = pmean(y')
    y = collc_sync x s        -->   x' = pmean((y' + s) / pieces)

A primitive, since ``custom_vjp`` has no jvp. Its tangent is itself, so it is linear in x; s is added
to the cotangent where one flows, and has no derivative. While ``waiting``, what is bound is there
to be seen, and its transpose is the identity.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from collc.errors import DataError
from collc.lowering import collectives, operands
from collc.lowering.use import use_of, varying
from collc.lowering.wire import Plain

NAME = "collc_sync"
SCOPE = "collc/sync"  # around the collectives of its transpose, for profilers and the check

sync_p = Primitive(NAME)
sync_p.multiple_results = True

# Marks the mean where types say that it is the same on all ranks. Its cotangent is then a share of
# one sum over the ranks, of which the sync of a second derivative takes the mean once more.
mean_p = Primitive("collc_sync_mean")

# As the plan of a step: a user context, so that inner jits are traced again.
_waits = jax.make_user_context(False)


@contextmanager
def waiting() -> Iterator[None]:
    """Within, the backward of a sync does not reduce: micro-batches but the last."""
    with _waits(True):
        yield


def is_waiting() -> bool:
    """Whether what is bound here waits."""
    return bool(_waits.value)


def synced(
    xs: Sequence[jax.Array],
    on: Any,
    *,
    add: Sequence[jax.Array] | None,
    accumulate: Any,
    wire: Any,
    specs: Sequence[PartitionSpec | None] | None,
) -> list[jax.Array]:
    """Floating-point leaves, unchanged, whose cotangents become their means, all in one reduction.

    The arguments are those of ``collc.pmean``; ``add``: what is added to the cotangents before that.
    """
    if specs is not None and not operands.automatic():
        raise DataError(
            "collc.sync: specs= has no effect here: no axis of the mesh is automatic. Drop it."
        )
    size = sum(x.size * x.dtype.itemsize for x in xs)
    use = use_of("sync", "all_reduce", on, accumulate, wire, op="mean", size=size)
    return sync_p.bind(
        *xs,
        *(map(lax.stop_gradient, add) if add is not None else ()),
        schedule=use.certificate.schedule,
        accumulate=use.accumulate,
        wire=None if use.wire == Plain() else use.wire,
        specs=None if specs is None else tuple(specs),
        casts=tuple(_casts(x, use.axes) for x in xs),
        adds=add is not None,
        pieces=1,
        waits=is_waiting(),
    )


def resumed(
    eqn: Any, xs: Sequence[jax.Array], sums: Sequence[jax.Array | None], pieces: int
) -> list[jax.Array]:
    """A sync that was bound while waiting, which reduces after all where there are sums to add.

    Other operands stay as they are.
    """
    here = [i for i, s in enumerate(sums) if s is not None]
    params = _some(eqn.params, here) | {"adds": True, "pieces": pieces, "waits": False}
    done = sync_p.bind(*(xs[i] for i in here), *(sums[i] for i in here), **params)
    outs = list(xs)
    for i, y in zip(here, done, strict=True):
        outs[i] = y
    return outs


def _casts(x: jax.Array, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes over which the type of x becomes varying; () where types do not say (check_vma=False)."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    if not missing:
        return ()
    typed = jax.typeof(lax.pcast(x, missing, to="varying")).manual_axis_type.varying
    return missing if set(missing) <= set(typed) else ()


def _count(operands: Sequence[Any], adds: bool) -> int:
    """How many operands are values; the others are their sums."""
    return len(operands) // 2 if adds else len(operands)


def _abstract(*avals: Any, casts: Any, adds: bool, **_: Any) -> list[Any]:
    outs = []
    for x, axes in zip(avals[: _count(avals, adds)], casts, strict=True):
        kind = x.manual_axis_type
        outs.append(x.update(manual_axis_type=kind.update(varying=kind.varying | set(axes))))
    return outs


def _some(params: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """The parameters for some of the values."""
    specs = params["specs"]
    return params | {
        "casts": tuple(params["casts"][i] for i in chosen),
        "specs": None if specs is None else tuple(specs[i] for i in chosen),
    }


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    outs = sync_p.bind(*primals, **params)
    moving = [i for i in range(len(outs)) if type(tangents[i]) is not ad.Zero]
    moved: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outs]
    if moving:
        sums = [primals[len(outs) + i] for i in moving] if params["adds"] else []
        done = sync_p.bind(*(tangents[i] for i in moving), *sums, **_some(params, moving))
        for i, t in zip(moving, done, strict=True):
            moved[i] = t
    return outs, moved


def _transpose(cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    n, adds = len(cts), params["adds"]
    xs, sums = operands[:n], operands[n:]
    result: list[Any] = [None] * len(operands)
    given = []
    for i, x in enumerate(xs):
        if not ad.is_undefined_primal(x):
            continue
        result[i] = cts[i] if params["waits"] else ad.Zero(x.aval)
        if not params["waits"] and (adds or type(cts[i]) is not ad.Zero):
            given.append(i)
    if not given:
        return result
    whole = [ad.instantiate_zeros(cts[i]) for i in given]
    with jax.named_scope(SCOPE):
        if adds:
            pairs = zip(whole, (sums[i] for i in given), strict=True)
            whole = [_added(ct, s, params["pieces"]) for ct, s in pairs]
        own = _some(params, given)
        means = collectives.pmean(
            whole,
            own["schedule"],
            accumulate=own["accumulate"],
            wire=own["wire"],
            specs=None if own["specs"] is None else list(own["specs"]),
        )
    sizes = jax.sharding.get_abstract_mesh().shape
    for i, axes, mean in zip(given, own["casts"], means, strict=True):
        if axes:
            mean = mean_p.bind(mean, ranks=math.prod(sizes[a] for a in axes))
        # The cotangent has the type of what was handed in, which may vary.
        result[i] = varying(mean, tuple(xs[i].aval.manual_axis_type.varying))
    return result


def _added(ct: jax.Array, s: jax.Array, pieces: int) -> jax.Array:
    """The sum, in the wider of the two dtypes until it is one of the cotangent's."""
    wide = jnp.promote_types(ct.dtype, s.dtype)
    return ((s.astype(wide) + ct.astype(wide)) / pieces).astype(ct.dtype)


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    n = _count(operands, params["adds"])
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    # A value and its sum are both batched, or neither is.
    along = [any(d is not None for d in dims[i::n]) for i in range(n)]
    front = [
        batching.bdim_at_front(x, d, size) if along[i % n] else x
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]
    if params["specs"] is not None:
        pairs = zip(params["specs"], along, strict=True)
        specs = tuple(PartitionSpec(None, *s) if s is not None and a else s for s, a in pairs)
        params = params | {"specs": specs}
    return sync_p.bind(*front, **params), [0 if a else None for a in along]


def _identity(*operands: Any, adds: bool, **_: Any) -> list[Any]:
    return list(operands[: _count(operands, adds)])


sync_p.def_impl(_identity)
sync_p.def_abstract_eval(_abstract)
ad.primitive_jvps[sync_p] = _jvp
ad.primitive_transposes[sync_p] = _transpose
batching.primitive_batchers[sync_p] = _batch
mlir.register_lowering(sync_p, lambda _, *xs, **params: _identity(*xs, **params))

mean_p.def_impl(lambda x, ranks: x)
mean_p.def_abstract_eval(lambda x, ranks: x)
ad.deflinear2(mean_p, lambda ct, x, ranks: [ct * ranks])
batching.defvectorized(mean_p)
mlir.register_lowering(mean_p, lambda _, x, ranks: [x])
