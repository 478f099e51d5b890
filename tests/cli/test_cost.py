"""cost: what it prints, and what it says to bad input."""

import json

import pytest

H100 = ("--machine", "dgx-h100", "--size", "64MiB")


def test_a_table_by_step_with_both_models_the_bound_and_xlas_own(cli, golden):
    result = cli("cost", "ring.all_reduce", *H100)
    assert result.exit_code == 0 and result.stderr == "", result.output
    golden("cost.txt", result.stdout)


def test_two_runs_say_the_same_to_the_last_digit(cli):
    args = (
        "cost",
        'hierarchical("host", "gpu")',
        "--machine",
        "dgx-h100:4",
        "--size",
        "1G",
        "--json",
    )
    assert cli(*args).stdout == cli(*args).stdout


def test_json_holds_numbers(cli):
    result = cli(
        "cost", "ring.all_reduce @ host", "--machine", "dgx-h100:4", "--size", "64M", "--json"
    )
    found = json.loads(result.stdout)
    assert found["mesh"] == {"host": 4, "gpu": 8}
    assert found["links"] == {"host": "net", "gpu": "nvlink"}
    # 2 * 3/4 of 64 MiB over each of 32 NICs.
    assert found["traffic"]["net"] == {"total": 2 * 32 * 1.5 * 2**26, "busiest": 1.5 * 2**26}
    assert found["abstract"] > found["bound"]["seconds"] > 0
    assert found["gap"] == pytest.approx(found["abstract"] / found["bound"]["seconds"])
    assert sum(row["steps"] for row in found["rows"]) == 6
    assert found["rows"][0]["lowered"]["seconds"] > found["rows"][0]["abstract"]["seconds"]
    assert found["native"] > 0 and found["in_network"] is False


def test_in_network_reduction_is_marked_and_has_no_gap(cli):
    args = ("cost", "native.all_reduce", "--machine", "dgx-h100", "--size", "1GiB")
    assert "in-network: the switches add" in cli(*args).stdout
    found = json.loads(cli(*args, "--json").stdout)
    assert found["in_network"] and found["gap"] is None and found["abstract"] is None
    assert found["lowered"] < found["bound"]["seconds"] * 1.2


def test_a_file_is_priced_and_one_send_less_costs_less(cli, file):
    args = ("--machine", "pcie-8", "--mesh", "gpu=5", "--size", "4K", "--json")
    whole = json.loads(cli("cost", f"{file}:star", *args).stdout)
    wrong = json.loads(cli("cost", f"{file}:wrong", *args).stdout)  # proved it is not, priced it is
    assert whole["abstract"] > wrong["abstract"] > 0


def test_a_mesh_that_crosses_hosts_needlessly_is_pointed_out(cli):
    args = ("cost", "ring.all_reduce @ gpu", "--machine", "dgx-h100:4", "--size", "1M")
    bad = cli(*args, "--mesh", "gpu=8,host=4").stdout
    assert "the mesh crosses hosts needlessly" in bad
    assert "crosses hosts" not in cli(*args, "--mesh", "host=4,gpu=8").stdout
    order = json.loads(cli(*args, "--mesh", "gpu=8,host=4", "--json").stdout)["better_order"]
    better = cli(*args, "--mesh", "gpu=8,host=4", "--order", ",".join(map(str, order))).stdout
    assert "crosses hosts" not in better


@pytest.mark.parametrize(
    "args, said",
    [
        (("--machine", "dgx-h100", "--size", "0"), "'0' is 0 bytes. Give a whole number"),
        (("--machine", "dgx-h100", "--size", "64 apples"), "is no size"),
        (("--machine", "dgx-h1000", "--size", "1M"), "Did you mean dgx-h100"),
        (("--machine", "dgx-h100", "--size", "1M", "--mesh", "gpu=16"), "has 8 devices, but the mesh"),
        (("--machine", "dgx-h100", "--size", "1M", "--order", "0,1"), "has to name 8 different ones"),
        (("--machine", "dgx-h100", "--size", "1M", "--order", "0,x"), "numbers between commas"),
        (("--machine", "dgx-h100", "--size", "1M", "--mesh", "host=2,gpu=4"), "is not placed"),
    ],
)  # fmt: skip
def test_bad_input(refused, args, said):
    assert said in refused("cost", "ring.all_reduce", *args)


def test_a_schedule_without_axes_takes_all_of_the_machine(cli):
    found = json.loads(
        cli("cost", "ring.all_reduce", "--machine", "dgx-h100:2", "--size", "1M", "--json").stdout
    )
    assert found["schedule"] == "ring.all_reduce @ (host, gpu)"
    assert found["mesh"] == {"host": 2, "gpu": 8}


def test_a_mesh_that_leaves_devices_out_is_noted(cli):
    args = ("cost", "ring.all_reduce @ gpu", "--machine", "dgx-h100:2", "--size", "1M")
    text = cli(*args, "--mesh", "host=2,gpu=4").stdout
    assert "the mesh takes 8 of 16 devices, on 1 of 2 nodes" in text
    assert "the mesh takes" not in cli(*args).stdout


def test_numbers_are_never_cut(cli, monkeypatch):
    args = ("cost", "ring.all_reduce", "--machine", "dgx-h100", "--size", "1M")
    wide = cli(*args).stdout
    monkeypatch.setenv("COLUMNS", "40")
    narrow = cli(*args).stdout
    assert next(row for row in wide.splitlines() if "ring.all_gather" in row) in narrow


def test_what_sends_nothing_and_who_is_alone(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from collc import language as cl\n\n@cl.all_gather\ndef nothing(n):\n    return iter(())\n"
    )
    for schedule, machine in (("mine.py:nothing", "dgx-h100"), ("native.all_reduce", "gpus=1"),
                              ("ring.all_reduce", "gpus=1")):  # fmt: skip
        result = cli("cost", schedule, "--machine", machine, "--size", "1K")
        assert result.exit_code == 0, result.output
        assert "lowered   0 s" in result.stdout


def test_axes_that_a_machine_knows_nothing_of_need_a_mesh(refused):
    assert "Say all of them, as in --mesh" in refused("cost", "ring.all_reduce @ x", *H100)
    args = ("--machine", "dgx-h100", "--size", "1M", "--mesh", "gpu=8")
    assert "x, which has no size here" in refused("cost", "ring.all_reduce @ x", *args)
