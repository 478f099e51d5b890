"""Losses of a few layers, in the forms that code has: one by one, scanned, rematerialised."""

import functools

import jax
import numpy as np
from jax import lax

BOTH = ("host", "gpu")
LAYERS = 3
# Small whole numbers: whatever is added in whatever order is exact, and 8 divides exactly.
X = (np.arange(96, dtype=np.float32).reshape(32, 3) % 5) - 2
W = {
    "layers": {
        "w": (np.arange(27, dtype=np.float32).reshape(LAYERS, 3, 3) % 3) - 1,
        "b": (np.arange(9, dtype=np.float32).reshape(LAYERS, 3) % 2),
    },
    "head": np.array([1, 2, -1], np.float32),
}


def same(p):
    return p


def plain(w, batch, sync=same):
    """Layers one after another, each sliced out of the stack."""
    for i in range(LAYERS):
        p = sync(jax.tree.map(lambda x: x[i], w["layers"]))  # noqa: B023
        batch = batch @ p["w"] + p["b"]
    return ((batch @ w["head"]) ** 2).mean()


def scanned(w, batch, sync=same, wrap=same, unroll=1):
    def layer(x, p):
        p = sync(p)
        return x @ p["w"] + p["b"], None

    x, _ = lax.scan(wrap(layer), batch, w["layers"], unroll=unroll)
    return ((x @ w["head"]) ** 2).mean()


def inner_vmap(w, batch, sync=same):
    """A scan whose layers vmap over the examples."""

    def layer(x, p):
        def row(x):
            q = sync(p)
            return x @ q["w"] + q["b"]

        return jax.vmap(row)(x), None

    x, _ = lax.scan(layer, batch, w["layers"])
    return ((x @ w["head"]) ** 2).mean()


def vmapped(w, batch, sync=same):
    """All layers at once, beside each other."""

    def layer(p):
        p = sync(p)
        return (batch @ p["w"] + p["b"]) @ w["head"]

    return (jax.vmap(layer)(w["layers"]) ** 2).sum(0).mean()


def forms(loss, **options):
    return lambda w, batch, sync=same: loss(w, batch, sync, **options)


LOSSES = {
    "plain": plain,
    "scan": scanned,
    "unrolled scan": forms(scanned, unroll=LAYERS),
    "remat of scan": lambda w, batch, sync=same: jax.checkpoint(
        lambda w, batch: scanned(w, batch, sync)
    )(w, batch),
    "scan of remat": forms(scanned, wrap=jax.checkpoint),
    "scan of a saving remat": forms(
        scanned, wrap=lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "scan of jit": forms(scanned, wrap=jax.jit),
    "inner vmap": inner_vmap,
    "vmap": vmapped,
}


def whole(name="scan"):
    """The loss and its gradients on the whole batch: exact, so the same of all forms but one."""
    return _whole(vmapped if name == "vmap" else scanned)


@functools.cache
def _whole(loss):
    return jax.jit(jax.value_and_grad(loss))(W, X)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
