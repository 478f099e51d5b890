"""What `collc doctor` reads of RDMA ports: each planted under a root."""

import pytest

from collc.runtime.doctor import rdma

from .planted import PORT, host, only, port


@pytest.mark.parametrize(
    "files, words",
    [
        (port(symbol_error=12), ["mlx5_0 port 1", "symbol_error 12", "cable"]),
        (port(link_downed=3), ["link_downed 3", "cable"]),
        (port(port_rcv_errors=1), ["port_rcv_errors 1", "cable"]),
        (port(out_of_sequence=9), ["out_of_sequence 9", "PFC", "MTU"]),
        (port(local_ack_timeout_err=2), ["local_ack_timeout_err 2", "lost packets"]),
        (port(roce_slow_restart=5), ["roce_slow_restart 5", "congested", "ECN"]),
        (port(port_xmit_discards=4), ["port_xmit_discards 4", "congested"]),
        (port(port_rcv_constraint_errors=2), ["port_rcv_constraint_errors 2", "partition keys"]),
        (port(VL15_dropped=7), ["VL15_dropped 7", "subnet manager"]),
        (port(req_remote_access_errors=1), ["req_remote_access_errors 1", "NCCL WARN"]),
        (
            port(state="1: DOWN", phys_state="3: Disabled"),
            ["1: DOWN", "3: Disabled", "NCCL_IB_HCA"],
        ),
        (port(state="2: INIT"), ["2: INIT", "opensm"]),
        (
            port() | port("mlx5_1", rate="100 Gb/sec (4X EDR)"),
            [
                "different rates",
                "400 Gb/sec (4X NDR) at mlx5_0 port 1",
                "100 Gb/sec",
                "NCCL_IB_HCA",
            ],
        ),
    ],
)
def test_rdma(tmp_path, files, words):
    only(rdma.rdma(host(tmp_path, files)), "warning", *words)


def test_rdma_that_is_well_or_not_there(tmp_path):
    only(rdma.rdma(host(tmp_path / "a", port())), "ok", "1 active port, no errors in 2 counters")
    assert rdma.rdma(host(tmp_path / "b")) == []
    without = {k: v for k, v in port().items() if "counters" not in k}
    only(rdma.rdma(host(tmp_path / "c", without)), "ok", "no counters at mlx5_0 port 1")
    slower = port() | port("mlx5_1", rate="100 Gb/sec (4X EDR)")
    only(rdma.rdma(host(tmp_path / "d", slower, NCCL_IB_HCA="=mlx5_0")), "ok", "2 active ports")


def test_long_files_of_a_port_are_cut(tmp_path):
    long = {"state": f"1: DOWN{'x' * 5000}", "phys_state": "y" * 5000}
    (found,) = rdma.rdma(host(tmp_path / "a", port(**long)))
    assert len(found.found) < 600
    assert "... (5,007 characters) (physical: yyy" in found.found
    (found,) = rdma.rdma(host(tmp_path / "b", port() | port("mlx5_1", rate="z" * 5000)))
    assert len(found.found) < 400
    assert "... (5,000 characters) at mlx5_1 port 1" in found.found


@pytest.mark.parametrize("name", sorted(rdma.ERRORS))
def test_every_counter_of_a_port(tmp_path, name):
    planted = port() | {f"{PORT.format('mlx5_0')}/hw_counters/{name}": 1}
    only(rdma.rdma(host(tmp_path, planted)), "warning", f"{name} 1")


@pytest.mark.parametrize("end", ["req", "resp"])
def test_completions_flushed_when_a_program_ends_are_no_errors(tmp_path, end):
    """NVIDIA's cards count them among the failed ones, and once more on their own."""
    flushed = {f"{end}_cqe_error": 40, f"{end}_cqe_flush_error": 40}
    only(rdma.rdma(host(tmp_path / "a", port(**flushed))), "ok", "no errors in 3 counters")
    more = port(**flushed | {f"{end}_cqe_error": 42})
    only(rdma.rdma(host(tmp_path / "b", more)), "warning", f"{end}_cqe_error 2 since", "NCCL WARN")


@pytest.mark.parametrize("name", ["port_rcv_switch_relay_errors", "req_cqe_flush_error"])
def test_benign_counters_of_a_port(tmp_path, name):
    """Nothing is said of them, and an ok does not count them among what it has read."""
    only(
        rdma.rdma(host(tmp_path, port(**{name: 9}))), "ok", "1 active port, no errors in 2 counters"
    )
