"""collc scale: tables, JSON, receipts, and what is refused."""

import json

import pytest

STEP = ("--compute", "10ms", "--parameters", "64MiB")


def receipt(tmp_path, **more):
    """The file of a receipt: 512 KiB by a ring over 8 GPUs, 100 TFLOP."""
    entry = {
        "name": "permute", "kind": "collective-permute", "axes": ["gpu"], "bytes": 65536, "count": 7,
        "scope": "collc/ring.reduce_scatter/gpu", "by": "plan",
    }  # fmt: skip
    found = {"flops": 1e14, "flops_exact": False, "pod": "h100", "mesh": {"gpu": 8}}
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(found | {"collectives": [entry]} | more))
    return str(path)


def test_tables(cli):
    result = cli("scale", "--machine", "dgx-h100", *STEP, "--devices", "8,64,512", "-s", "ring")
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "weak scaling of a data-parallel step on dgx-h100"
    assert "  10 ms of compute on each device; 64 MiB all-reduced" in lines
    assert "  ring = ring.all_reduce @ (host, gpu)" in lines  # a default one, by its name
    for title in ("step time", "communication, lowered | abstract", "who wins"):
        assert title in lines
    assert any(line.startswith("      512  native") and "~" in line for line in lines)
    assert max(map(len, lines)) <= 110


def test_json_is_what_the_tables_are_of(cli):
    asked = (
        "--devices",
        "8,512",
        "-s",
        "ring.all_reduce @ (host, gpu)",
        "--overlap",
        "0.1",
        "--strong",
    )
    found = json.loads(cli("scale", "--machine", "dgx-h100", *STEP, *asked, "--json").stdout)
    assert (found["strong"], found["overlap"], found["parameters"]) == (True, 0.1, 64 * 2**20)
    eight, many = found["devices"]
    assert eight["steps"][0]["schedule"] == eight["best"] == "native"
    assert all(step["low"] == step["high"] for step in eight["steps"])
    assert all(step["low"]["seconds"] < step["high"]["seconds"] for step in many["steps"])
    assert {step["extrapolated"] for step in many["steps"]} == {True}
    assert found["wins"]["native"][0]["first"] == 8
    assert found["receipt"] is None


def test_a_receipt_says_both(cli, tmp_path):
    path = receipt(tmp_path)
    asked = ("scale", "--machine", "dgx-h100", "--receipt", path, "--devices", "8", "-s", "tree")
    result = cli(*asked)
    assert result.exit_code == 0
    first, note, *rest = result.stdout.splitlines()
    assert first.endswith("1e+14 FLOP a device, 512 KiB reduced")
    assert note.startswith("  note: FLOPs are a lower bound")
    assert (
        "  253 ms of compute on each device; 512 KiB all-reduced" in rest
    )  # at 0.4 of 989 TFLOP/s
    found = json.loads(cli(*asked, "--utilisation", "0.8", "--json").stdout)
    assert found["compute"] == 1e14 / (989e12 * 0.8) and found["parameters"] == 512 * 1024
    assert found["receipt"]["flops"] == 1e14


@pytest.mark.parametrize(
    "args, message",
    [
        ((), "Neither is said"),
        (("--compute", "1ms"), "One of the two is not said"),
        ((*STEP, "--receipt", "x.json"), "--compute and --receipt say the same"),
        (("--parameters", "1M", "--receipt", "x.json"), "--parameters and --receipt say the same"),
        ((*STEP, "--utilisation", "0.3"), "--utilisation turns a receipt's FLOPs into time"),
        (("--receipt", "nowhere.json"), "receipt nowhere.json: No such file"),
        (("--compute", "1", "--parameters", "1M"), "'1' is no time"),
        (("--compute", "0s", "--parameters", "1M"), "compute takes 0.0 s"),
        (("--compute", "1ms", "--parameters", "0"), "is 0 bytes. Give a whole number"),
        (("--compute", "1ms", "--parameters", "7B"), "7 bytes are no model. Say the bytes"),
        ((*STEP, "--devices", "8,x"), "give numbers between commas"),
        ((*STEP, "--devices", "12"), "12 devices are no whole number of nodes of 8"),
        ((*STEP, "--overlap", "2"), "overlap 2.0 is no share"),
        ((*STEP, "-s", "ring.all_gather"), "not an all-reduce"),
        ((*STEP, "-s", "rnig.all_reduce"), "rnig"),
    ],
)
def test_refused(refused, args, message):
    assert message in refused("scale", "--machine", "dgx-h100", *args)


def test_a_file_that_is_no_receipt(refused, tmp_path):
    path = tmp_path / "x.json"
    for text, message in (("", "not JSON"), ("[1]", "no 'flops'"), ("[" * 100_000, "not JSON")):
        path.write_text(text)
        said = refused("scale", "--machine", "dgx-h100", "--receipt", str(path))
        assert str(path) in said and message in said
    said = refused(
        "scale", "--machine", "dgx-h100", "--receipt", receipt(tmp_path, pod="x", flops=0)
    )
    assert "computes nothing" in said


def test_hosts_are_what_is_scaled(refused):
    assert "Leave :4 or hosts= out" in refused("scale", "--machine", "dgx-h100:4", *STEP)
