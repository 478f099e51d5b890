"""A training that is killed again and again comes to the same end, bit for bit."""

import io
import json
import os
import random
import signal
import sys
import textwrap
import threading
import time

import pytest
from rich.console import Console

from collc.runtime.launch.job import Host, Job
from collc.runtime.launch.logs import Logs

STEPS = 24
TRAIN = textwrap.dedent(
    """
    import os, signal, sys, time
    import jax, jax.numpy as jnp, numpy as np, optax
    import collc
    from collc.runtime.place import place
    from collc.training.checkpoints import checkpoint

    folder, steps, *faults = sys.argv[1:]
    mesh = collc.init(timeout_s=60)
    here = place()
    plan = collc.plan(mesh, {"gpu": "ring", "host": "ring"})

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state, batch):
        def loss_fn(params):
            hidden = jnp.tanh(batch["x"] @ params["in"])
            return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(state.pull())
        return state.push(grads), collc.pmean(loss)

    def die(process):
        if here.process == process:
            os.kill(os.getpid(), signal.SIGKILL)

    # "1:13": killed after step 13 is started. "0:~8": in the middle of the checkpoint of step 8.
    fault = faults[here.restarts] if here.restarts < len(faults) else ""
    process, _, when = fault.partition(":")
    manifest_of = checkpoint.manifest_of

    def dying(state, step, *rest):
        if when == f"~{step}":
            die(int(process))
        return manifest_of(state, step, *rest)

    checkpoint.manifest_of = dying

    def after(event):
        time.sleep(0.05)  # so that a kill from outside comes in between
        if when == str(event.step):
            die(int(process))

    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(5, 7)).astype(np.float32), "out": np.zeros(7, np.float32)}
    x = rng.normal(size=(96, 5)).astype(np.float32)
    data = collc.feed.batches({"x": x, "y": np.sin(x.sum(1))}, 8, seed=0)
    state = collc.server(plan, optax.adam(0.05)).init(params)
    collc.fit(step, state, data, steps=int(steps), folder=folder, resume=True, save_every=4,
              callbacks=[after], profile=0)
    """
)


def train(folder, *faults, restarts=0, started=None):
    """The losses in the run's metrics, by step; how the job came to its end; what it wrote."""
    out, err = (Console(file=io.StringIO(), width=200) for _ in range(2))
    command = (sys.executable, "-c", TRAIN, str(folder), str(STEPS), *faults)
    job = Job(command, (Host("h0"), Host("h1")), devices=2, grace_s=2)
    outcome = job.run(Logs(out, err), restarts, started)
    said = out.file.getvalue() + err.file.getvalue()  # pyright: ignore
    assert outcome.code == 0, said
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"]) for r in map(json.loads, lines)], outcome, said


@pytest.mark.newest_only
@pytest.mark.skipif(os.name != "posix", reason="needs process groups")
def test_a_training_that_is_killed_comes_to_the_same_end(tmp_path):
    whole, _, _ = train(tmp_path / "whole")
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    # Killed: h1 after some step; the coordinator while a checkpoint is written; h1 at any moment.
    step = random.randrange(5, 9)
    after = random.random() * 0.2
    metrics = tmp_path / "killed" / "metrics.jsonl"

    def started(attempt, pids):
        def kill():
            while not metrics.exists() or len(metrics.read_text().splitlines()) < 14:
                time.sleep(0.01)
            time.sleep(after)
            os.kill(pids["h1"], signal.SIGKILL)

        if attempt == 2:
            threading.Thread(target=kill, daemon=True).start()

    faults = (f"1:{step}", "0:~12")
    killed, outcome, said = train(tmp_path / "killed", *faults, restarts=3, started=started)
    assert [str(failure) for failure in outcome.failures] == [
        f"host {host} was killed by SIGKILL" for host in ("h1", "h0", "h1")
    ], (faults, after, said)
    assert outcome.restarts == 3
    assert killed == whole, (faults, after, said)
