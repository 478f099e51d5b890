"""The language model: shapes, where it starts, that it cannot see the future, that it learns, and
that it stands alone.
"""

import ast
import dataclasses
import functools
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

    def moved(x: jax.Array) -> jax.Array:
        noise = np.random.default_rng(x.size).normal(scale=0.1, size=x.shape)
        return jnp.asarray(np.asarray(x) + noise.astype(x.dtype))

    fresh = model(config)
    nnx.update(fresh, jax.tree.map(moved, nnx.state(fresh, nnx.Param)))
    return fresh


logits_of = nnx.jit(lambda lm, text: lm(text))
loss_of = nnx.jit(transformer.loss)


def test_training_begins_at_the_loss_of_not_knowing():
    assert math.isclose(float(loss_of(model(), TEXT)), math.log(256), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shapes_and_dtypes(dtype):
    lm = shaken(Config(layers=2, width=32, heads=2, dtype=dtype, param_dtype=dtype))
    logits = logits_of(lm, TEXT)
    assert logits.shape == (2, 17, 256) and logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(lm, nnx.Param))} == {jnp.dtype(dtype)}


def test_a_byte_sees_no_later_byte_and_every_earlier_one():
    lm = shaken()
    before = np.asarray(logits_of(lm, TEXT))
    for place in (0, 8, 16):
        other = TEXT.copy()
        other[:, place] ^= 1
        changed = np.abs(np.asarray(logits_of(lm, other)) - before).max(axis=(0, 2)) > 0
        assert changed.tolist() == [t >= place for t in range(17)]


def test_order_matters():
    lm = shaken()
    swapped = TEXT[:, [1, 0, *range(2, 17)]]
    assert np.abs(np.asarray(logits_of(lm, swapped) - logits_of(lm, TEXT)))[:, -1].max() > 1e-4


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


def test_two_of_the_sizes_are_such_as_people_train():
    def fresh(config):
        return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))

    for size, least in (("medium", 350e6), ("large", 1.3e9)):
        config = SIZES[size]
        assert config.vocabulary > 50_000 and config.scan and config.remat
        assert transformer.parameters(fresh(config)) >= least


LAYERED = Config(layers=2, width=16, heads=2, vocabulary=1000)
TOKENS = np.random.default_rng(1).integers(1000, size=(2, 9), dtype=np.int32)
FORMS = [(scan, remat) for scan in (False, True) for remat in (False, True)]


def stacked(state: nnx.State) -> nnx.State:
    """What belongs to an unrolled model (its state or gradients), as to a scanned one."""
    layers = [nnx.State(state["blocks"][i]) for i in range(LAYERED.layers)]
    return nnx.State({**state, "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *layers)})


@functools.cache
def layered(scan: bool, remat: bool) -> Transformer:
    """The same weights in every form."""
    if not scan:
        return shaken(dataclasses.replace(LAYERED, remat=remat))
    scanned = model(dataclasses.replace(LAYERED, scan=True, remat=remat))
    nnx.update(scanned, stacked(nnx.state(layered(False, remat))))
    return scanned


def derived(lm: Transformer, **given) -> tuple[float, dict[str, jax.Array]]:
    """The loss and its gradients, by path."""
    step = nnx.jit(nnx.value_and_grad(lambda lm: transformer.loss(lm, TOKENS, **given)))
    loss, grads = step(lm)
    grads = grads if lm.scan else stacked(grads)
    found = jax.tree.leaves_with_path(nnx.to_pure_dict(grads))
    return float(loss), {jax.tree_util.keystr(path): g for path, g in found}


plain = functools.cache(lambda scan, remat: derived(layered(scan, remat)))


def apart(one: dict[str, jax.Array], other: dict[str, jax.Array]) -> float:
    """The largest difference, of the largest number."""
    assert one.keys() == other.keys() and len(one) > 5
    largest = max(float(jnp.abs(x).max()) for x in one.values())
    return max(float(jnp.abs(one[k] - other[k]).max()) for k in one) / largest


def test_a_scanned_layer_has_a_leading_dimension_and_values_of_its_own():
    scanned = model(dataclasses.replace(LAYERED, scan=True))
    kernel = scanned.blocks.attention.qkv.kernel.get_value()
    assert kernel.shape == (2, 16, 48) and (kernel[0] != kernel[1]).any()
    assert transformer.parameters(scanned) == transformer.parameters(layered(False, False))
    assert math.isclose(float(loss_of(scanned, TOKENS)), math.log(1000), rel_tol=1e-6)


@pytest.mark.newest_only
@pytest.mark.parametrize(("scan", "remat"), FORMS[1:])
def test_every_form_is_the_same_model(scan, remat):
    """But for rounding: XLA fuses a loop's body apart."""
    (loss, grads), (loss2, grads2) = plain(False, False), plain(scan, remat)
    assert abs(loss - loss2) < 1e-6 * loss and apart(grads, grads2) < 1e-5


@jax.custom_vjp
def tripled(params):
    """An identity of which the derivative is three times its own."""
    return params


tripled.defvjp(lambda params: (params, None), lambda _, ct: (jax.tree.map(lambda g: 3 * g, ct),))


@pytest.mark.newest_only
@pytest.mark.parametrize(("scan", "remat"), FORMS)
def test_on_layer_has_what_is_used_next(scan, remat):
    """Every parameter once, of the blocks those of one layer."""
    seen = []

    def on_layer(params):
        seen.append(tuple(sorted(x.shape for x in jax.tree.leaves(params))))
        return tripled(params)

    loss, grads = derived(layered(scan, remat), on_layer=on_layer)
    block = ((16,), (16,), (16, 16), (16, 48), (16, 64), (64, 16))
    assert set(seen) == {((1000, 16),), block, ((16,), (16, 1000))}
    assert len(seen) >= (3 if scan else 2 + LAYERED.layers)
    expected = {path: 3 * g for path, g in plain(scan, remat)[1].items()}
    assert loss == plain(scan, remat)[0] and apart(expected, grads) < 1e-6


def test_with_remat_the_loss_holds_the_logits_of_one_example():
    def shapes(lm: Transformer) -> str:
        graph, state = nnx.split(lm)
        return str(
            jax.make_jaxpr(jax.grad(lambda s: transformer.loss(nnx.merge(graph, s), TOKENS)))(state)
        )

    assert "[2,8,1000]" in shapes(layered(False, False))
    remat = shapes(layered(False, True))
    assert "[2,8,1000]" not in remat and "[8,1000]" in remat


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"width=30 must be a multiple of 2 \* heads = 4"):
        Config(width=30, heads=2)
    with pytest.raises(ValueError, match="at least 1"):
        Config(layers=0)
    with pytest.raises(ValueError, match="at least 1"):
        Config(vocabulary=0)


def test_models_import_no_collc():
    for path in Path(transformer.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "collc" for name in names), path.name
