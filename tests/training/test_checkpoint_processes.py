"""Checkpoints of two real processes with two devices each, on one file system."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import CheckpointError
from collc.lowering.shards import Shard
from collc.training.checkpoints import checkpoint
from collc.training.kinds import Ranked

from ..processes import outputs

STATE = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    import collc
    from collc.errors import CheckpointError
    from collc.lowering.shards import Shard
    from collc.training.checkpoints import checkpoint
    from collc.training.kinds import Ranked

    port, me, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    collc.init(f"127.0.0.1:{port}", 2, me, timeout_s=60)
    mesh = jax.make_mesh((2, 2), ("host", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(x, *axes):
        x = np.asarray(x); x = x.astype(np.int32) if x.dtype == np.int64 else x
        sharding = jax.sharding.NamedSharding(mesh, jax.P(*axes))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def state(scale):
        row = np.arange(8, dtype=np.float32) * (np.arange(8) < 7) * scale
        return {
            "shard": Shard(put(row.reshape(2, 2, 2), "host", "gpu"), (7,), ("host", "gpu")),
            "ranked": Ranked(put(np.full((2, 3), 5 * scale), "host"), ("host",)),
            "plain": put(np.arange(3) * scale),
            "own": jnp.int32(7 * scale),
            "key": jax.random.key(3 * scale),
            "steps": 4 * scale,
        }

    def bits(tree):
        tree = jax.tree.map(lambda x: getattr(x, "addressable_shards", None) and [
            np.asarray(jax.random.key_data(s.data) if "key" in str(x.dtype) else s.data).tobytes()
            for s in x.addressable_shards] or x, tree)
        return jax.tree.leaves(tree)
    """
)
SAVE = STATE + textwrap.dedent(
    """
    assert checkpoint.find(folder) is None
    checkpoint.save(folder, 1, state(1), {"at": 1})
    write = checkpoint.ocp.PyTreeCheckpointHandler.save

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if me == 1:
        checkpoint.ocp.PyTreeCheckpointHandler.save = full
    try:
        checkpoint.save(folder, 2, state(2), {})
    except CheckpointError as e:
        print("REFUSED", e, flush=True)
    checkpoint.ocp.PyTreeCheckpointHandler.save = write
    assert checkpoint.latest(folder).step == 1
    checkpoint.save(folder, 3, state(1), {"at": 3})
    back = checkpoint.restore(checkpoint.latest(folder), state(0))
    assert bits(back) == bits(state(1))
    """
)
RESTORE = STATE + textwrap.dedent(
    """
    found = checkpoint.latest(folder)
    assert found.step == 4 and found.notes == {"at": 4}
    assert bits(checkpoint.restore(found, state(0))) == bits(state(2))
    try:
        checkpoint.restore(found, {**state(0), "own": jnp.float32(0)})
    except CheckpointError as e:
        print("REFUSED", e, flush=True)
    """
)


def on_one_device(scale):
    mesh = jax.make_mesh((1, 1), ("host", "gpu"), devices=jax.devices()[:1])

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    row = np.arange(7, dtype=np.float32) * scale
    return {
        "shard": Shard(put(row.reshape(1, 1, 7), "host", "gpu"), (7,), ("host", "gpu")),
        "ranked": Ranked(put(np.full((1, 3), 5 * scale, np.int32), "host"), ("host",)),
        "plain": put(np.arange(3, dtype=np.int32) * scale),
        "own": jnp.int32(7 * scale),
        "key": jax.random.key(3 * scale),
        "steps": 4 * scale,
    }


@pytest.mark.newest_only
def test_from_two_processes_to_one_device_and_back(tmp_path):
    folder = tmp_path / "checkpoints"
    said = outputs(SAVE, folder)
    assert "No space left on device" in said[1]
    assert "process 1 says: " in said[0] and "No space left on device" in said[0]
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000001", "step_00000003"]
    found = checkpoint.latest(folder)
    assert found.notes == {"at": 3}
    back, want = checkpoint.restore(found, on_one_device(0)), on_one_device(1)
    assert jax.tree.structure(back) == jax.tree.structure(want)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all() if hasattr(a, "all") else a == b), back, want)
    )
    checkpoint.save(folder, 4, on_one_device(2), {"at": 4})
    for out in outputs(RESTORE, folder):
        assert "own is int32[] there, but float32[] here" in out


def test_a_failure_elsewhere_is_an_error_here(monkeypatch):
    from collc.training.checkpoints import together

    monkeypatch.setattr(together, "meet", lambda topic, said, timeout: {0: said, 1: '"disk full"'})
    with pytest.raises(CheckpointError, match="process 1 says: disk full"):
        together.together("x", lambda: 1)
