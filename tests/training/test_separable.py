"""Optimizers on shards: those that work element by element pass, all others are refused."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import collc
from collc.errors import StepError
from collc.lowering.shards import Shard
from collc.training import separable

BOTH = ("host", "gpu")
TREE = {
    "w": Shard(jnp.ones((2, 4, 3, 1)), (5, 4), BOTH),
    "b": Shard(jnp.ones((2, 4, 1)), (4,), BOTH),
    "s": Shard(jnp.ones((2, 4, 1)), (), BOTH),
    "served": Shard(jnp.ones((2, 4, 10, 1)), (5, 4), BOTH, 2),
    "layers": Shard(jnp.ones((2, 4, 6, 3, 1)), (5, 4), BOTH),
}


def checked(plan, tx, tree=TREE):
    """Traces an update, in a step that has the tree for gradients and for parameters."""

    @collc.schedule(plan, batch=())
    def step(grads, params):
        new = separable.update(tx, grads, separable.init(tx, params), params)
        assert jax.tree.structure(new[0]) == jax.tree.structure(params)

    jax.make_jaxpr(step)(tree, tree)


def wide(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def transformation(f):
    """A transformation of the user's own, of each leaf."""
    return optax.stateless(lambda updates, _: jax.tree.map(f, updates))


ACCEPTED = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1, 5, 20), mask=wide),
    "adamax": optax.adamax(1e-3),
    "nadamw": optax.nadamw(1e-3),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "radam": optax.radam(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1, 0, 10)),
    "every fourth": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "by label": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()},
        lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree),
    ),
    "masked": optax.chain(optax.masked(optax.trace(0.9), wide), optax.ema(0.9), optax.clip(1.0)),
    "ours": collc.skip_nonfinite(optax.chain(collc.clip_by_global_norm(1.0), optax.adam(1e-3))),
    "a sum that is reduced": transformation(
        lambda x: x / jnp.sqrt(2 * jax.lax.psum(jnp.sum(x**2), BOTH))
    ),
    "a loop": transformation(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: 0.5 * y, x)),
    "a branch": transformation(
        lambda x: jax.lax.cond(jnp.bool_(True), jnp.zeros_like, lambda y: y, x)
    ),
    "one draw for all": transformation(lambda x: x * jax.random.normal(jax.random.key(0))),
}


def test_the_update_is_traced_with_shards_and_with_whole_parameters(plan):
    traced = []

    def update(updates, state, params=None):
        traced.append(params)
        return updates, state

    checked(plan, optax.GradientTransformation(optax.init_empty_state, update))
    assert [isinstance(tree["w"], Shard) for tree in traced] == [True, False]
    assert traced[1]["layers"].shape == (6, 5, 4)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(plan, name):
    checked(plan, ACCEPTED[name])


REFUSED = {
    "lamb": (optax.lamb(0.1), r"optax.scale_by_trust_ratio: reduce_sum .*transform.py:\d+"),
    "lars": (optax.lars(0.1), "optax.scale_by_trust_ratio: reduce_sum"),
    "adafactor": (optax.adafactor(0.1), "one number for each element, which factored"),
    "muon": (optax.contrib.muon(0.1), "optax.scale_by_muon: transpose"),
    "clip": (
        optax.clip_by_global_norm(1.0),
        "in 8 shards .*Take collc.clip_by_global_norm, or str",
    ),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "reduce_and .*Take collc.skip_nonfinite"),
    "noise": (optax.add_noise(0.1, 0.5, 0), "optax.add_noise: add of values that differ"),
    "centralize": (optax.centralize(), "optax.centralize: reduce_sum"),
    "by block": (optax.clip_by_block_rms(1.0), "optax.clip_by_block_rms: reduce_sum"),
    "novograd": (optax.novograd(0.1), "one number for each element"),
    "zero_nans": (optax.zero_nans(), r"of shape \[\] at found_nan/b for.* Drop optax.zero_nans"),
    "sm3": (optax.sm3(0.1), "keeps several values"),
}


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(plan, name):
    tx, message = REFUSED[name]
    with pytest.raises(StepError, match=message) as e:
        checked(plan, tx)
    assert "strategy.all_reduce for these parameters" in str(e.value)


def reduced_over(axes, op=jax.lax.psum, of=jnp.sum):
    return lambda x: x * op(of(x), axes)


OWN = {
    "never reduced": lambda x: x / jnp.sqrt(jnp.sum(x**2)),
    "reduced too late": lambda x: x / jax.lax.psum(jnp.sqrt(jnp.sum(x**2)), BOTH),
    "reduced over one axis": reduced_over("gpu"),
    "another reduction": reduced_over(BOTH, jax.lax.pmax),
    "the sum of maxima": reduced_over(BOTH, jax.lax.psum, jnp.max),
    "a number added on every rank": lambda x: x * jax.lax.psum(1.0 + jnp.sum(x), BOTH),
    "rounded before": lambda x: x * jax.lax.psum(jnp.sum(x).astype(int), BOTH),
    "a square": lambda x: x * jax.lax.psum(jnp.sum(x) * jnp.sum(x), BOTH),
    "the sum of the parts": lambda x: jax.lax.psum(x, BOTH),
    "a running sum": lambda x: jnp.cumsum(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "turned round": lambda x: x[::-1],
    "a product": lambda x: x @ x.T @ x if x.ndim == 2 else x * jnp.dot(x, x),
    "the largest": lambda x: x * (jnp.argmax(x) > 0),
    "by number": lambda x: x * jnp.arange(x.shape[0]).reshape(-1, *(1,) * (x.ndim - 1)),
    "random": lambda x: jax.random.normal(jax.random.key(0), x.shape),
    "a dim less": lambda x: x * jax.lax.psum(jnp.sum(x, axis=0, keepdims=True), BOTH),
    "a loop by one rank": lambda x: jax.lax.while_loop(
        lambda y: jnp.sum(y) > 1, lambda y: 0.5 * y, x
    ),
    "a branch by one rank": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda y: y, jnp.zeros_like, x),
    "a branch where any": lambda x: jax.lax.cond(jnp.any(x > 0), lambda y: y, jnp.zeros_like, x),
    "a branch by number of rank": lambda x: jax.lax.cond(
        jax.lax.axis_index("gpu") > 0, lambda y: y, jnp.zeros_like, x
    ),
    "a sum in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y * jnp.sum(y), x),
}


@pytest.mark.parametrize("name", OWN)
def test_refused_with_the_users_line(plan, name):
    tree = {k: TREE[k] for k in ("w", "b") if name != "a dim less" or k == "w"}
    with pytest.raises(StepError, match=r"one shard only \(test_separable.py:\d+ in "):
        checked(plan, transformation(OWN[name]), tree)


def by_path(function):
    """A mask, by the end of jax's own name for a leaf: of a shard that is ".value"."""
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda keys, x: function(jax.tree_util.keystr(keys)), tree
    )


def decayed(mask):
    return optax.adamw(1e-3, mask=mask)


def labelled(function):
    own = {True: optax.sgd(1.0), False: optax.sgd(0.1)}
    return optax.multi_transform(own, lambda tree: jax.tree.map(function, tree))


OTHERWISE = {
    "a path": (decayed(by_path(lambda path: not path.endswith("['b']"))), "the update of b "),
    "a size": (decayed(lambda tree: jax.tree.map(lambda x: x.size > 19, tree)), "of layers "),
    "a shape": (decayed(lambda tree: jax.tree.map(lambda x: x.shape[-1:] > (1,), tree)), "of b "),
    "a momentum": (
        optax.masked(optax.trace(0.9), by_path(lambda path: path.endswith("['b']"))),
        "trace/b is there for one of them only",
    ),
    "a label": (labelled(lambda x: x.ndim > 0), "the update of s "),
    "a number": (transformation(lambda x: x / x.size**0.5), "the update of b "),
    "a mean": (transformation(lambda x: x / jax.lax.psum(jnp.mean(x**2), BOTH)), "of b "),
    "what is kept": (
        optax.GradientTransformation(
            lambda tree: jax.tree.map(lambda x: jnp.zeros_like(x) + x.size, tree),
            lambda updates, state, params: (updates, state),
        ),
        "what it keeps at b ",
    ),
    "a key": (
        decayed(lambda tree: jax.tree_util.tree_map_with_path(lambda k, x: k[-1].key != "b", tree)),
        "whole parameters, but not their shards: AttributeError",
    ),
    "no array": (
        optax.stateless(
            lambda updates, _: updates | {"w": Shard(updates["w"].value, (5, 4), BOTH)}
        ),
        "takes shards, but not the whole parameters",
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_sees_another_path_or_size_is_refused(plan, name):
    tx, message = OTHERWISE[name]
    with pytest.raises(StepError, match=message) as e:
        checked(plan, tx)
    assert "mask=mask(params)" in str(e.value)


@pytest.mark.parametrize("mask", [dict.fromkeys(TREE, True) | {"b": False}, wide, None])
def test_masks_of_the_whole_parameters_are_accepted(plan, mask):
    checked(plan, collc.skip_nonfinite(optax.chain(decayed(mask), collc.clip_by_global_norm(1.0))))


@pytest.mark.parametrize(
    "tx, name", [(optax.polyak_sgd(), "'value'"), (optax.contrib.sophia(0.1), "obj_fn")]
)
def test_an_optimizer_that_needs_more_than_gradients(plan, tx, name):
    with pytest.raises(StepError, match=f"the optimizer's update needs {name}, which is not given"):
        checked(plan, tx)


def test_state_that_leaves_its_shard(plan):
    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, jax.tree.leaves(updates)),
    )
    with pytest.raises(StepError, match="returns another tree than it was given"):
        checked(plan, tx)


def test_a_shards_value_in_a_plain_place(plan):
    def update(updates, state, params=None):
        return updates, jax.tree.leaves(updates)[0] * 1

    tx = optax.GradientTransformation(lambda params: jnp.zeros(1), update)
    with pytest.raises(StepError, match="a result that is no shard"):
        checked(plan, tx)


def test_shards_scaled_by_what_each_rank_has_for_itself(plan):
    def update(updates, state, params=None):
        norm = jnp.linalg.norm(updates["r"].value)
        return updates | {"w": jax.tree.map(lambda x: x / norm, updates["w"])}, state

    tree = TREE | {"r": collc.Ranked(jnp.ones((2, 4, 3)))}
    tx = optax.GradientTransformation(optax.init_empty_state, update)
    with pytest.raises(StepError, match="div of what differs between ranks"):
        checked(plan, tx, tree)


def test_plain_leaves_are_free(plan):
    tree = {"w": jnp.ones((5, 4)), "r": collc.Ranked(jnp.ones((2, 4, 3)))}
    checked(plan, optax.lamb(0.1), tree)
    # Beside shards their norm is counted on every rank.
    with pytest.raises(StepError, match=r"optax\.clip_by_global_norm: reduce_sum"):
        checked(plan, optax.clip_by_global_norm(1.0), tree | TREE)
    checked(plan, collc.clip_by_global_norm(1.0), tree | TREE)
