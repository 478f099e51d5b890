"""Bandwidths and latencies of links inside a host, as NCCL counts them (src/graph/topo.h, topo.cc).

Bandwidths are bytes a second, each way. The latencies are typical ones, chosen so that whole ways
come out as people measure them: NVLink 1.5 us, PCIe through one switch 2, through two sockets 4.
"""

# 100 Mbit/s of a lane, by GT/s.
_LANE = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
_UNKNOWN_LANE = 60
_GENERATIONS = {3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
UNKNOWN_WIDTH = 16
# Of one NVLink, by the compute capability x 10 from which it holds.
_NVLINK = {100: 40.1e9, 90: 20.6e9, 80: 20e9, 70: 20e9, 60: 18e9}
_NVLINK_86 = 12e9
NVLINKS = 18  # the most that a GPU of today has
UNKNOWN_NVLINK = 25e9  # A100, H100: 25 GB/s each way
UNKNOWN_NET = 12.5e9  # 100 Gb/s
UNSAID_NET = 1.25e9  # some NICs say -1: NCCL then takes 10 Gb/s

# Seconds. A GPU's end of a wire has most of it: the copy starts and ends there.
NVLINK_TO_SWITCH = 0.75e-6
NVLINK_TO_PEER = 1.2e-6
PCIE_TO_GPU = 1e-6
PCIE_HOP = 0.3e-6
SOCKET_HOP = 1e-6
PCIE_ENDS = 2 * (PCIE_TO_GPU + PCIE_HOP)  # from a GPU to the NIC beside it, here and there
# From NIC to NIC, without those ends.
NET = {"infiniband": 2e-6, "roce": 4e-6, "efa": 15e-6, "tcp": 27e-6}


def known_lane(gts: float) -> bool:
    """Whether PCIe has such a speed, in GT/s."""
    return gts in _LANE


def pcie(gts: float | None, width: int) -> float:
    """Of a PCIe link: the speed of a lane in GT/s, None if unknown, and how many lanes.

    >>> pcie(16.0, 16), pcie(None, 16), pcie(32.0, 8)
    (24000000000.0, 12000000000.0, 24000000000.0)
    """
    lane = _LANE.get(gts, _UNKNOWN_LANE) if gts is not None else _UNKNOWN_LANE
    return width * lane / 80 * 1e9


def pcie_generation(generation: int) -> float:
    """Of 16 lanes of PCIe 3, 4, 5 or 6.

    >>> pcie_generation(5)
    48000000000.0
    """
    return pcie(_GENERATIONS[generation], UNKNOWN_WIDTH)


def nvlink(sm: int | None) -> float:
    """Of one NVLink of a GPU with compute capability sm / 10; one of an A100 if it is unknown.

    >>> nvlink(90), nvlink(86), nvlink(103)
    (20600000000.0, 12000000000.0, 40100000000.0)
    """
    if sm is None or sm < 60:
        return _NVLINK[80]
    return _NVLINK_86 if sm == 86 else next(rate for since, rate in _NVLINK.items() if sm >= since)


def between_sockets(arch: str, vendor: str, family: int, model: int) -> float | None:
    """Between two CPUs of that kind; None where it is not known."""
    if arch in ("arm64", "aarch64"):
        return 6e9
    if vendor == "AuthenticAMD":
        return 16e9
    if vendor == "GenuineIntel":
        if family == 6 and model >= 0x8F:  # Sapphire Rapids
            return 22e9
        return 10e9 if family == 6 and model >= 0x55 else 6e9  # Skylake; older
    return None


UNKNOWN_SOCKET = 10e9
