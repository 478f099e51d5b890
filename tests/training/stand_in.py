"""A stand-in for what collc binds, so far as the replication check looks at it; and what is checked.

Steps are step(w, x), traced as a step gets them: in a shard_map without check_vma.
"""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collc.errors import StepError
from collc.training.check.replication import check

AXES = {"host": 2, "gpu": 4}
BOTH, NONE = frozenset(AXES), frozenset()
X = np.arange(48, dtype=np.float32).reshape(16, 3) / 48  # the batch
W = np.array([0.5, -1.0, 2.0], np.float32)  # the parameters

ours = Primitive("collc_collective")
ours.multiple_results = True
ours.def_abstract_eval(lambda *xs, **_: list(xs))
# Linear, and its own transpose.
ad.deflinear2(ours, lambda cts, *xs, **params: ours.bind(*cts, **params))


def _lower(*xs, axes, op, **_):
    reduce = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}[op]
    return [reduce(x, axes) for x in xs]


mlir.register_lowering(ours, mlir.lower_fun(_lower, multiple_results=True))


def bind(x, axes=("host", "gpu"), kind="all_reduce", op="mean"):
    leaves, tree = jax.tree.flatten(x)
    axes = (axes,) if isinstance(axes, str) else axes
    return tree.unflatten(ours.bind(*leaves, axes=axes, kind=kind, op=op, schedule="ring"))


# Like the frames of collc itself, this one is no user line.
bind.__code__ = bind.__code__.replace(co_filename="<collc>")


def loss(w, x):
    return jnp.mean((x @ w - 1) ** 2)


def mesh():
    auto = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("host", "gpu"), axis_types=auto, devices=jax.devices()[:8])


def checked(step, w=W, x=X):
    """The check of step(w, x), with w replicated and x split over all devices."""
    seen = []

    def body(w, x):
        jaxpr = jax.make_jaxpr(step)(w, x)
        leaves = jax.tree.leaves(w), jax.tree.leaves(x)
        seen.append(check(jaxpr, [NONE] * len(leaves[0]) + [BOTH] * len(leaves[1]), AXES))
        return jnp.zeros(1)

    spec = P(("host", "gpu"))
    mapped = jax.shard_map(body, mesh=mesh(), in_specs=(P(), spec), out_specs=spec, check_vma=False)
    jax.eval_shape(mapped, w, x)
    return seen[0]


def refusal(step, **kw):
    with pytest.raises(StepError) as error:
        checked(step, **kw)
    return str(error.value)


def here(step, text):
    """The source line of step that holds text, as the check names it."""
    lines, first = inspect.getsourcelines(step)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{Path(step.__code__.co_filename).name}:{first + offset}"
