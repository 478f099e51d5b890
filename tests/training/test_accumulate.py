"""value_and_grad of strategies: one global loss, differentiated on each rank and reduced once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import collc
from collc import strategy
from collc.errors import DataError, StepError

from .asked import collectives

# Small whole numbers: whatever is added in whatever order is exact, and 8 divides exactly.
X = (np.arange(96, dtype=np.float32).reshape(32, 3) % 5) - 2
W = {"a": np.float32([1, -2, 3]), "b": np.float32([2, 2, -1]), "unused": np.ones(4, np.float32)}
# Rank 2 has no tokens at all; ranks 0 and 5 none in their first half.
MASK = np.float32(
    [[0, 0, 1, 1], [1] * 4, [0] * 4, [1] * 4, [1, 0, 0, 1], [0, 0, 0, 1]] + [[1] * 4] * 2
)
MASK = MASK.reshape(32)


def loss_fn(w, x):
    return jnp.mean((x @ w["a"]) * (x @ w["b"]))


@functools.cache
def of_the_whole_batch():
    """The loss and its gradients on the whole batch."""
    return jax.jit(jax.value_and_grad(loss_fn))(W, X)


def masked_loss(w, batch):
    """The mean over this rank's tokens: 0 / 0 where it has none."""
    x, mask = batch
    return (x @ w["a"] * (x @ w["b"]) * mask).sum() / mask.sum()


def tokens(w, batch):
    return batch[1].sum()


def step_of(s, loss, **options):
    step = collc.schedule(s.plan, batch="batch")(
        lambda w, batch: s.value_and_grad(loss, **options)(w, batch)
    )
    return jax.jit(step)


def run(s, loss, w, batch, **options):
    return step_of(s, loss, **options)(w, batch)


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-7, atol=1e-7), a, b)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_equals_the_whole_batch_and_reduces_once(plan, permutes, k):
    s = collc.strategies({"*": strategy.all_reduce(plan)})
    step = collc.schedule(plan, batch="x")(
        lambda w, x: s.value_and_grad(loss_fn, microbatches=k)(w, x)
    )
    compiled = jax.jit(step).lower(W, X).compile()
    jax.tree.map(np.testing.assert_array_equal, compiled(W, X), of_the_whole_batch())
    assert permutes(compiled) == plan.certificate("all_reduce").rounds


def test_shards_that_the_loss_gathers_travel_for_each_piece(plan):
    s = collc.strategies({"*": strategy.server(plan)})
    shard = collc.Shard(jnp.ones((2, 4, 1)), (3,), ("host", "gpu"))

    def loss(w, x):
        return jnp.mean((x @ collc.all_gather(w)) ** 2)

    for k in (2, 4):
        step = collc.schedule(plan, batch="x")(
            lambda w, x, k=k: s.value_and_grad(loss, microbatches=k)(w, x)
        )
        found = list(collectives(jax.make_jaxpr(step)(shard, X)))
        # The parts of the gather, the whole of its transpose, and the loss, which is not of shards.
        assert found == [("float32", 1, k), ("float32", 8, k), ("float32", 1, 1)]


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_are_a_mean_over_all_of_them(plan, k):
    s = collc.strategies({"*": strategy.all_reduce(plan, mean="tokens")})
    step = step_of(s, masked_loss, microbatches=k, tokens=tokens)
    equal(step(W, (X, MASK)), jax.jit(jax.value_and_grad(masked_loss))(W, (X, MASK)))
    value, grads = step(W, (X, MASK * 0))
    assert value == 0 and not any(map(np.any, jax.tree.leaves(grads)))


def test_participants(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan, mean="participants")})
    here = np.repeat(np.float32([1, 1, 0, 1, 0, 0, 0, 1]), 4)
    x = np.where(here[:, None], X, np.nan)
    found = run(s, lambda w, b: loss_fn(w, b[0]), W, (x, here), participates=lambda w, b: b[1][0])
    equal(found, jax.jit(jax.value_and_grad(loss_fn))(W, X[here > 0]))


def test_experts_and_own_parameters_of_a_weighed_loss(plan):
    s = collc.strategies(
        {
            "expert": strategy.local("gpu", mean="world"),
            "own": strategy.local("gpu", mean="tokens"),
            "*": strategy.all_reduce(plan, mean="tokens"),
        }
    )
    counts = np.float32([1, 3, 0, 2, 4, 0, 5, 1])
    w = {
        "expert": collc.Ranked(np.float32([1, 2, 3, 4]), "gpu"),
        "own": collc.Ranked(np.float32([2, 1, 2, 1]), "gpu"),
        "shared": np.float32(3),
    }

    def loss(w, batch):
        # Row e of each rank goes to the expert of gpu e, and comes back.
        there = collc.all_to_all(batch[0][0], "gpu", 0, 0)
        back = collc.all_to_all(there * w["expert"].value, "gpu", 0, 0)
        return jnp.mean(back) * w["shared"] + w["own"].value ** 2 * batch[0][0, 0]

    step = collc.schedule(plan, batch="batch")(
        lambda w, batch: s.value_and_grad(loss, tokens=lambda w, b: b[1][0])(w, batch)
    )
    rows = X[:, 0].reshape(8, 4)
    value, found = jax.jit(step)(w, (rows, counts))

    def whole(w, counts):
        per_rank = (rows * w["expert"].value).mean(1) * w["shared"]
        per_rank += jnp.tile(w["own"].value ** 2, 2) * rows[:, 0]
        return (counts * per_rank).sum() / counts.sum()

    expected = jax.jit(jax.value_and_grad(whole))(w, counts)
    equal(
        (value, found["expert"], found["shared"]),
        (expected[0], *map(expected[1].get, ("expert", "shared"))),
    )
    by_gpu = (counts * rows[:, 0]).reshape(2, 4).sum(0) / np.maximum(counts.reshape(2, 4).sum(0), 1)
    equal(found["own"].value, 2 * w["own"].value * by_gpu)


@pytest.mark.parametrize("k", [1, 2])
def test_shards_of_a_weighed_loss(plan, k):
    held = strategy.server(plan, mean="tokens")
    s = collc.strategies({"a": held, "b": held})
    counts = np.repeat(np.float32([1, 3, 0, 2, 4, 0, 5, 1]), 4)
    w = {"a": W["a"], "b": W["b"]}
    pad = np.pad(w["a"], (0, 5)).reshape(2, 4, 1)
    own = w | {"a": collc.Shard(pad, (3,), ("host", "gpu"))}

    def gathered(w, batch):
        return loss_fn(w | {"a": collc.all_gather(w["a"])}, batch[0])

    def counted(w, batch):
        return batch[1][0]

    value, grads = run(s, gathered, own, (X, counts), microbatches=k, tokens=counted)

    def whole(w):
        products = (X @ w["a"]) * (X @ w["b"])
        return (counts * products).sum() / counts.sum()

    expected = jax.jit(jax.value_and_grad(whole))(w)
    found = {name: g.value.reshape(-1)[:3] for name, g in grads.items()}
    equal((value, found), expected)


def test_unused_parameters_of_servers_are_not_sent(plan):
    s = collc.strategies({"*": strategy.server(plan)}, bucket=1)
    step = collc.schedule(plan, batch="x")(lambda w, x: s.value_and_grad(loss_fn)(w, x))
    assert sorted(n for _, n, _ in collectives(jax.make_jaxpr(step)(W, X))) == [1, 8, 8]
    unused = jax.jit(step)(W, X)[1]["unused"]
    assert unused.shape == (4,) and not np.any(unused.value)


def test_unused_parameters_are_not_sent(plan, permutes):
    sent = [3, 2]  # a and b, and the loss
    for mean, how in (("ranks", {}), ("tokens", {"tokens": lambda w, x: x.shape[0]})):
        s = collc.strategies({"*": strategy.all_reduce(plan, mean=mean)}, bucket=16)
        grad = s.value_and_grad(loss_fn, **how)
        step = collc.schedule(plan, batch="x")(lambda w, x, grad=grad: grad(w, x))
        compiled = jax.jit(step).lower(W, X).compile()
        np.testing.assert_array_equal(compiled(W, X)[1]["unused"], np.zeros(4))
        assert permutes(compiled) == len(sent) * plan.certificate("all_reduce").rounds
        assert any("elided" in note for note in step.notes)


def test_tied_weights_are_summed_once(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)})

    def tied(w, x):
        return jnp.mean((x @ w["a"]) * (x @ w["a"]))

    expected = jax.jit(jax.value_and_grad(tied))(W, X)
    equal(run(s, tied, W, X), expected)

    class Tied(nnx.Module):
        def __init__(self):
            self.first = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
            self.second = self.first
            self.seen = nnx.BatchStat(jnp.zeros(()))

    def loss(model, x):
        model.seen[...] = model.seen[...] + 1
        return jnp.mean((x @ model.first[...]) * (x @ model.second[...]))

    for k in (1, 2):
        model = Tied()
        step = collc.schedule(plan, batch="x")(
            lambda model, x, k=k: s.value_and_grad(loss, microbatches=k)(model, x)
        )
        value, grads = nnx.jit(step)(model, X)
        assert model.seen[...] == k and len(jax.tree.leaves(grads)) == 1
        equal((value, grads["first"][...]), (expected[0], expected[1]["a"]))


def test_narrow_micro_batches_are_added_in_float32(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)})
    # On each device 1, then 7 times 1/256: in bfloat16 the small ones vanish one by one.
    x = np.tile(np.array([1.0] + [2.0**-8] * 7), 8).astype(jnp.bfloat16)
    _, found = run(s, lambda w, x: (w * x).sum(), jnp.bfloat16(1), x, microbatches=8)
    assert found.dtype == jnp.bfloat16
    assert float(found) == float(jnp.bfloat16((1 + 7 * 2.0**-8) / 8))


def test_what_a_sync_has_reduced_is_not_sent_again(plan, permutes):
    s = collc.strategies({"*": strategy.all_reduce(plan)})

    def synced(w, x):
        return loss_fn(collc.sync(w), x)

    for k in (1, 2):
        step = collc.schedule(plan, batch="x")(
            lambda w, x, k=k: s.value_and_grad(synced, microbatches=k)(w, x)
        )
        compiled = jax.jit(step).lower(W, X).compile()
        equal(compiled(W, X), of_the_whole_batch())
        assert permutes(compiled) == 2 * plan.certificate("all_reduce").rounds


def test_aux_argnums_and_keywords(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)})

    def loss(scale, x, w, *, power=1):
        value = jnp.mean(x @ w["a"]) * scale**power
        return value, collc.Batch(x[:, 0])

    step = collc.schedule(plan, batch="x")(
        lambda w, x: s.value_and_grad(loss, (-1, 0), True, microbatches=2)(2.0, x, w=w, power=2)
    )
    (value, aux), grads = jax.jit(step)(W, X)
    equal((value, aux.value if hasattr(aux, "value") else aux), (4 * np.mean(X @ W["a"]), X[:, 0]))
    equal(grads[0]["a"], 4 * X.mean(0))
    equal(grads[1], 4 * np.mean(X @ W["a"]))


def test_refusals(plan):
    both = collc.strategies(
        {"a": strategy.all_reduce(plan), "*": strategy.all_reduce(plan, mean="tokens")}
    )
    with pytest.raises(StepError, match="weighed by tokens; but mean=\"ranks\" of 'a' is another"):
        both.value_and_grad(loss_fn, tokens=tokens)
    with pytest.raises(StepError, match="tokens= was not given"):
        both.value_and_grad(loss_fn)
    s = collc.strategies({"*": strategy.all_reduce(plan)})
    with pytest.raises(StepError, match="tokens= has no effect"):
        s.value_and_grad(loss_fn, tokens=tokens)
    with pytest.raises(StepError, match="by a function of the loss's arguments, not 3"):
        collc.strategies({"*": strategy.all_reduce(plan, mean="tokens")}).value_and_grad(
            loss_fn, tokens=3
        )
    with pytest.raises(StepError, match="inside a step that is decorated"):
        s.value_and_grad(loss_fn)(W, X)
    with pytest.raises(StepError, match="batch='w' is differentiated"):
        s.value_and_grad(loss_fn, batch="w")
    with pytest.raises(StepError, match="loss_fn has no argument 'y'"):
        s.value_and_grad(loss_fn, batch="y")
    with pytest.raises(DataError, match="positive integer"):
        s.value_and_grad(loss_fn, microbatches=0)
    with pytest.raises(DataError, match="none of the loss's arguments is a batch"):
        run_closed = collc.schedule(plan, batch="x")(
            lambda w, x: s.value_and_grad(lambda w: loss_fn(w, x), microbatches=2)(w)
        )
        run_closed(W, X)


def test_a_closed_over_batch(plan):
    s = collc.strategies({"*": strategy.all_reduce(plan)})
    step = collc.schedule(plan, batch="x")(
        lambda w, x: s.value_and_grad(jax.checkpoint(lambda w: loss_fn(w, x)))(w)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(W, X), of_the_whole_batch())
