"""What tests of decorated steps share: a batch, parameters, a loss, and refusals."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collc
from collc.errors import StepError

BOTH = ("host", "gpu")
X = np.arange(48, dtype=np.float32).reshape(16, 3) / 48
WHOLE = np.arange(48, dtype=np.float32).reshape(16, 3) % 7 - 3  # whole numbers
W = {"a": np.full((3, 5), 0.5, np.float32), "b": np.full((5,), -0.25, np.float32)}


def planned(plan, step, batch="batch"):
    return jax.jit(collc.schedule(plan, batch=batch)(step))


def loss_fn(w, batch):
    return jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"] - 1) ** 2)


def assert_close(a, b, **how):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **how), a, b)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def refused(plan, step, *args, error=StepError, batch="batch"):
    with pytest.raises(error) as caught:
        jax.eval_shape(collc.schedule(plan, batch=batch)(step), *args)
    return str(caught.value)


def line(function, offset):
    """What the check names a line of a function, counted from its def."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno + offset} in {code.co_name}"
