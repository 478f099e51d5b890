"""plan: what it prints, and what it says to bad input."""

import json

import pytest
from jax.sharding import AbstractMesh

import collc

SMALL = ("--machine", "gpus=4 link=25GB/s,3us add=1000GB/s ports=1", "--mesh", "gpu=4")
POD = ("--machine", "dgx-h100:4", "--mesh", "host=4,gpu=8")


def test_a_ranking_and_the_reason(cli, golden):
    result = cli("plan", *POD, "--size", "64MiB", "--plan", "gpu=ring,host=tree", "--top", "5")
    assert result.exit_code == 0 and result.stderr == "", result.output
    golden("plan_machine.txt", result.stdout)


def test_the_choice_by_size(cli):
    result = cli("plan", *POD, "--collective", "all_to_all")
    assert result.exit_code == 0, result.output
    rows = result.stdout[result.stdout.index("   from") :].splitlines()
    assert rows[1].split()[:2] == ["0", "B"]
    assert rows[1].endswith("native.all_to_all @ gpu >> native.all_to_all @ host")
    assert rows[2].endswith("itself               native.all_to_all @ (host, gpu)")


def test_json_has_ratios_to_the_winner_and_ties(cli):
    args = ("plan", *SMALL, "--size", "1K", "--size", "64M", "--json")
    result = cli(*args)
    found = json.loads(result.stdout)
    assert result.stdout == cli(*args).stdout
    assert [each["size"] for each in found["sizes"]] == [1024, 64 << 20]
    for each in found["sizes"]:
        rows = each["ranked"]
        (chosen,) = [row for row in rows if row["chosen"]]
        assert chosen["schedule"] == "native.all_reduce @ gpu" and chosen["ratio"] == 1
        assert [row["lowered"] for row in rows] == sorted(row["lowered"] for row in rows)
        fastest = rows[0]["lowered"]
        for row in rows:
            assert row["ratio"] == pytest.approx(row["lowered"] / chosen["lowered"])
            near = row["lowered"] <= fastest * (1 + found["error"])
            assert row["tie"] == (near and (row is not rows[0] or not row["chosen"]))
            assert sum(row["terms"].values()) == pytest.approx(row["lowered"])


def test_the_plan_is_saved_and_loads(cli, tmp_path):
    path = tmp_path / "plan.txt"
    mesh = AbstractMesh((4,), ("gpu",))
    result = cli("plan", *SMALL, "--save", str(path))
    assert result.exit_code == 0 and f"Saved: {path}" in result.stdout.replace("\n", "")
    assert collc.Plan.load(path, mesh) == collc.plan(mesh, "auto", machine=SMALL[1])
    assert cli("plan", *SMALL, "--plan", "gpu=ring", "--save", str(path)).exit_code == 0
    assert collc.Plan.load(path, mesh) == collc.plan(mesh, {"gpu": "ring"})


def test_bad_input(refused):
    assert "Did you mean all_reduce" in refused("plan", *SMALL, "--collective", "all_reduec")
    assert "is no size" in refused("plan", *SMALL, "--size", "big")
    assert "0 bytes. Give a whole number" in refused("plan", *SMALL, "--size", "0")
    assert "dgx-h101" in refused("plan", "--machine", "dgx-h101", "--mesh", "gpu=8")
    assert "8 devices, but the mesh" in refused("plan", "--machine", "dgx-h100", "--mesh", "gpu=9")
    assert "Did you mean ring" in refused("plan", *SMALL, "--plan", "gpu=rign")
    assert "the mesh has no axis 'hosts'" in refused("plan", *SMALL, "--plan", "hosts=ring")
