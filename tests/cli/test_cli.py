"""list, show and verify: what they print, and what they say to bad input."""

import json
from pathlib import Path

import pytest

from collc.analysis.mesh import parse_mesh
from collc.cli.common import fold
from collc.errors import MeshError

COMPOSITE = "ring.reduce_scatter @ gpu >> tree.all_reduce @ host >> ring.all_gather @ gpu"


def cells(text: str) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell."""
    rows = [[c.strip() for c in line.split("   ") if c.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_list_says_what_each_schedule_does(cli):
    result = cli("list")
    assert result.exit_code == 0 and result.stderr == "" and "\x1b" not in result.stdout
    rows = cells(result.stdout)
    assert rows["ring.all_gather"] == [
        "all_gather",
        "shard -> replica",
        "Chunk c leaves home, rank c, and is copied once around the ring.",
    ]
    assert rows["ring.all_reduce"][2] == "= ring.reduce_scatter >> ring.all_gather"
    assert rows["native.all_reduce"][2] == "XLA's own collective: trusted, not proved."
    assert rows["server.shards(k)"][:2] == ["all_reduce", "partial -> replica"]
    assert rows["hierarchical(outer, *inner)"][1] == "partial -> replica"


def test_list_prices_on_a_mesh(cli):
    rows = cells(cli("list", "--mesh", "gpu=8").stdout)
    assert rows["ring.all_reduce"][1:5] == ["14", "14", "7/4 S", "7/4 S"]
    assert rows["server.reduce"][1:5] == ["1", "7", "S", "7 S"]
    assert rows["native.all_reduce"][1:5] == ["-"] * 4


def test_list_as_json(cli):
    plain = json.loads(cli("list", "--json").stdout)
    assert {"schedule", "collective", "before", "after", "about"} == plain[0].keys()
    priced = {
        row["schedule"]: row for row in json.loads(cli("list", "--json", "--mesh", "x=3").stdout)
    }
    assert priced["ring.all_reduce"]["steps"] == 4
    assert priced["ring.all_reduce"]["sent"] == "4/3 S"
    assert all(row["error"] is None for row in priced.values())


def test_list_takes_one_axis(refused):
    assert "one axis" in refused("list", "--mesh", "host=2,gpu=4")


def test_show_says_what_is_side_by_side(cli):
    torus = cli("show", 'torus("x", "y")', "--mesh", "x=2,y=2").stdout
    assert torus.count("part 1 of 2, side by side:") == torus.count("part 2 of 2") == 1
    text = "(ring.reduce_scatter @ x >> tree.all_reduce @ y >> ring.all_gather @ x).through(Pipeline(3))"
    sliced = cli("show", text, "--mesh", "x=2,y=2").stdout
    assert "3 slices, each a stage of this chain behind the one before:" in sliced
    assert sliced.count("ring.reduce_scatter @ x\n") == 1


def test_show_prints_the_program(cli):
    result = cli("show", "ring.all_reduce", "--mesh", "gpu=4")
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout == (
        "ring.all_reduce @ gpu  : partial -> replica\n"
        "  gpu=4   6 steps, 6 rounds, at most 3/2 S sent by a rank\n"
        "  ring.reduce_scatter @ gpu\n"
        "     0  add c[g-1]  g -> g+1\n"
        "     1  add c[g+2]  g -> g+1\n"
        "     2  add c[g+1]  g -> g+1\n"
        "  ring.all_gather @ gpu\n"
        "     0  copy c[g]  g -> g+1\n"
        "     1  copy c[g-1]  g -> g+1\n"
        "     2  copy c[g+2]  g -> g+1\n"
    )


def test_show_of_what_has_no_steps(cli):
    assert "XLA's own all_reduce" in cli("show", "native.all_reduce", "--mesh", "gpu=4").stdout
    assert "nothing to send" in cli("show", "ring.all_gather", "--mesh", "gpu=1").stdout


def test_show_names_ranks_as_relabelled(cli):
    shown = cli("show", "server.reduce.relabel(shift=1)", "--mesh", "gpu=3")
    assert "add c[0]  2 -> 1    add c[0]  0 -> 1" in shown.stdout


def test_show_as_json(cli):
    found = json.loads(cli("show", "ring.all_reduce", "--mesh", "gpu=3", "--json").stdout)
    assert found["certificate"]["rounds"] == 4
    first = found["leaves"][0]
    assert first["leaf"] == "ring.reduce_scatter @ gpu" and first["axes"] == ["gpu"]
    assert sorted(first["steps"][0]["sends"]) == [
        ["add", 0, 1, 2],
        ["add", 1, 2, 0],
        ["add", 2, 0, 1],
    ]
    pairs = json.loads(cli("show", "pairwise.all_to_all", "--mesh", "gpu=2", "--json").stdout)
    assert sorted(pairs["leaves"][0]["steps"][0]["sends"]) == [
        ["copy", [0, 1], 0, 1],
        ["copy", [1, 0], 1, 0],
    ]
    native = json.loads(cli("show", "native.all_gather", "--mesh", "gpu=2", "--json").stdout)
    assert native["leaves"][0]["native"] is True


def test_verify_prints_the_certificate(cli):
    result = cli("verify", COMPOSITE, "--mesh", "host=4,gpu=8")
    assert result.exit_code == 0 and result.stderr == "" and "\x1b" not in result.stdout
    assert result.stdout.splitlines()[0] == COMPOSITE
    rows = {name: value[0] for name, value in cells(result.stdout).items() if value}
    assert rows["type"] == "host: partial -> replica, gpu: partial -> replica"
    assert rows["mesh"] == "host=4,gpu=8 (32 ranks)"
    assert rows["steps"] == "18, at least 5 with one port"
    assert rows["rounds"] == "20"
    assert rows["most sent"] == "17/8 S = 2.125 S, lower bound 31/16 S, gap 34/31 = 1.097"
    assert rows["rounding depth"] == "10 additions in a chain"
    assert rows["consistent"].startswith("yes")
    assert rows["narrow wire"].startswith("yes")


def test_verify_says_what_is_trusted(cli):
    rows = cells(cli("verify", "native.all_reduce", "--mesh", "gpu=4").stdout)
    assert rows["trusted"] == ["native.all_reduce"]
    assert rows["consistent"][0].startswith("unknown")


def test_verify_names_batch_axes(cli):
    rows = cells(cli("verify", "ring.all_reduce @ gpu", "--mesh", "host=2,gpu=4").stdout)
    assert rows["batch axes"] == ["host=2, which the schedule does not name"]


def test_verify_as_json(cli):
    found = json.loads(cli("verify", COMPOSITE, "--mesh", "host=4,gpu=8", "--json").stdout)
    assert found["sent"] == "17/8" and found["gap"] == "34/31"
    assert found["bound"] == {"steps": 5, "sent": "31/16", "received": "31/16"}
    assert found["type"]["gpu"] == {"before": "partial", "after": "replica"}
    assert found["consistent"] is True and found["trusted"] == []
    native = json.loads(cli("verify", "native.all_reduce", "--mesh", "gpu=8", "--json").stdout)
    assert native["sent"] is None and native["consistent"] is None


def test_schedules_of_files(cli, file):
    for command in ("show", "verify"):
        result = cli(command, f"{file}:star", "--mesh", "gpu=4")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("mine.star @ gpu")
    assert cli("verify", f"{file}:server", "--mesh", "host=2,gpu=4").exit_code == 0


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize(
    "schedule, mesh, needed",
    [
        ("rnig.all_reduce", "gpu=4", "Did you mean ring?"),
        ("ring.all_redcue", "gpu=4", "Did you mean ring.all_reduce"),
        ("ring.all_reduce @", "gpu=4", "invalid syntax"),
        ("ring.all_gather >> ring.all_gather", "gpu=4", "Drop the second gather"),
        ("ring.all_reduce", "host=2,gpu=4", '"ring.all_reduce @ gpu"'),
        ("ring.all_reduce @ gpuu", "gpu=4", "Did you mean gpu?"),
        ("server.shards", "gpu=4", "server.shards(...)"),
        ("__import__('os')", "gpu=4", "no schedule module '__import__'"),
        ("absent.py:star", "gpu=4", "no schedule file absent.py"),
        ("mine.py:sta", "gpu=4", "Did you mean star?"),
        ("mine.py:star", "host=2,gpu=4", '"mine.py:star @ gpu"'),
        ("mine.py:star.reversed()", "host=2,gpu=4", '"mine.py:(star.reversed()) @ gpu"'),
        ("mine.py:endless", "gpu=2", "still yielding after"),
        ("mine.py:nonsense", "gpu=4", "yielded 42"),
        ("mine.py:raises", "gpu=4", "out of luck"),
        ("mine.py:wrong", "gpu=4", "chunk 0"),
    ],
)
def test_bad_schedules(refused, file, command, schedule, mesh, needed):
    assert needed in refused(command, schedule, "--mesh", mesh)


def test_a_refusal_points_to_the_line(refused, file):
    message = refused("verify", f"{file}:wrong", "--mesh", "gpu=3")
    lines = Path(file).read_text().splitlines()
    line = lines.index("def wrong(n):") + 2
    assert f"mine.py:{line}: at the end chunk 0 at rank 1 lacks" in message
    assert ">    0  add c[0]  1 -> 0    add c[0]  2 -> 0" in message


def test_a_file_that_never_ends_is_stopped(refused, file):
    """Once where it is caught by the file, once where the message gets the place in the file."""
    message = refused("verify", f"{file}:deaf", "--mesh", "gpu=4", "--timeout", "0.3")
    assert "stopped after 0.3 s" in message and "--timeout" in message
    message = refused("verify", f"{file}:forever", "--mesh", "gpu=4", "--timeout", "0.3")
    assert "mine.forever (n = 4), step 0, mine.py:" in message and "stopped after" in message


def test_a_file_that_never_ends_when_loaded(refused, tmp_path):
    path = tmp_path / "loop.py"
    path.write_text("while True: pass\n")
    assert "stopped after" in refused("show", f"{path}:x", "--mesh", "gpu=4", "--timeout", "0.2")


def test_a_file_that_cannot_be_loaded(refused, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nx +\n")
    assert f"{path}:2: SyntaxError" in refused("show", f"{path}:x", "--mesh", "gpu=4")


@pytest.mark.parametrize(
    "mesh, needed",
    [
        ("", "found nothing"),
        ("gpu", "not an axis with its size"),
        ("=8", "not an axis with its size"),
        ("gpu=8,", "found nothing"),
        ("gpu=", "not ''"),
        ("gpu=0", "positive integer, not '0'"),
        ("gpu=-2", "positive integer, not '-2'"),
        ("gpu=2.5", "positive integer, not '2.5'"),
        ("gpu=four", "positive integer, not 'four'"),
        ("gpu=²", "positive integer"),
        ("gpu=2,gpu=4", "axis gpu is named twice"),
        ("my-gpu=2", "'my-gpu' cannot name an axis"),
        ("for=2", "'for' cannot name an axis"),
        ("None=2", "'None' cannot name an axis"),
        ("n=4", "give the axis a name"),
        ("gpu=65537", "65,537 ranks are more than"),
        ("host=1000,gpu=1000", "1,000,000 ranks are more than"),
        ("gpu=" + "9" * 5000, "positive integer"),
    ],
)
def test_bad_meshes(refused, mesh, needed):
    with pytest.raises(MeshError):
        parse_mesh(mesh)
    message = refused("verify", "ring.all_reduce", "--mesh", mesh)
    assert needed in message and "Write it as gpu=8" in message


def test_good_meshes():
    assert list(parse_mesh(" host = 2 ,gpu=04").items()) == [("host", 2), ("gpu", 4)]


def test_debug_before_or_after_the_command(cli):
    bad = ("verify", "rnig.all_reduce", "--mesh", "gpu=4")
    for args in (("--debug", *bad), (*bad, "--debug")):
        result = cli(*args)
        assert result.exit_code == 1 and result.stdout == ""
        assert "Traceback" in result.stderr and "ScheduleError" in result.stderr
        assert "error: there is no schedule module" in result.stderr.splitlines()[-1]
    assert "Traceback" not in cli(*bad).stderr, "--debug must not outlive its command"


def test_what_a_file_prints_goes_to_stderr(cli, file):
    text = (
        Path(file)
        .read_text()
        .replace("    yield add(ALL", "    print('steps')\n    yield add(ALL", 1)
    )
    Path(file).write_text("print('loading')\n" + text)
    result = cli("verify", f"{file}:star", "--mesh", "gpu=3", "--json")
    assert json.loads(result.stdout)["rounds"] == 4
    assert result.stderr == "loading\nsteps\n"


def test_nothing_that_a_file_says_moves_the_cursor(refused, file):
    Path(file).write_text(
        "from collc.errors import ScheduleError\nraise ScheduleError('a\\x1b[2Jb')"
    )
    assert "mine.py:2: a [2Jb" in refused("verify", f"{file}:star", "--mesh", "gpu=3")


def test_what_nobody_expected(cli, monkeypatch):
    def broken(source):
        raise RuntimeError("[bold]oops")

    monkeypatch.setattr("collc.cli.verifying.find", broken)
    args = ("verify", "ring.all_reduce", "--mesh", "gpu=4")
    result = cli(*args)
    assert result.exit_code == 1
    assert result.stderr == (
        "internal error: RuntimeError: [bold]oops. Rerun with --debug to see where.\n"
    )
    assert "in broken" in cli(*args, "--debug").stderr


@pytest.mark.parametrize(
    "error, status",
    [(KeyboardInterrupt, 130), (BrokenPipeError, 141), (MemoryError, 1), (FileNotFoundError, 1)],
)
def test_other_ends(cli, monkeypatch, error, status):
    def broken(source):
        raise error

    monkeypatch.setattr("collc.cli.show.find", broken)
    result = cli("show", "ring.all_reduce", "--mesh", "gpu=4")
    assert result.exit_code == status
    assert ("memory" in result.stderr) == (error is MemoryError)
    assert ("refused to read or write" in result.stderr) == (error is FileNotFoundError)


@pytest.mark.parametrize(
    "args, needed",
    [
        (("shwo",), "No such command"),
        (("show",), "SCHEDULE"),
        (("show", "ring.all_reduce"), "--mesh"),
        (("show", "a", "b", "--mesh", "gpu=4"), "(b). Quote the expression."),
        (("list", "--nope"), "No such option"),
        (("list", "--timeout", "0"), "--timeout"),
        (("list", "--timeout", "nan"), "--timeout"),
        (("train", "--steps", "0"), "--steps"),
        (("train", "--platform", "tpu"), "--platform"),
    ],
)
def test_wrong_usage_is_status_2(cli, args, needed):
    result = cli(*args)
    assert result.exit_code == 2
    assert needed in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["list", "show", "verify", "train"])
def test_help_has_an_example(cli, command):
    text = cli(command, "--help").stdout
    assert "Examples:" in text and f"collc {command}" in text.partition("Examples:")[2]
    assert text == cli(command, "-h").stdout


def test_version(cli):
    words = cli("--version").stdout.split()
    assert words[0] == "collc" and words[2] == "jax" and words[4] == "python"


def test_fold_keeps_every_word():
    line = "     7  add c[0]  13 -> 14    add c[0]  15 -> 14    copy c[3]  1 -> 2    ... 9 more"
    for width in (10, 20, 40, 60, 200):
        pieces = fold(line, width)
        assert " ".join(" ".join(pieces).split()) == " ".join(line.split())
        assert all(len(piece) <= max(width, 26) for piece in pieces)
    assert fold("", 10) == [""]
