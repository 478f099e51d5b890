"""Two real processes over loopback."""

import textwrap

import pytest

from collc.planning.agree import differences

from ..processes import run

WORKER = textwrap.dedent(
    """
    import os, sys
    import jax, jax.numpy as jnp, numpy as np
    import collc
    port, me, schedule = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    collc.init(f"127.0.0.1:{port}", 2, me, timeout_s=60)
    mesh = jax.make_mesh((2, 2), ("host", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    if schedule == "auto":
        from collc.planning import tune
        tune.SIZES, tune.TURNS = (256, 4096), (1, 2)
        plan = collc.plan(mesh, "auto")
        if me == 1:
            os.remove(plan.tuned.where)  # process 0 still knows, and says so
        tune._sweep = None
        assert collc.plan(mesh, "auto") == plan
    else:
        plan = collc.plan(mesh, {"gpu": "ring", "host": schedule})

    @jax.jit
    @collc.schedule(plan, batch="x")
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.25 * collc.pmean(grad), collc.pmean(loss)

    sharding = jax.sharding.NamedSharding(mesh, jax.P(("host", "gpu")))
    x = np.arange(24.0, dtype=np.float32).reshape(8, 3) % 5
    mine = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    w, loss = step(jnp.ones(3), mine)
    print("RESULT", np.asarray(w).tolist(), float(loss), flush=True)
    """
)


def train(tmp_path, schedules, flags=("", "")):
    both = "--xla_force_host_platform_device_count=2"
    environments = [
        {"COLLC_CACHE": str(tmp_path / f"cache{me}"), "XLA_FLAGS": f"{both} {flags[me]}"}
        for me in range(2)
    ]
    return run(WORKER, [[schedule] for schedule in schedules], environments)


@pytest.mark.newest_only
@pytest.mark.parametrize("schedule", ["tree", "auto"])
def test_two_processes_train_as_one(tmp_path, schedule):
    """With what a sweep chose too, which process 0 decides, now or from what it kept."""
    import numpy as np

    results = train(tmp_path, (schedule, schedule))
    assert [code for code, _, _ in results] == [0, 0], results
    said = {line for _, out, _ in results for line in out.splitlines() if "RESULT" in line}
    x = np.arange(24.0).reshape(8, 3) % 5
    w = 1 - 0.25 * 2 * x.T @ (x @ np.ones(3)) / 8
    assert said == {f"RESULT {w.tolist()} {np.mean((x @ np.ones(3)) ** 2)}"}


@pytest.mark.newest_only
def test_a_process_with_another_plan_is_named(tmp_path):
    results = train(tmp_path, ("tree", "ring"))
    for code, _, err in results:
        assert code == 1
        assert "the processes differ in their plans" in err
        assert "process 1 (host" in err and '"host": "ring"' in err


@pytest.mark.newest_only
def test_a_process_with_other_flags_is_named(tmp_path):
    results = train(tmp_path, ("tree", "tree"), ("", "--xla_cpu_enable_fast_math=true"))
    for code, _, err in results:
        assert code == 1
        assert "process 1 (host" in err and "xla_cpu_enable_fast_math" in err


def test_the_odd_one_out_is_the_rarer_one():
    facts = {0: {"jax": "2", "x": "a"}, 1: {"jax": "1", "x": "a"}, 2: {"jax": "1", "x": "a"}}
    assert differences(facts) == [(0, "jax", "2", "1")]
    assert differences({0: {"a": "1"}, 1: {}}) == [(1, "a", "", "1")]
