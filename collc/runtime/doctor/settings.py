"""Variables of JAX, of its allocator and of CUDA that are for debugging, or that make a run slow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collc.runtime.doctor.finding import Finding, Level, ok, short
from collc.runtime.doctor.host import asked

CHECK = "JAX settings"


def _on(environment: Mapping[str, str], name: str) -> bool:
    """What jax takes as true; at what is neither true nor false it does not start."""
    return environment[name].lower() in ("y", "yes", "t", "true", "on", "1")


def _given(environment: Mapping[str, str], name: str) -> bool:
    return environment[name] != ""


def _is(*values: str) -> Callable[[Mapping[str, str], str], bool]:
    return lambda environment, name: environment[name] in values


def _slow_allocator(environment: Mapping[str, str], name: str) -> bool:
    return environment[name].lower() == "platform"


def _no_allocator(environment: Mapping[str, str], name: str) -> bool:
    return environment[name].lower() not in ALLOCATORS


def _no_integer(environment: Mapping[str, str], name: str) -> bool:
    try:
        int(environment[name])
    except ValueError:
        return True
    return False


def _no_size(environment: Mapping[str, str], name: str) -> bool:
    return _given(environment, name) and _no_integer(environment, name)


def _share(environment: Mapping[str, str], name: str) -> float | None:
    """None for what is no number."""
    try:
        return float(environment[name])
    except ValueError:
        return None


def _greedy(environment: Mapping[str, str], name: str) -> bool:
    share = _share(environment, name)
    return share is not None and share > 0.95


def _nothing(environment: Mapping[str, str], name: str) -> bool:
    share = _share(environment, name)
    return share is not None and not share > 0  # nan too


def _no_number(environment: Mapping[str, str], name: str) -> bool:
    return _given(environment, name) and _share(environment, name) is None


def _twice(environment: Mapping[str, str], name: str) -> bool:
    return bool(environment.get(SHARE) and environment.get(name))


@dataclass(frozen=True)
class Setting:
    """A variable, when it is one to speak of, what it does, and what to do instead."""

    name: str
    when: Callable[[Mapping[str, str], str], bool]
    level: Level
    what: str
    remedy: str


SHARE, OLD_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
ALLOCATOR, COLLECTIVE, ABORT = (
    f"XLA_PYTHON_CLIENT_{name}"
    for name in ("ALLOCATOR", "COLLECTIVE_MEM_SIZE_MB", "ABORT_COLLECTIVES_ON_FAILURE")
)
# As jaxlib's generate_pjrt_gpu_plugin_options has them; the oldest does not know "address".
ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")
SETTINGS = (
    Setting("JAX_DISABLE_JIT", _on, Level.ERROR,
            "runs every operation on its own; plans and receipts need jit", "unset JAX_DISABLE_JIT"),
    Setting("JAX_DEBUG_NANS", _on, Level.WARNING,
            "waits for each step and looks at all its results", "unset JAX_DEBUG_NANS; collc.fit skips "
            "steps that are not finite (max_skipped)"),
    Setting("JAX_DEBUG_INFS", _on, Level.WARNING,
            "waits for each step and looks at all its results", "unset JAX_DEBUG_INFS"),
    Setting("JAX_DISABLE_MOST_OPTIMIZATIONS", _on, Level.WARNING,
            "compiles without optimisations: for tests", "unset JAX_DISABLE_MOST_OPTIMIZATIONS"),
    Setting("JAX_ENABLE_X64", _on, Level.NOTE,
            "makes float64 and int64 the default: twice the bytes, on every link too",
            "unset JAX_ENABLE_X64 if that is not on purpose"),
    Setting("JAX_DEFAULT_MATMUL_PRECISION", _is("highest", "float32"), Level.NOTE,
            "multiplies matrices in float32 without tensor cores",
            "unset JAX_DEFAULT_MATMUL_PRECISION if that is not on purpose"),
    Setting("JAX_LOG_COMPILES", _on, Level.NOTE, "logs each compilation, from every process",
            "unset JAX_LOG_COMPILES"),
    Setting("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", _given, Level.WARNING,
            "hides CUDA libraries that are too old: results may be wrong",
            "unset JAX_SKIP_CUDA_CONSTRAINTS_CHECK, and install what jax then asks for"),
    Setting(ALLOCATOR, _slow_allocator, Level.WARNING,
            "asks CUDA for each buffer, and waits for it: slow",
            f"unset {ALLOCATOR}, or set it to default"),
    Setting(ALLOCATOR, _no_allocator, Level.ERROR,
            f"is none of {', '.join(ALLOCATORS)}: jax starts no GPU with it", f"unset {ALLOCATOR}"),
    Setting(COLLECTIVE, _no_size, Level.ERROR, "is no integer: jax starts no GPU with it",
            f"unset {COLLECTIVE}, or set it to a number of MiB such as 1024"),
    Setting(ABORT, _no_integer, Level.ERROR, "is no integer: jax starts no GPU with it",
            f"set {ABORT} to 0 or 1, or unset it"),
    Setting("XLA_PYTHON_CLIENT_PREALLOCATE", _is("false", "False", "0"), Level.NOTE,
            "lets memory grow in pieces, which can split it up",
            "unset XLA_PYTHON_CLIENT_PREALLOCATE where nothing else uses the GPU"),
    *(Setting(name, _greedy, Level.WARNING, "leaves NCCL and CUDA no memory of their own",
              f"set {name} to 0.9 or less") for name in (SHARE, OLD_SHARE)),
    *(Setting(name, _nothing, Level.ERROR, "is no share of memory: nothing can be allocated",
              f"unset {name}, or set it to a share such as 0.75") for name in (SHARE, OLD_SHARE)),
    *(Setting(name, _no_number, Level.ERROR, "is no number: jax starts no GPU with it",
              f"unset {name}, or set it to a share such as 0.75") for name in (SHARE, OLD_SHARE)),
    Setting(OLD_SHARE, _twice, Level.ERROR, f"is given beside {SHARE}: jax starts no GPU with both",
            f"unset {OLD_SHARE}, which is the old name"),
    Setting("CUDA_LAUNCH_BLOCKING", asked, Level.WARNING, "waits for each kernel: nothing overlaps",
            "unset CUDA_LAUNCH_BLOCKING"),
)  # fmt: skip


def settings(environment: Mapping[str, str]) -> list[Finding]:
    """Findings on the variables of JAX and CUDA."""
    found = [
        Finding(CHECK, s.level, f"{s.name}={short(environment[s.name])} {s.what}", s.remedy)
        for s in SETTINGS
        if s.name in environment and s.when(environment, s.name)
    ]
    return found or [ok(CHECK, "none that a run should be without")]
