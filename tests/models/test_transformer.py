"""The language model: shapes, where it starts, that it cannot see the future, that it learns, and
that it stands alone.
"""

import ast
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collc.models import transformer
from collc.models.transformer import SIZES, Config, Transformer

TEXT = np.random.default_rng(0).integers(256, size=(2, 17), dtype=np.uint8)


def model(config: Config = SIZES["tiny"], seed: int = 0) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(seed))


def shaken(config: Config = SIZES["tiny"]) -> Transformer:
    """A model none of whose weights is zero: a fresh one predicts the same whatever it reads."""
    fresh = model(config)
    state = nnx.state(fresh, nnx.Param)
    nnx.update(
        fresh,
        jax.tree.map(
            lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), state
        ),
    )
    return fresh


def test_training_begins_at_the_loss_of_not_knowing():
    assert math.isclose(float(transformer.loss(model(), TEXT)), math.log(256), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shapes_and_dtypes(dtype):
    lm = shaken(Config(layers=2, width=32, heads=2, dtype=dtype, param_dtype=dtype))
    logits = lm(TEXT)
    assert logits.shape == (2, 17, 256) and logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(lm, nnx.Param))} == {jnp.dtype(dtype)}


def test_a_byte_sees_no_later_byte_and_every_earlier_one():
    lm = shaken()
    before = np.asarray(lm(TEXT))
    for place in (0, 8, 16):
        other = TEXT.copy()
        other[:, place] ^= 1
        changed = np.abs(np.asarray(lm(other)) - before).max(axis=(0, 2)) > 0
        assert changed.tolist() == [t >= place for t in range(17)]


def test_order_matters():
    lm = shaken()
    swapped = TEXT[:, [1, 0, *range(2, 17)]]
    assert np.abs(np.asarray(lm(swapped) - lm(TEXT)))[:, -1].max() > 1e-4


def test_it_learns_a_short_text_by_heart():
    lm = model()
    optimizer = nnx.Optimizer(lm, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(lm, optimizer):
        loss, grads = nnx.value_and_grad(transformer.loss)(lm, TEXT)
        optimizer.update(lm, grads)
        return loss

    for _ in range(60):
        loss = step(lm, optimizer)
    assert float(loss) < 0.2


def test_the_number_of_parameters():
    width = 32
    assert transformer.parameters(model()) == 2 * 256 * width + 12 * width**2 + 3 * width


def test_the_same_seed_gives_the_same_bits():
    one, other, third = (jax.tree.leaves(nnx.state(model(seed=seed))) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert any((a != b).any() for a, b in zip(one, third, strict=True))


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"width=30 must be a multiple of 2 \* heads = 4"):
        Config(width=30, heads=2)
    with pytest.raises(ValueError, match="at least 1"):
        Config(layers=0)


def test_models_import_no_collc():
    for path in Path(transformer.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "collc" for name in names), path.name
