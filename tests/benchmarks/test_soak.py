"""A short soak of a fresh seed; and what draws the faults and judges what came of them."""

import dataclasses
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from ..emulated import BENCHMARKS, disk, evidence, faults, judge, namespaces

Left, Fault, Limits, Trial = evidence.Left, faults.Fault, judge.Limits, judge.Trial
HOSTS = ("h0", "h1", "h2")
LIMITS = Limits(named=7, gone=16)
WATCHDOG = "h0 | collc watchdog: "


@pytest.mark.newest_only
def test_a_short_soak_of_a_fresh_seed(record_property):
    """What it came to stands in the summary of the whole run, also where all went well."""
    if why := namespaces.missing():
        pytest.skip(f"no emulated network: {why}")
    seed = random.SystemRandom().randrange(1_000_000)
    options = ["--faults", "2", "--quick", "--print", "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "soak"), *options],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )  # fmt: skip
    table = done.stdout.partition("## The faults")[2].splitlines()
    rows = [line for line in table if line.startswith("|")]
    how = f"python benchmarks/soak {' '.join(options)} leaves with {done.returncode}"
    record_property("summary", [f"a short soak of seed {seed}", how, *rows])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


# The generator


def test_a_seed_gives_the_same_faults_and_another_one_others():
    assert faults.draw(5, 20, HOSTS) == faults.draw(5, 20, HOSTS)
    assert faults.draw(5, 20, HOSTS) != faults.draw(6, 20, HOSTS)
    assert faults.draw(5, 20, HOSTS)[:8] == faults.draw(5, 8, HOSTS)  # in a row


@pytest.mark.parametrize("seed", range(30))
def test_faults_are_all_kinds_in_turn_and_make_sense(seed):
    drawn = faults.draw(seed, 20, HOSTS)
    kinds = Counter(fault.kind for fault in drawn)
    assert set(kinds) == set(faults.KINDS) and set(kinds.values()) <= {2, 3}
    assert [fault.number for fault in drawn] == list(range(1, 21))
    for fault in drawn:
        if fault.kind in (faults.COORDINATOR, faults.FULL):
            assert fault.host == "h0"
        if fault.kind in (faults.KILL, faults.TRUNCATED):
            assert fault.host != "h0"
        assert fault.phase in (faults.START, *faults.PHASES)
        started = fault.phase not in (faults.START, faults.RESTORE)
        assert (fault.after > 0) == started
        assert started or fault.kind not in (faults.TRUNCATED, faults.SLOW)
        # Before it trains a stopped host is not under the watchdog.
        assert fault.phase != faults.START or fault.kind in (faults.KILL, faults.COORDINATOR)
        assert (fault.rate != "") == (fault.kind == faults.SLOW)


def test_seeds_reach_all_hosts_and_phases_of_a_kind():
    drawn = [fault for seed in range(60) for fault in faults.draw(seed, 7, HOSTS)]
    stopped = [fault for fault in drawn if fault.kind == faults.STOP]
    assert {fault.host for fault in stopped} == set(HOSTS)
    assert {fault.phase for fault in stopped} == set(faults.PHASES)
    assert faults.START in {fault.phase for fault in drawn if fault.kind == faults.COORDINATOR}


# The judge


def trial(kind, host="h1", lines=(), gone: float | None = 8.0, **more):
    fault = Fault(1, kind, host, 5, "step", 0.0)
    return Trial(fault, 1, 41, "step", tuple(lines), gone, 40, **more)


SAID = {
    "killed": (0.1, "collc launch: host h1 was killed by SIGKILL. Its last lines:"),
    "silent": (5.0, f"{WATCHDOG}process 1 on host h1 has not been heard of for 5 s, last at step 3"),
    "both": (5.0, f"{WATCHDOG}process 1 on host h1 and process 2 on host h2 have not been heard of"),
    "pair": (5.0, f"{WATCHDOG}processes 0, 1 on host h1 have not been heard of for 5 s"),
    "stuck": (6.2, f"{WATCHDOG}process 1 on host h1 has been at step 41 (input), the others at step"),
    "absent": (6.0, f"{WATCHDOG}process 1 has not come to the watch within 6 s."),
    "unseen": (5.0, f"{WATCHDOG}the coordinator, process 0 has not answered for 5 s: it is stopped"),
    "coordinator": (5.0, f"{WATCHDOG}the coordinator, process 0 on host h0, last at step 4 (step), "
                         "has not answered for 5 s"),
    "damaged": (9.0, "h0 | /x/step_00000020 is damaged. It is damaged_step_00000020 now, and step 10 "
                     "is taken."),
    "room": (0.5, "h0 | collc.errors.CheckpointError: /x/metrics.jsonl cannot be written: No space "
                  "left on device. Make it writable, or free some space."),
    "exited": (2.5, "    collc.errors.CheckpointError: /x/metrics.jsonl cannot be written: No space "
                    "left on device. Make it writable, or free some space."),
    "slow": (11.0, "h0 | warning  links: all hosts: host h1, all that it sends and receives, takes"),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, host, said",
    [
        (faults.KILL, "h1", ["killed"]),
        (faults.TRUNCATED, "h1", ["killed", "damaged"]),
        (faults.STOP, "h1", ["silent"]),
        (faults.STOP, "h1", ["stuck"]),
        (faults.STOP, "h1", ["absent"]),
        (faults.CUT, "h1", ["coordinator", "both"]),
        (faults.CUT, "h0", ["coordinator"]),
        (faults.STOP, "h0", ["unseen"]),
        (faults.FULL, "h0", ["room", "exited"]),
    ],
)
def test_what_names_a_fault(kind, host, said):
    good = trial(kind, host, [SAID[word] for word in said])
    assert judge.failing(good, HOSTS, LIMITS) == []
    assert judge.outcome(good) == "restarted from step 40"
    for missing in set(said) - {"coordinator"} if len(said) > 1 else said:
        lines = [SAID[word] for word in said if word != missing]
        found = judge.failing(trial(kind, host, lines), HOSTS, LIMITS)
        assert len(found) == 1 and found[0].endswith("did not name it")


def test_another_host_that_is_named_does_not_count():
    stop = trial(faults.STOP, "h2", [SAID["silent"], SAID["coordinator"]])
    assert judge.failing(stop, HOSTS, LIMITS) == ["the watchdog did not name it"]
    kill = trial(faults.KILL, "h2", [SAID["killed"]])
    assert judge.failing(kill, HOSTS, LIMITS) == ["the launcher did not name it"]


def test_a_slow_link_is_named_by_the_doctor_and_ends_nothing():
    slow = trial(faults.SLOW, "h1", [SAID["slow"]], gone=None)
    assert judge.failing(slow, HOSTS, LIMITS) == []  # however long the doctor took
    assert judge.outcome(slow) == judge.NOTHING
    ended = dataclasses.replace(slow, gone_s=3.0)
    assert judge.failing(ended, HOSTS, LIMITS) == ["it ended, and should only be slower"]


def test_what_comes_too_late_or_not_at_all_fails():
    at, line = SAID["silent"]
    late = trial(faults.STOP, "h1", [(at + 3, line)], gone=17.0)
    assert judge.failing(late, HOSTS, LIMITS) == [
        "named after 8.0 s, not 7",
        "ended after 17.0 s, not 16",
    ]
    full = trial(faults.FULL, "h0", [(9.0, SAID["room"][1]), (9.5, SAID["exited"][1])], gone=9.6)
    assert judge.failing(full, HOSTS, LIMITS) == []  # at the next write
    hung = trial(faults.STOP, "h1", [SAID["silent"]], hung=True)
    assert judge.failing(hung, HOSTS, LIMITS) == ["it hung"]
    went_on = trial(faults.KILL, "h1", [SAID["killed"]], gone=None)
    assert judge.failing(went_on, HOSTS, LIMITS) == ["it went on, though it could not"]


# What a job has left

STEPS, ROWS = 4, 8  # two epochs of two batches of four, of which two hosts take half


def row(attempt, step, ids):
    return {"attempt": attempt, "step": step, "ids": ids}


def calm():
    first = [[0, 1], [2, 3], [4, 5], [6, 7]]
    second = [[4, 5], [6, 7], [0, 1], [2, 3]]
    samples = {
        host: [row(0, step + 1, ids) for step, ids in enumerate(each)]
        for host, each in (("h0", first), ("h1", second))
    }
    return Left([(step, 1 / step) for step in range(1, STEPS + 1)], samples, ["a", "a"])


def wrong(found):
    return evidence.trouble(found, calm(), STEPS, ROWS, copies=2)


def changed(host, rows):
    return dataclasses.replace(calm(), samples={**calm().samples, host: rows})


def test_a_job_that_was_restarted_is_whole():
    """It died in step 3, which h0 had finished, and went on from the checkpoint of step 1."""
    samples = {
        host: [*rows[: 3 if host == "h0" else 2], *({**r, "attempt": 2} for r in rows[1:])]
        for host, rows in calm().samples.items()
    }
    assert wrong(dataclasses.replace(calm(), samples=samples)) == []
    assert evidence.resumed(dataclasses.replace(calm(), samples=samples), 1) == 1
    assert evidence.resumed(calm(), 1) is None


def test_lost_and_repeated_samples_are_seen():
    rows = calm().samples["h0"]
    again = [*rows[:1], row(0, 2, rows[0]["ids"]), *rows[2:]]
    assert wrong(changed("h0", again)) == [
        "epoch 0: 2 samples lost, 2 repeated",
        "some steps have other samples",
    ]
    assert "epoch 1: 2 samples lost, 0 repeated" in wrong(changed("h0", rows[:3]))
    swapped = [row(0, 1, rows[1]["ids"]), row(0, 2, rows[0]["ids"]), *rows[2:]]
    assert wrong(changed("h0", swapped)) == ["some steps have other samples"]


def test_a_step_of_an_attempt_that_was_taken_back_does_not_count():
    """Of two hosts one went on alone from another checkpoint."""
    rows = [*calm().samples["h0"][:3], row(1, 4, [6, 7])]
    assert "some steps have other samples" in wrong(changed("h0", rows))


@pytest.mark.parametrize(
    "losses, says",
    [
        ([(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25000000000000006)], "losses differ from step 4 on"),
        ([(1, 1.0), (2, 0.5), (4, 0.25)], "the metrics do not have each step once"),
        ([(1, 1.0), (2, 0.5), (2, 0.5), (3, 1 / 3), (4, 0.25)],
         "the metrics do not have each step once"),
    ],
)  # fmt: skip
def test_other_losses_are_seen(losses, says):
    assert says in wrong(dataclasses.replace(calm(), losses=losses))


@pytest.mark.parametrize(
    "copies, says",
    [
        (["a", "b"], "2 copies of the parameters, 2 kinds"),
        (["a"], "1 copies of the parameters, 1 kinds"),
        (["b", "b"], "other parameters at the end"),
    ],
)
def test_parameters_that_differ_are_seen(copies, says):
    assert wrong(dataclasses.replace(calm(), copies=copies)) == [says]


def test_what_a_job_wrote_is_read_also_where_a_line_was_cut_off(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.1, "seconds": 2}\n')
    cut = '{"attempt": 0, "step": 1, "ids": [1]}\n{"attempt": 0, "st'
    then = '{"attempt": 1, "step": 1, "ids": [2]}\n'
    (tmp_path / "h0.samples").write_text(cut + then)
    (tmp_path / "h0.end").write_text('["a"]')
    found = evidence.left(tmp_path, tmp_path)
    assert found.losses == [(1, 0.1)] and found.copies == ["a"]
    assert found.samples == {"h0": [row(0, 1, [1]), row(1, 1, [2])]}
    assert found.consumed == {1: [2]}


# The disk


@pytest.mark.parametrize("part", [0.0, 0.3, 0.77, 0.999])
def test_a_truncated_checkpoint_lacks_the_end_of_one_file(tmp_path, part):
    names = ["manifest.json", "state/a", "state/d/b"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(range(200)))
    (tmp_path / "state/empty").touch()
    name = disk.truncate(tmp_path, part)
    sizes = {name: (tmp_path / name).stat().st_size for name in names}
    assert sizes.pop(name) < 200 and set(sizes.values()) == {200}
    assert (tmp_path / name).read_bytes() == bytes(range((tmp_path / name).stat().st_size))
