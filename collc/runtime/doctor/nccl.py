"""NCCL's variables: unknown names, workarounds left over, interfaces that are not there."""

import difflib
import os
from collections.abc import Sequence

from collc.runtime.doctor.finding import Finding, error, listed, note, ok, short, warning
from collc.runtime.doctor.host import Host, asked

CHECK = "NCCL settings"
# Of NCCL's user guide, without the leading NCCL_.
KNOWN = tuple(
    f"NCCL_{name}"
    for name in """
    SOCKET_IFNAME SOCKET_FAMILY SOCKET_MAGIC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC
    SOCKET_POLL_TIMEOUT_MSEC SOCKET_NTHREADS NSOCKS_PERTHREAD PSK CROSS_NIC IB_HCA IB_RAIL_POLICY
    IB_TIMEOUT IB_RETRY_CNT IB_GID_INDEX IB_ADDR_FAMILY IB_ADDR_RANGE IB_ROCE_VERSION_NUM IB_SL IB_TC
    IB_FIFO_TC IB_RETURN_ASYNC_EVENTS IB_ECE_ENABLE IB_DATA_DIRECT IB_QPS_PER_CONNECTION
    IB_SPLIT_DATA_ON_QPS IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_PCI_RELAXED_ORDERING
    IB_ADAPTIVE_ROUTING IB_DISABLE IB_MERGE_NICS IB_MERGE_VFS IB_PKEY IB_WARN_RAIL_LOCAL
    OOB_NET_ENABLE OOB_NET_IFNAME UID_STAGGER_THRESHOLD UID_STAGGER_RATE NET NET_PLUGIN TUNER_PLUGIN
    TUNER_CONFIG_PATH PROFILER_PLUGIN ENV_PLUGIN GIN_PLUGIN GIN_ENABLE GIN_TYPE
    IGNORE_CPU_AFFINITY CONF_FILE DEBUG
    DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS COLLNET_ENABLE
    COLLNET_NODE_THRESHOLD CTA_POLICY NETDEVS_POLICY TOPO_FILE TOPO_DUMP_FILE SET_THREAD_NAME
    P2P_DISABLE P2P_LEVEL P2P_DIRECT_DISABLE P2P_PXN_LEVEL SHM_DISABLE SHM_USE_CUDA_MEMCPY
    SHM_LOCALITY BUFFSIZE NTHREADS MIN_NCHANNELS MAX_NCHANNELS MIN_CTAS MAX_CTAS MIN_P2P_NCHANNELS
    MAX_P2P_NCHANNELS CHECKS_DISABLE CHECK_POINTERS CHECK_MODE LAUNCH_MODE LAUNCH_ORDER_IMPLICIT
    LAUNCH_RACE_FATAL NET_GDR_LEVEL NET_GDR_READ NET_GDR_C2C NET_SHARED_BUFFERS NET_SHARED_COMMS
    NET_MERGE_LEVEL NET_MERGE_POLICY NET_FORCE_MERGE NET_FORCE_FLUSH SINGLE_RING_THRESHOLD
    LL_THRESHOLD TREE_THRESHOLD ALGO PROTO NVB_DISABLE PXN_DISABLE PXN_C2C RUNTIME_CONNECT
    GRAPH_REGISTER LOCAL_REGISTER LEGACY_CUDA_REGISTER SET_STACK_SIZE GRAPH_MIXING_SUPPORT
    GRAPH_STREAM_ORDERING DMABUF_ENABLE
    P2P_NET_CHUNKSIZE P2P_LL_THRESHOLD ALLOC_P2P_NET_LL_BUFFERS COMM_BLOCKING COMM_ID CGA_CLUSTER_SIZE
    MAX_CTA NVLS_ENABLE NVLS_NCHANNELS NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE MULTI_RANK_GPU_ENABLE
    MNNVL_ENABLE MNNVL_UUID MNNVL_CLIQUE_ID MNNVL_CLIQUE_SIZE RAS_ENABLE RAS_ADDR
    RAS_TIMEOUT_FACTOR SYM_GIN_KERNELS_ENABLE SYM_CTAS
    WIN_ENABLE WIN_STRIDE CUMEM_ENABLE CUMEM_HOST_ENABLE SINGLE_PROC_MEM_REG_ENABLE P2P_USE_CUDA_MEMCPY
    NVTX_DISABLE CREATE_THREAD_CONTEXT GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_SYNC_ENABLE
    GDRCOPY_FLUSH_ENABLE GDR_FLUSH_DISABLE DUMP_ALGO_TOPO HOSTID COMM_SHRINK_SHARE_RESOURCES
    PROGRESS_APPENDOP_FREQ L1_SHARED_MEMORY_CARVEOUT NCHANNELS_PER_NET_PEER PAT_ENABLE WORK_FIFO_BYTES
    """.split()
)
# Plug-ins of clouds have variables of their own there.
PLUGINS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_DYNAMIC_", "NCCL_TUNER_", "NCCL_NET_PLUGIN_",
           "NCCL_PROFILE", "NCCL_SHIMNET_", "NCCL_INSPECTOR_")  # fmt: skip
OFF = {
    "NCCL_P2P_DISABLE": "sends between a host's GPUs through its memory, not NVLink",
    "NCCL_SHM_DISABLE": "sends between a host's processes through the network",
    "NCCL_IB_DISABLE": "sends between hosts through TCP, not RDMA",
    "NCCL_NVB_DISABLE": "keeps GPUs from passing on by NVLink what others send",
    "NCCL_PXN_DISABLE": "keeps GPUs from using each other's network cards",
}
LOUD = ("INFO", "TRACE", "ABORT")
FORCED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS",
          "NCCL_BUFFSIZE", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS")  # fmt: skip


def variables(host: Host) -> dict[str, str]:
    """NCCL's variables, as it takes them: its files first, then the environment over them."""
    environment = host.environment
    home = environment.get("HOME", "")
    files = [
        "/etc/nccl.conf",
        os.path.abspath(environment.get("NCCL_CONF_FILE") or f"{home}/.nccl.conf"),
    ]
    found: dict[str, str] = {}
    for name in files:
        for line in (host.text(name) or "").splitlines():
            key, equals, value = line.partition("=")
            if equals and key.strip().startswith("NCCL_"):
                found[key.strip()] = value.strip()
    return found | {k: v for k, v in sorted(environment.items()) if k.startswith("NCCL_")}


def nccl(host: Host) -> list[Finding]:
    """Findings on NCCL's variables."""
    own = variables(host)
    found = [f for name in own for f in _name(name)]
    for name, what in OFF.items():
        if asked(own, name):
            shown = f"{name}={short(own[name])} {what}"
            found.append(warning(CHECK, shown, f"unset {name}, or take it out of nccl.conf"))
    if own.get("NCCL_DEBUG", "").upper() in LOUD:
        what = f"NCCL_DEBUG={own['NCCL_DEBUG']} logs from every process, and costs time at start"
        found.append(warning(CHECK, what, "export NCCL_DEBUG=WARN"))
    forced = [name for name in FORCED if name in own]
    if forced:
        what = (
            f"{listed(forced)} overrule what NCCL chooses by size; collc's prices assume its choice"
        )
        found.append(note(CHECK, what, f"unset {' '.join(forced)} if that is not on purpose"))
    found += _named(own, "NCCL_SOCKET_IFNAME", "interface", host.entries("/sys/class/net"))
    cards = host.entries("/sys/class/infiniband")
    if not asked(own, "NCCL_IB_DISABLE"):
        found += _named(own, "NCCL_IB_HCA", "RDMA device", cards)
    return found or [ok(CHECK, f"{len(own)} set, all known" if own else "none set")]


def selected(filters: str, names: Sequence[str]) -> list[str]:
    """The names that a filter of NCCL takes: prefixes, ``=`` exact ones, ``^`` all others.

    >>> selected("eth", ["eth0", "lo"]), selected("=eth", ["eth0"]), selected("^lo", ["eth0", "lo"])
    (['eth0'], [], ['eth0'])
    """
    others = filters.startswith("^")
    rest = filters.removeprefix("^")
    exact = rest.startswith("=")
    words = [word.partition(":")[0].strip() for word in rest.removeprefix("=").split(",")]

    def takes(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words if word)

    return [name for name in names if takes(name) != others]


def _name(name: str) -> list[Finding]:
    if name in KNOWN or name.startswith(PLUGINS):
        return []
    close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85)
    if close:
        what = f"{short(name)} is none of NCCL's documented variables, so it has no effect"
        return [warning(CHECK, what, f"Did you mean {close[0]}?")]
    shown = short(name)
    return [note(CHECK, f"{shown} is none of NCCL's documented variables", f"unset {shown}")]


def _named(own: dict[str, str], variable: str, kind: str, there: list[str]) -> list[Finding]:
    filters = own.get(variable)
    if not filters or selected(filters, there):
        return []
    what = f"{variable}={short(filters)} leaves no {kind}; there are {listed(there) or 'none'}"
    return [error(CHECK, what, f"Name one that is there, or unset {variable}.")]
