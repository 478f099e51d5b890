"""`collc.fit` on two real processes with two devices each."""

import json
import textwrap

import pytest

from ..processes import outputs

RUN = textwrap.dedent(
    """
    import os, signal, sys
    import jax, jax.numpy as jnp, numpy as np
    import collc
    from collc.training.fitting import feed
    from collc.training.fitting.fit import fit
    from collc.training.fitting.switch import Switch

    port, me, *runs = sys.argv[1:]
    me = int(me)
    collc.init(f"127.0.0.1:{port}", 2, me, timeout_s=60)
    mesh = jax.make_mesh((2, 2), ("host", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plans = {name: collc.plan(mesh, {"gpu": name, "host": "native"}) for name in ("ring", "native")}

    def make(plan):
        @jax.jit
        @collc.schedule(plan, batch="batch")
        def step(w, batch):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
            return w - 0.1 * collc.pmean(grad), collc.pmean(loss)
        return step

    batches = feed.batches(np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32), 8)
    asked = []

    def load(t, rows):
        asked.append((rows.start, rows.stop))
        return batches.at(t, rows)

    class Parts:
        def __init__(self):
            self.t = 0
        def __iter__(self):
            return self
        def __next__(self):
            self.t += 1
            return batches.at(self.t - 1, slice(4 * me, 4 * me + 4))
        def get_state(self):
            return [me, self.t]
        def set_state(self, state):
            assert state[0] == me
            self.t = state[1]

    plan = plans["ring"]
    loaded = feed.local(load, 8, plan)(3)
    assert asked == [(4 * me, 4 * me + 4)]
    for mine, placed in zip(loaded.addressable_shards, feed.place(batches(3), plan).addressable_shards):
        assert mine.index == placed.index and (mine.data == placed.data).all()

    def turn(event):
        if event.step == 2:
            event.switch("native" if me == 0 else "ring")
            if folder.endswith("drained") and me == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    for folder, steps, kind in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        switch = Switch.plans(make, plans)
        data = feed.joined(Parts(), plan) if kind == "joined" else batches
        found = fit(switch, jnp.zeros(3), data, steps=int(steps), folder=folder, resume=True,
                    callbacks=[turn], profile=0)
        assert switch.active == "native", switch
        if folder.endswith("drained"):
            assert found.step in (2, 3) and found.report.stopped == "SIGTERM", found
        print("FINAL", np.asarray(found.state).tobytes().hex())
    """
)


def finals(folder, *runs):
    """The states at the ends of the runs (folder, steps, kind), the same on both processes."""
    arguments = [word for name, *rest in runs for word in (folder / name, *rest)]
    one, other = (
        [line for line in out.splitlines() if line.startswith("FINAL ")]
        for out in outputs(RUN, *arguments)
    )
    assert one == other and len(one) == len(runs)
    return one


@pytest.mark.newest_only
def test_processes_agree_load_their_rows_and_resume(tmp_path):
    runs = ("whole", 6, "whole"), ("cut", 3, "joined"), ("drained", 99, "whole")
    whole, *_ = finals(tmp_path, *runs)
    assert finals(tmp_path, ("cut", 6, "joined")) == [whole]
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))
    assert [json.loads(line)["switches"] for line in lines] == [0, 0, 1, 1, 1, 1]
