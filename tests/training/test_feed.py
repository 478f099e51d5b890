"""Batches as functions of the step, and where their rows lie."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import DataError
from collc.training.fitting import feed

ROWS = {"x": np.arange(20.0).reshape(10, 2), "y": np.arange(10)}


def test_an_epoch_has_each_row_once_in_an_order_of_its_own():
    batches = feed.batches(ROWS, 5, seed=3, epochs=3)
    assert (batches.per_epoch, batches.steps) == (2, 6)
    epochs = [np.concatenate([batches(2 * e)["y"], batches(2 * e + 1)["y"]]) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = feed.batches(ROWS, 5, seed=3)  # asked in another order
    np.testing.assert_array_equal(again(5)["y"], batches(5)["y"])
    assert (batches(4)["x"][:, 0] == 2 * batches(4)["y"]).all()  # rows stay together
    with pytest.raises(DataError, match="no batch 6: the data has 6"):
        batches(6)


def test_a_short_last_batch_is_refused_dropped_or_filled_up():
    with pytest.raises(DataError, match=r'10 rows are 2 batches of 4 and 2 .*"drop".*"pad"'):
        feed.batches(ROWS, 4)
    assert feed.batches(ROWS, 4, short="drop").per_epoch == 2
    padded = feed.batches(ROWS, 4, short="pad")
    found = [padded(t) for t in range(3)]
    assert [list(w) for _, w in found] == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert all(batch["x"].shape == (4, 2) and w.dtype == np.float32 for batch, w in found)
    assert not found[2][0]["x"][2:].any()
    total = sum((batch["y"] * w).sum() for batch, w in found)
    assert total / sum(w.sum() for _, w in found) == ROWS["y"].mean()


@pytest.mark.parametrize(
    "arrays, options, said",
    [
        ({"x": np.ones(4), "y": np.ones(5)}, {}, r"\['x'\] \[4\], the batch\['y'\] \[5\]"),
        ({"x": np.float32(1)}, {}, r"arrays \[rows, ...\]"),
        ({}, {}, "none"),
        (ROWS, {"short": "dorp"}, "Known: error, drop, pad"),
        (ROWS, {"size": 0}, "size is 0: a whole number from 1"),
        (ROWS, {"size": 4.0}, "size is 4.0: a whole number"),
        (ROWS, {"size": "4"}, "size is '4': a whole number"),
        (ROWS, {"seed": -1}, "seed is -1: a whole number from 0"),
        (ROWS, {"seed": None}, "seed is None"),
        (ROWS, {"size": 11}, "Choose 1 to 10"),
        (ROWS, {"epochs": 0}, "epochs is 0: .* None for no end"),
    ],
)
def test_what_cannot_be_cut(arrays, options, said):
    with pytest.raises(DataError, match=said):
        feed.batches(arrays, **{"size": 2, **options})


def test_a_batch_is_split_over_the_devices(plan):
    placed = feed.place({"x": np.ones((16, 3))}, plan)["x"]
    sharding = NamedSharding(plan.mesh, PartitionSpec(plan.axes))
    assert placed.sharding.is_equivalent_to(sharding, 2)
    with pytest.raises(
        DataError, match=r"\['x'\] has the shape \[12, 3\].* 8 devices .* example 16"
    ):
        feed.place({"x": np.ones((12, 3))}, plan)
    with pytest.raises(DataError, match=r"\['n'\] is a scalar"):
        feed.place({"n": 3}, plan)
    with pytest.raises(DataError, match=r"\['x'\] has the dtype object"):
        feed.place({"x": np.array([None] * 8)}, plan)
    with pytest.raises(DataError, match="the batch has the dtype <U1"):
        feed.local(lambda t, rows: np.array(["a"] * 8), 8, plan)(0)


def test_local_asks_for_its_own_rows_only(plan):
    batches = feed.batches({"x": np.arange(64.0).reshape(32, 2)}, 16, seed=1)
    asked = []

    def load(t, rows):
        asked.append((t, rows.start, rows.stop))
        return batches.at(t, rows)

    got = feed.local(load, 16, plan)(3)["x"]
    assert asked == [(3, 0, 16)]  # one process has all devices, whose rows are next to each other
    np.testing.assert_array_equal(got, batches(3)["x"])
    assert got.addressable_shards[0].data.shape == (2, 2)
    with pytest.raises(DataError, match="does not divide"):
        feed.local(load, 12, plan)
    with pytest.raises(DataError, match="rows 0 to 15 of step 0 were asked for"):
        feed.local(lambda t, rows: np.ones((4, 2)), 16, plan)(0)
    with pytest.raises(DataError, match="8 rows a batch of batches of 16"):
        feed.local(batches.at, 8, plan)


def test_what_is_known_of_batches_is_known_of_global_ones(plan):
    batches = feed.batches(np.zeros((16, 2), np.float32), 8, seed=4, epochs=3)
    for data in (feed.local(batches.at, 8, plan), feed.joined(batches, plan)):
        assert (data.steps, data.facts) == (6, batches.facts)
    assert batches.facts["seed"] == 4 and batches.facts["the batch"] == "float32[2] a row"
    assert feed.local(lambda t, rows: np.zeros((8, 2)), 8, plan).facts is None


def test_the_runs_of_rows_of_some_devices_only(plan):
    class Some:
        """A sharding of which this process has devices 1, 2 and 5."""

        def addressable_devices_indices_map(self, shape):
            every = NamedSharding(plan.mesh, PartitionSpec(plan.axes)).devices_indices_map(shape)
            own = list(plan.mesh.devices.flat)
            return {own[k]: every[own[k]] for k in (5, 1, 2)}

    assert feed._runs(Some(), 16) == [(2, 6), (10, 12)]


def test_padding_that_a_process_asks_for_in_part():
    padded = feed.batches(ROWS, 8, short="pad")
    whole, weights = padded(1)
    part, own = padded.at(1, slice(1, 4))
    np.testing.assert_array_equal(part["y"], whole["y"][1:4])
    np.testing.assert_array_equal(own, weights[1:4])


def test_parts_are_joined_and_keep_their_position(plan):
    class Parts:
        def __init__(self):
            self.t = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.t += 1
            return np.full((8, 2), self.t)

        def get_state(self):
            return {"t": self.t}

        def set_state(self, state):
            self.t = state["t"]

    joined = feed.joined(Parts(), plan)
    assert isinstance(next(joined), jax.Array) and joined.get_state() == {"t": 1}
    joined.set_state({"t": 4})
    assert int(next(joined)[0, 0]) == 5
    assert not feed.has_position(feed.joined(iter([np.ones(8)]), plan))
    assert feed.joined(lambda t: np.full(8, t), plan)(3).sum() == 24
    with pytest.raises(DataError, match=r"process 0.* its 8 devices"):
        next(feed.joined([np.ones(4)], plan))
