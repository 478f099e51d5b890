"""Checkpoints come back bit for bit, or are refused with the reason; nothing is lost."""

import errno
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts

from collc.errors import CheckpointError
from collc.training.checkpoints import checkpoint, manifest
from collc.training.checkpoints.files import write_text

NOTES = {"plan": "ring", "identity": {"seed": 1}}


def state(seed: float = 0.0):
    return {
        "model": {
            "0": {"kernel": jnp.linspace(seed, 1, 4096).reshape(64, 64)},
            "scale": jnp.ones(3, jnp.bfloat16) * seed,
        },
        "optimizer": {"step": jnp.uint32(7), "moments": [jnp.float32(0.1), jnp.arange(5)]},
    }


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    path = checkpoint.save(tmp_path, 12, state(0.3), NOTES)
    found = checkpoint.latest(tmp_path)
    assert (found.folder, found.step, found.notes) == (path, 12, NOTES)
    back = checkpoint.restore(found, state())
    assert jax.tree.structure(back) == jax.tree.structure(state())
    for old, new in zip(jax.tree.leaves(state(0.3)), jax.tree.leaves(back), strict=True):
        assert old.dtype == new.dtype and np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_it_comes_back_on_the_devices_of_the_target(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": jnp.arange(8)}, {})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    back = checkpoint.restore(
        checkpoint.latest(tmp_path), {"x": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=sharding)}
    )
    assert back["x"].sharding == sharding


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 2, 30, 4):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {})
    assert list(checkpoint.steps(tmp_path)) == [4, 30]
    assert checkpoint.latest(tmp_path).step == 30


def test_one_that_is_older_than_those_kept_stays_when_it_is_written(tmp_path):
    for step in (10, 20, 5):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, {})
    assert list(checkpoint.steps(tmp_path)) == [5, 10, 20]
    with pytest.raises(CheckpointError, match="keep=0: the checkpoint just written stays"):
        checkpoint.save(tmp_path, 30, {"x": jnp.float32(0)}, {}, keep=0)


# Orbax would take "[x]" and "**" for patterns, and "\\" for "/".
@pytest.mark.parametrize("name", ["lr=[0.1]", "a\\b", "d**d", "50%"])
def test_any_folder_will_do(tmp_path, name):
    path = checkpoint.save(tmp_path / name, 1, state(0.3), NOTES)
    back = checkpoint.restore(checkpoint.latest(tmp_path / name), state())
    jax.tree.map(np.testing.assert_array_equal, back, state(0.3))
    assert path.parent == tmp_path / name and not list(path.glob("**/*.tmp"))


def test_the_same_step_is_replaced(tmp_path):
    for value in (1, 2):
        checkpoint.save(tmp_path, 5, {"x": jnp.float32(value)}, {})
    assert float(checkpoint.restore(checkpoint.latest(tmp_path), {"x": jnp.float32(0)})["x"]) == 2


@pytest.fixture
def log(monkeypatch):
    """Orbax's log and the hook, as they were before the test when it ends."""
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    return logger


def test_one_that_was_cut_off_while_written_is_never_seen(tmp_path, log, monkeypatch):
    """Ctrl-C leaves it to the next save: Orbax's threads still write there, and would complain."""
    checkpoint.save(tmp_path, 1, state(), NOTES)
    hook = sys.unraisablehook

    def dies(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 2, state(), NOTES)
    names = [".writing_step_00000002", "step_00000001"]  # as kill -9 leaves it, too
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert log.disabled and sys.unraisablehook is not hook
    assert checkpoint.latest(tmp_path).step == 1
    checkpoint.save(tmp_path, 3, state(), NOTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def largest(path):
    return max(
        (file for file in (path / "state").rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )


def truncate(path):
    file = largest(path)
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = largest(path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit(signed=False, **fields):
    """Another manifest; ``signed``: with the digest of what it says."""

    def damage(path):
        content = {**json.loads((path / "manifest.json").read_text()), **fields}
        if signed:
            content.pop("sha256")
            content["sha256"] = manifest.digest_of(content)
        (path / "manifest.json").write_text(json.dumps(content))

    return damage


DAMAGE = {
    "truncated": (truncate, r"has [\d,]+ bytes, but [\d,]+ were written"),
    "flipped bit": (flip, "content of state/.* has changed"),
    "missing file": (lambda path: largest(path).unlink(), "is missing"),
    "no state": (lambda path: shutil.rmtree(path / "state"), "is missing"),
    "foreign file": (
        lambda path: (path / "state" / "virus").write_text("x"),
        "state/virus was not written by it",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda path: (path / "manifest.json").write_text('{"format"'), "not JSON"),
    "a list": (lambda path: (path / "manifest.json").write_text("[]"), "format 'list'"),
    "another format": (edit(format="torch"), "format 'torch', not 'collc checkpoint 3'"),
    "another step": (edit(step=3, signed=True), "that of step 3"),
    "garbled": (edit(files=[1], signed=True), "lacks or garbles"),
    "garbled file": (edit(files={"a": 1}, signed=True), "lacks or garbles"),
    "other notes": (edit(notes={}), "content of its manifest.json has changed"),
    "no digest": (edit(sha256=None), "content of its manifest.json has changed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_and_nothing_is_touched(tmp_path, name):
    damage, message = DAMAGE[name]
    checkpoint.save(tmp_path, 1, state(), NOTES)
    damage(checkpoint.save(tmp_path, 2, state(), NOTES))
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.latest(tmp_path)
    assert "step_00000002" in str(error.value)
    assert "Move step_00000002 out of" in str(error.value) and "step 1 is taken then" in str(
        error.value
    )
    assert files(tmp_path) == before


def test_no_bit_of_a_manifest_flips_unnoticed(tmp_path):
    """Its layout may change: what it says may not."""
    path = checkpoint.save(tmp_path, 2, {"x": jnp.ones(2)}, {"at": {1: [0.1, None]}})
    file, whole = path / "manifest.json", manifest.read(path)
    content = file.read_bytes()
    for at in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 7
        file.write_bytes(flipped)
        try:
            assert manifest.read(path) == whole
        except CheckpointError:
            continue


def test_every_file_of_the_state_is_needed(tmp_path):
    path = checkpoint.save(tmp_path, 2, state(), NOTES)
    for file in [file for file in (path / "state").rglob("*") if file.is_file()]:
        content = file.read_bytes()
        for damage in (lambda f: f.unlink(), lambda f: f.write_bytes(f.read_bytes()[:-1])):
            damage(file)
            with pytest.raises(CheckpointError, match=rf"state/\S*{file.name}"):
                checkpoint.latest(tmp_path)
            file.write_bytes(content)
    assert checkpoint.latest(tmp_path).step == 2


def test_where_none_is_whole_that_is_said(tmp_path):
    for step in (2, 4):
        truncate(checkpoint.save(tmp_path, step, state(), NOTES))
    before, told = files(tmp_path), []
    with pytest.raises(
        CheckpointError, match=r"step_00000004 .*None of the 1 before it is whole"
    ) as error:
        checkpoint.find(tmp_path, told.append)
    assert "Start a fresh run in another folder." in str(error.value)
    assert files(tmp_path) == before and not told


def test_damaged_ones_are_set_aside_where_an_older_one_is_whole(tmp_path):
    for step in (2, 4, 6):
        checkpoint.save(tmp_path, step, state(), NOTES, keep=3)
    truncate(tmp_path / "step_00000004")
    truncate(tmp_path / "step_00000006")
    (tmp_path / "damaged_step_00000006").mkdir()  # from an earlier time
    said = []
    assert checkpoint.find(tmp_path, said.append).step == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "step_00000002",
        "damaged_step_00000004",
        "damaged_step_00000006",
        "damaged_step_00000006_1",
    }
    for text, name in zip(said, ("6_1", "4"), strict=True):
        assert "is not a whole checkpoint" in text and "Move" not in text
        assert text.endswith(f"It is damaged_step_0000000{name} now, and step 2 is taken.")
    truncate(tmp_path / "step_00000002")
    with pytest.raises(CheckpointError, match="There is no other checkpoint"):
        checkpoint.find(tmp_path, said.append)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(format="collc checkpoint 2"), "written by another version of collc"),
        (None, "cannot be read now .Input/output error"),
    ],
)
def test_what_is_not_damage_is_not_set_aside(tmp_path, monkeypatch, change, message):
    for step in (2, 4):
        newest = checkpoint.save(tmp_path, step, state(), NOTES)
    if change:
        change(newest)
    else:

        def unread(path, **options):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(Path, "read_text", unread)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.find(tmp_path, pytest.fail)
    assert len(checkpoint.steps(tmp_path)) == 2


def test_the_only_one_damaged(tmp_path):
    truncate(checkpoint.save(tmp_path, 2, state(), NOTES))
    with pytest.raises(CheckpointError, match="There is no other checkpoint"):
        checkpoint.latest(tmp_path)


def test_no_checkpoint_at_all(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="There is no finished checkpoint"):
            checkpoint.latest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["model"].pop("scale"),
            r"model/scale is bfloat16\[3\] there, but missing here",
        ),
        (
            lambda s: s.update(more=jnp.ones(2)),
            r"more is missing there, but float32\[2\] here",
        ),
        (
            lambda s: s["model"].update(scale=jnp.ones(4, jnp.bfloat16)),
            r"bfloat16\[3\] there, but bfloat16\[4\] here",
        ),
        (
            lambda s: s["model"].update(scale=jnp.ones(3)),
            r"bfloat16\[3\] there, but float32\[3\] here",
        ),
    ],
)
def test_another_model_is_refused(tmp_path, change, message):
    checkpoint.save(tmp_path, 1, state(), NOTES)
    other = state()
    change(other)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(checkpoint.latest(tmp_path), other)


def test_another_optimizer_is_refused(tmp_path):
    """Also one that keeps the same arrays: AdamW has a further part, which is empty."""
    w = {"w": jnp.ones(3)}

    def state(tx):
        return {"opt": tx.init(w), "params": w}

    checkpoint.save(tmp_path, 1, state(optax.adam(0.1)), NOTES)
    found = checkpoint.latest(tmp_path)
    for tx, message in (
        (optax.sgd(0.1, momentum=0.9), r"opt/0/count is int32\[\] there, but missing here"),
        (optax.adamw(0.1), "opt/2 is missing there, but EmptyState without values here"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.restore(found, state(tx))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 256 KiB, if this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(["mount", *options], capture_output=True).returncode
    ):
        pytest.skip("this user cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_older_ones(small_disk, caplog):
    random = np.random.default_rng(0)
    checkpoint.save(small_disk, 1, {"x": random.normal(size=1000)}, {})
    before = files(small_disk)
    parts = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    for size in (100_000, 60_000):
        large = jax.device_put(random.normal(size=size).astype(np.float32), parts)
        with pytest.raises(CheckpointError, match=r"step 2 could not be .*No space left on device"):
            checkpoint.save(small_disk, 2, {"x": large}, {})
    gc.collect()
    assert not caplog.records  # of tasks that failed
    assert files(small_disk) == before
    assert checkpoint.latest(small_disk).step == 1
    checkpoint.save(small_disk, 2, {"x": random.normal(size=10)}, {})


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [
        (lambda state: None, r"lacks model\.0\.kernel \(5 of 5 arrays are missing\)"),
        (
            lambda state: {"model.0.kernel/0.0": None},
            r"lacks 1 of the 1 parts of model\.0\.kernel",
        ),
        (
            lambda state: {"model.scale/.zarray": b'{"shape": [4], "chunks": [4]}'},
            r"lacks model\.scale of shape \[3\], and has one of \[4\]",
        ),
    ],
)
def test_what_orbax_left_out_is_noticed_before_it_counts(tmp_path, monkeypatch, leave_out, message):
    """It merges the files of the processes that it finds, and only logs that it found none."""
    merge = checkpoint.ocp.PyTreeCheckpointHandler.finalize

    def partly(self, path):
        if changes := leave_out(path):
            merge(self, path)
            base = {"driver": "file", "path": f"{path}/"}
            store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
            for key, value in changes.items():
                store.write(key, value).result()

    checkpoint.save(tmp_path, 1, state(), NOTES)
    monkeypatch.setattr(checkpoint.ocp.PyTreeCheckpointHandler, "finalize", partly)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, 2, state(), NOTES)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, monkeypatch, caplog, log):
    def full(self, path, args):
        (path / "half").write_text("x")
        for name in ("absl", "asyncio"):
            logging.getLogger(name).error("a traceback")
        raise ValueError('RESOURCE_EXHAUSTED: Error writing "a/0": No space left on device')

    checkpoint.save(tmp_path, 1, state(), NOTES)
    monkeypatch.setattr(checkpoint.ocp.PyTreeCheckpointHandler, "save", full)
    with pytest.raises(CheckpointError, match=r"step_00000002: No space left on device\. Check"):
        checkpoint.save(tmp_path, 2, state(), NOTES)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert not caplog.records and not log.disabled


def test_a_small_file_is_replaced_or_as_it_was(tmp_path, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"a\.txt cannot be written: No space left"):
        write_text(tmp_path / "a.txt", "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.txt": "old"}


def test_a_disk_that_does_not_take_it(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save(tmp_path / "checkpoints", 1, state(), NOTES)
    assert (tmp_path / "checkpoints").read_text() == "a file"


SAVES = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import numpy as np
    from collc.training.checkpoints import checkpoint
    folder = Path(sys.argv[1])
    step = max(checkpoint.steps(folder), default=0)
    while True:
        step += 1
        checkpoint.save(folder, step, {"x": np.full(20_000, step), "step": step}, {"at": step})
        print(step, flush=True)
    """
)


@pytest.mark.newest_only
def test_a_process_that_is_killed_while_saving_leaves_a_whole_one(tmp_path):
    """Three times, at any moment: what it has said is saved is there, or a later one."""
    random, said = np.random.default_rng(0), 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout and child.stdout.readline()  # it has begun
            time.sleep(random.uniform(0, 0.3))
        finally:
            child.send_signal(signal.SIGKILL)
            rest, _ = child.communicate()
        said = max([said, *map(int, rest.split())])
        found = checkpoint.latest(tmp_path)
        back = checkpoint.restore(found, {"x": np.zeros(20_000, int), "step": 0})
        assert found.step >= said and found.notes == {"at": found.step}
        assert back["step"] == found.step and (back["x"] == found.step).all()
        for path in checkpoint.steps(tmp_path).values():
            manifest.verify(path)
