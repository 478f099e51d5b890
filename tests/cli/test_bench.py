"""collc bench: options, what is printed, the status, and what an interrupt leaves."""

import json
import os
import signal
import subprocess
import sys

import pytest

SMALL = ("--mesh", "host=2,gpu=2", "-b", "64", "-e", "64", "-n", "2", "-w", "0")


def test_a_table(cli, tmp_path):
    path = tmp_path / "out.png"
    result = cli("bench", *SMALL, "--plot", str(path))
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "# collc bench: all_reduce of float32 over gpu, 2 ranks"
    assert max(map(len, lines[:-1])) <= 100
    table = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:3] for row in table[::2]] == [["64", u, "lax.psum"] for u in ("fresh", "donated")]
    assert [row[0] for row in table[1::2]] == ["ring.all_reduce"] * 2
    assert {row[-1] for row in table} == {"0"}
    assert lines[-2:] == ["# wrong elements: 0 OK", f"# plot: {path}"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_is_the_status(cli, monkeypatch):
    from collc.bench import sweep

    right = sweep.per_device
    monkeypatch.setattr(
        sweep, "per_device", lambda kind, on: lambda x: right(kind, on)(x).at[0].add(1)
    )
    result = cli("bench", *SMALL)
    assert result.exit_code == 1 and result.stderr == ""
    assert "# wrong elements: 16 FAILED" in result.stdout, "4 devices, 2 schedules, 2 uses"
    unchecked = cli("bench", *SMALL, "--no-check")
    assert unchecked.exit_code == 0 and "not checked" in unchecked.stdout
    assert "N/A" in unchecked.stdout


def test_names_of_schedules(cli, file):
    result = cli(
        *("bench", *SMALL, "--json", "--use", "fresh", "--axis", "host, gpu", "-s", f"{file}:star"),
        *("-s", "ring.all_reduce", "-s", "hierarchical('host', 'gpu')", "--groups", "all"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["axes"] == ["host", "gpu"] and found["ranks"] == 4
    assert {k: v["schedule"] for k, v in found["schedules"].items()} == {
        "mine.star": "mine.star @ (host, gpu)",
        "ring.all_reduce": "ring.all_reduce @ (host, gpu)",
        'hierarchical("host", "gpu")': 'hierarchical("host", "gpu")',
    }
    assert [row["schedule"] for row in found["rows"]] == ["lax.psum", *found["schedules"]]


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_finished(cli, monkeypatch, number, status):
    from collc.bench.sweep import Sweep

    block = Sweep._block

    def interrupted(self, mesh, groups, count, use, going):
        rows = block(self, mesh, groups, count, use, going)
        os.kill(os.getpid(), number)
        return rows

    monkeypatch.setattr(Sweep, "_block", interrupted)
    result = cli("bench", *SMALL)
    assert result.exit_code == status and result.stderr == ""
    assert "64  fresh" in result.stdout and "64  donated" not in result.stdout
    assert result.stdout.endswith("# wrong elements: 0 OK; stopped before the end\n")
    found = json.loads(cli("bench", *SMALL, "--json").stdout)
    assert len(found["rows"]) == 2 and not found["complete"]


def test_a_plot_that_fails_does_not_lose_the_table(cli, monkeypatch, tmp_path):
    def full(path, rows, title):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("collc.bench.plot.plot", full)
    for more in ((), ("--json",)):
        result = cli("bench", *SMALL, "--plot", str(tmp_path / "x.png"), *more)
        assert result.exit_code == 1
        assert "ring.all_reduce" in result.stdout
        assert "No space left on device. What was measured stands above" in result.stderr


@pytest.mark.parametrize(
    "args, needed",
    [
        (("-b", "4K", "-e", "1K"), "End at 4K or more"),
        (("-e", "4KB"), "4K or 4KiB"),
        (("-f", "2", "-i", "4K"), "Drop one"),
        (("-f", "1"), "above 1"),
        (("-d", "float8"), "Did you mean float"),
        (("--axis", "gpuu"), "Did you mean gpu?"),
        (("--axis", "gpu,gpu"), "an axis is named twice"),
        (("--axis", "gpu", "-s", "ring.all_reduce @ gpu"), "--axis gpu has no effect"),
        (("-s", "ring.all_reduce", "-s", "ring.all_reduce @ gpu"), "Drop one of the two"),
        (("-s", "ring.all_reduce", "-s", "ring.all_gather"), "measure them in two runs"),
        (("-s", "rnig.all_reduce"), "Did you mean ring?"),
        (("-s", "mine.py:wrong"), "mine.wrong"),
        (("-s", "mine.py:forever", "--timeout", "0.2"), "stopped after 0.2 s"),
        (("-s", "tree.reduce"), "jax.lax has nothing to compare"),
        (("-s", "ring.all_gather", "--use", "donated"), "Take fresh or intermediate"),
        (("--axis", "host,gpu", "--groups", "alone"), "a single group"),
        (("-b", "1", "-e", "1"), "Begin at 4 or more"),
        (("-e", "4096T"), "End at a smaller size"),
        (("--plot", "x.foo"), ".foo is none of them"),
        (("--plot", "no/x.png"), "Make it first"),
        (("--mesh", "gpu=18"), "needs 18 devices"),
    ],
)
def test_what_is_refused(refused, file, args, needed):
    assert needed in refused("bench", "--mesh", "host=2,gpu=2", *args)


@pytest.mark.parametrize("args", [("-n", "0"), ("-w", "-1"), ("--use", "x"), ("--groups", "x")])
def test_wrong_usage(cli, args):
    assert cli("bench", "--mesh", "gpu=2", *args).exit_code == 2


def test_as_a_process(tmp_path):
    """It makes its own devices, in a dtype that jax does not have by default."""
    known = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = subprocess.run(
        [sys.executable, "-m", "collc", "bench", "--json", "--mesh", "gpu=3", "-d", "double", "-b",
         "1000", "-e", "1000", "-n", "1", "-s", "ring.reduce_scatter"],
        capture_output=True, text=True, env=known, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0 and run.stderr == ""
    found = json.loads(run.stdout)
    assert found["machine"]["devices"] == 3 and found["dtype"] == "float64"
    assert [(row["size_bytes"], row["use"], row["wrong"]) for row in found["rows"]] == [
        (984, "fresh", 0), (984, "fresh", 0), (984, "donated", None), (984, "donated", None),
    ]  # fmt: skip
