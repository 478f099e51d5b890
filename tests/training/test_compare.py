"""The side-by-side check sees what it should see: a difference where there is one, and where."""

import jax.numpy as jnp
import optax
from flax import nnx

from collc.training.lm.compare import side_by_side


class Two(nnx.Module):
    def __init__(self):
        self.same, self.other = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.zeros((2, 2)))


def fresh():
    model = Two()
    return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)


def step(slope):
    """Moves `same` by -1 a step, and one element of `other` by -slope."""

    def run(model, optimizer, batch):
        def loss(model):
            return model.same[...].sum() + slope * model.other[1, 0]

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        batches.append(batch)
        return value

    batches = []
    return run, batches


def test_equal_ways_do_not_differ():
    (one, seen), (other, also_seen) = step(1.0), step(1.0)
    done = []
    found = side_by_side(one, other, fresh, lambda t: 10 * t, 5, done=done.append)
    assert found is not None
    assert found.largest_difference == 0 and found.largest_change == 5 and found.steps == 5
    assert seen == also_seen == [0, 10, 20, 30, 40] and done == [1, 2, 3, 4, 5]


def test_a_way_that_differs_is_caught_and_named():
    found = side_by_side(step(1.0)[0], step(1.5)[0], fresh, lambda t: t, 4)
    assert found is not None
    assert (found.largest_difference, found.where) == (2.0, "other")


def test_one_step_is_enough_and_a_stop_gives_nothing():
    assert side_by_side(step(1.0)[0], step(1.0)[0], fresh, lambda t: t, 1) is not None
    assert side_by_side(step(1.0)[0], step(1.0)[0], fresh, lambda t: t, 4, lambda: True) is None
