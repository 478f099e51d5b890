"""The watchdog over real processes: one is stuck, stopped, or fails, and all end with its name said."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.newest_only

# Steps whose "devices" are barriers: no program is compiled.
STEPS = textwrap.dedent(
    """
    import ctypes, os, signal, subprocess, sys, time
    import jax
    from collc.planning.agree import state
    from collc.runtime.watchdog.watchdog import Watchdog
    port, me, n, culprit, fault = int(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, n, me, coordinator_bind_address=address)
    client = state().client

    def next_batch(t):
        if t == 3 and me == culprit:
            time.sleep(1)  # so that the others have heard of it here
            print("FAULT", time.time(), flush=True)
            if fault == "stuck":
                time.sleep(300)
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "paused":
                subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "holds the lock":
                ctypes.PyDLL(None).sleep(300)
            if fault == "fails":
                raise ValueError("no more rows")
            if fault == "exits":
                sys.exit(3)
        if t == 3 and fault == "all fail":
            raise ValueError("no more rows")

    with Watchdog(TIMEOUT) as watchdog:
        for t in range(5):
            watchdog.beat(t, "input")
            next_batch(t)
            watchdog.beat(t, "wait")
            client.wait_at_barrier(f"step{t}", 2_000 if fault == "killed" else 300_000)
    print("DONE")
    """
)
TIMEOUT = 3.0
EXTRA = 9.0  # seconds more that the end may take, on a busy machine


def job(script, n, *arguments, stays=()):
    """(exit code, stdout, stderr) of each process; ``stays``: those that cannot end, and are killed.

    A fault has to have ended the others in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(port), str(me), str(n), *map(str, arguments)],
            env={**os.environ, **one}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for me in range(n)
    ]  # fmt: skip
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if all(w.poll() is not None for me, w in enumerate(workers) if me not in stays):
                break
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
    ended = time.time()
    said = [worker.communicate() for worker in workers]
    for fault in re.findall(r"FAULT (\S+)", "".join(out for out, _ in said)):
        assert ended - float(fault) < TIMEOUT + EXTRA, said
    return [(worker.returncode, *both) for worker, both in zip(workers, said, strict=True)]


def steps(n, culprit, fault, stays=()):
    return job(STEPS.replace("TIMEOUT", str(TIMEOUT)), n, culprit, fault, stays=stays)


def verdicts(results):
    """What each watchdog said, without seconds: at once, and in the last line of its process."""
    found = []
    for me, (_, _, err) in enumerate(results):
        said = re.findall(r"collc watchdog: (.*)\.\n", re.sub(r"\d+ s\b", "N s", err))
        if said:
            end = f"process {me} on host {host()} ends with code 75, on which the job can be restarted"
            assert said[1:] == [f"{end}, since {said[0]}"]
        found.append(said[:1])
    return found


def host():
    return socket.gethostname()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_run_that_ends_says_nothing_also_if_a_process_was_stopped_for_a_moment(culprit):
    results = steps(2, culprit, "paused")
    assert [(code, out[-5:]) for code, out, _ in results] == [(0, "DONE\n")] * 2, results
    assert verdicts(results) == [[], []]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_stuck_process_is_named_and_its_stack_shown(culprit):
    reports = 1 if culprit == 0 else 0
    results = steps(3, culprit, "stuck")
    assert [code for code, _, _ in results] == [75] * 3, results
    line = f"process {culprit} on host {host()} has been at step 3 (input), the others at step 3 (wait)"
    assert verdicts(results) == [[f"{line} for N s"]] * 3
    for me, (_, _, err) in enumerate(results):
        assert f"MainThread of process {me} on host {host()} is at\n" in err
        assert ("in next_batch" in err) == (me in (culprit, reports))
        assert bool(re.search(r"step 3 \(input\), moved \d+ s ago", err)) == (me == reports)
    assert f"MainThread of process {culprit} on host {host()} is at\n" in results[reports][2]


def test_a_stopped_process_is_named():
    (code, _, err), stopped = steps(2, 1, "stopped", stays=(1,))
    assert code == 75 and stopped[0] == -signal.SIGKILL
    assert f"process 1 on host {host()} has not been heard of for" in err
    assert "last at step 3 (input)" in err


def test_a_stopped_coordinator_is_named():
    stopped, *others = steps(3, 0, "stopped", stays=(0,))
    assert stopped[0] == -signal.SIGKILL
    for code, _, err in others:
        assert code == 75
        assert (
            f"the coordinator, process 0 on host {host()}, last at step 3 (input), has not" in err
        )


def test_a_process_that_holds_pythons_lock_shows_its_stack():
    (code, _, err), (own_code, _, own_err) = steps(2, 1, "holds the lock")
    assert code == 75 and own_code == -signal.SIGABRT  # by jax, once the coordinator has left
    assert f"process 1 on host {host()} has not been heard of" in err
    assert "Timeout" in own_err and "in next_batch" in own_err


@pytest.mark.parametrize(
    ("culprit", "fault", "own_code", "own", "said"),
    [
        (0, "fails", 1, "ValueError: no more rows", "ValueError: no more rows"),
        (1, "exits", 3, "", "SystemExit: 3"),
    ],
)
def test_an_exception_in_one_process_ends_the_others(culprit, fault, own_code, own, said):
    results = steps(2, culprit, fault)
    code, _, err = results[culprit]
    assert code == own_code and err.rstrip().endswith(own)
    code, _, err = results[1 - culprit]
    assert code == 75
    assert f"process {culprit} on host {host()} failed at step 3 (input): {said}" in err


def test_an_exception_in_all_processes_is_theirs():
    results = steps(2, -1, "all fail")
    assert [code for code, _, _ in results] == [1, 1]
    assert verdicts(results) == [[], []]
    assert all("ValueError: no more rows" in err for _, _, err in results)


def test_an_error_that_follows_a_killed_process_says_so():
    """As that of a collective which broke: here it is the barrier's."""
    (code, _, err), killed = steps(2, 1, "killed")
    assert code == 75 and killed[0] == -signal.SIGKILL
    assert f"process 1 on host {host()} has not been heard of since process 0 on host" in err
    assert "and may be the cause" in err and "DEADLINE_EXCEEDED" in err


FIT = textwrap.dedent(
    """
    import sys, time
    import jax, jax.numpy as jnp, numpy as np
    import collc
    port, me, n = map(int, sys.argv[1:4])
    address = f"127.0.0.1:{port}"
    mesh = collc.init(address, n, me, axes={"host": n})
    plan = collc.plan(mesh, {"host": "native"})

    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
        return w - 0.1 * collc.pmean(grad), collc.pmean(loss)

    def data(t):
        if t == 3 and me == 1:
            print("FAULT", time.time(), flush=True)
            time.sleep(300)
        return np.ones((4, 3), np.float32)

    collc.fit(step, jnp.zeros(3), data, steps=9, watchdog=TIMEOUT, profile=0)
    """
)


def test_fit_ends_when_a_process_is_stuck_in_its_input():
    results = job(FIT.replace("TIMEOUT", str(TIMEOUT)), 2)
    assert [code for code, _, _ in results] == [75, 75], results
    # A CPU device waits for the others while it is called.
    line = (
        f"process 1 on host {host()} has been at step 3 (input), the other at step 4 (step) for N s"
    )
    assert verdicts(results) == [[line]] * 2
    assert "in data" in results[1][2] and "MainThread of process 1" in results[0][2]
