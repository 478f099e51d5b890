"""trace: simulations with faults, timelines as files, and a real run beside the predicted one."""

import json
import math

import pytest

RING = ("trace", "ring.all_reduce", "--machine", "dgx-h100", "--size", "64MiB")


def test_it_says_how_long_and_what_the_time_is_made_of(cli):
    result = cli(*RING)
    assert result.exit_code == 0, result.output
    assert "done after" in result.stdout and "critical path:" in result.stdout
    found = json.loads(cli(*RING, "--json").stdout)
    assert found["seconds"] == pytest.approx(math.fsum(found["critical"]["seconds"].values()))
    assert found["finish"] == [found["seconds"]] * 8 and found["stalls"] == []
    price = json.loads(cli("cost", *RING[1:], "--json").stdout)
    assert found["seconds"] == pytest.approx(price["lowered"])  # nobody waits in a ring
    abstract = json.loads(cli(*RING, "--model", "abstract", "--json").stdout)
    assert abstract["seconds"] == pytest.approx(price["abstract"])


def test_files_are_written_as_their_endings_say(cli, tmp_path):
    names = [tmp_path / f"t{ending}" for ending in (".json", ".svg", ".png")]
    result = cli(*RING, *(word for name in names for word in ("-o", str(name))))
    assert result.exit_code == 0, result.output
    trace = json.loads(names[0].read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] != "waiting"]
    assert len(spans) == 14 * 8
    assert names[1].read_text().startswith("<?xml") and names[2].read_bytes()[1:4] == b"PNG"
    links = tmp_path / "links.json"
    assert cli(*RING, "--lanes", "link", "-o", str(links)).exit_code == 0
    lanes = {
        e["args"]["name"]
        for e in json.loads(links.read_text())["traceEvents"]
        if "name" in e["args"]
    }
    assert "node0/gpu0 -> switch" in lanes


def test_faults_show_who_stalls_and_how_far_the_rest_gets(cli):
    def stalled(schedule: str) -> dict:
        args = ("trace", schedule, "--machine", "dgx-h100", "--size", "64M", "--json")
        return json.loads(cli(*args, "--fault", "broken rank 5").stdout)

    ring, tree = stalled("ring.all_reduce"), stalled("tree.all_reduce")
    assert ring["seconds"] is None and len(ring["stalls"]) == len(tree["stalls"]) == 8
    assert all(stall["cause"] == "rank 5 is broken" for stall in ring["stalls"])
    assert ring["progress"] < tree["progress"]  # in a ring everybody hears of it
    slow = json.loads(cli(*RING, "--fault", "slow rank 3 x2", "--json").stdout)
    assert slow["critical"]["seconds"]["fault"] > 0
    idle = json.loads(cli(*RING, "--fault", "slow nic 0 of node 0 x9", "--json").stdout)
    assert idle["without_effect"] == ["slow nic 0 of node 0 x9"]


def test_a_plan_and_a_whole_step(cli):
    args = ("trace", "--plan", "gpu=ring,host=tree", "--machine", "dgx-h100:4", "--size", "1G")
    alone = json.loads(cli(*args, "--json").stdout)
    step = json.loads(cli(*args, "--compute", "120ms", "--buckets", "8", "--json").stdout)
    assert alone["what"].startswith("ring.reduce_scatter @ gpu >> tree.all_reduce @ host")
    assert 0.12 < step["seconds"] < 0.12 + alone["seconds"]


def test_a_real_run_beside_the_predicted_one(cli, tmp_path):
    path = tmp_path / "both.json"
    args = ("ring.all_reduce", "--machine", "pcie-8", "--mesh", "gpu=4", "--size", "64K")
    result = cli("trace", *args, "--measured", "run", "--json", "-o", str(path))
    assert result.exit_code == 0, result.output
    rows = {row["what"]: row for row in json.loads(result.stdout)["measured"]}
    assert list(rows) == ["ring.reduce_scatter @ gpu", "ring.all_gather @ gpu"]
    assert all(row["rounds"] == 3 and row["measured"] > 0 for row in rows.values())
    names = [
        e["args"]["name"]
        for e in json.loads(path.read_text())["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    ]
    assert "measured" in names and "device 3" in names


@pytest.mark.parametrize(
    "args, said",
    [
        ((), "say either a schedule or --plan"),
        (("ring.all_reduce", "--plan", "gpu=ring"), "say either a schedule or --plan"),
        (("ring.all_reduce", "--model", "exact"), "--model exact: say abstract or lowered"),
        (("ring.all_reduce", "--lanes", "nic", "-o", "x.svg"), "--lanes nic: say rank or link"),
        (("ring.all_reduce", "--lanes", "link"), "has an effect on files only"),
        (("ring.all_reduce", "--buckets", "4"), "have an effect on a step only"),
        (("ring.all_reduce", "--no-overlap"), "have an effect on a step only"),
        (("ring.all_gather", "--compute", "1ms"), "ring.all_gather @ gpu is no all-reduce"),
        (("ring.all_reduce", "--compute", "1ms", "--buckets", "0"), "0 buckets cannot be"),
        (("native.all_reduce", "--lanes", "link", "-o", "x.json"), "which links XLA's own take"),
        (("ring.all_reduce", "-o", "x.pdf"), "its ending has to be .json, .svg or .png"),
        (("ring.all_reduce", "-o", "nowhere/x.svg"), "there is no folder"),
        (("ring.all_reduce", "--fault", "bad rank 3"), "bad rank 3"),
        (("ring.all_reduce", "--fault", "slow rank 99 x2"), "0 to 7"),
        (("ring.all_reduce", "--compute", "1s", "--measured", "run"), "Drop --compute"),
        (("ring.all_reduce", "--measured", "nowhere"), "does not exist"),
        (("ring.all_reduce", "--measured", "run", "--order", "1,0"), "Drop --order"),
        (("native.all_reduce", "--model", "abstract"), "Take model='lowered'"),
    ],
)  # fmt: skip
def test_bad_input(refused, args, said):
    assert said in refused("trace", *args, "--machine", "dgx-h100", "--size", "1M")


def test_too_many_virtual_devices_are_not_run(refused):
    args = ("trace", "ring.all_reduce", "--machine", "dgx-h100:16", "--size", "64K")
    assert "Take at most 64" in refused(*args, "--measured", "run")


def test_an_order_of_devices(cli):
    args = ("trace", "ring.all_reduce", "--machine", "pcie-8", "--size", "64M")
    bad = cli(*args, "--order", "0,4,1,5,2,6,3,7").stdout
    assert "crosses sockets needlessly" in bad and "crosses" not in cli(*args).stdout
