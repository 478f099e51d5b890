"""Variables of JAX, of its allocator and of CUDA that are for debugging, or that make a run slow."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collc.runtime.doctor.finding import Finding, Level, ok
from collc.runtime.doctor.host import asked

CHECK = "JAX settings"


def _off(environment: Mapping[str, str], name: str) -> bool:
    return name in environment and not asked(environment, name)


def _is(*values: str) -> Callable[[Mapping[str, str], str], bool]:
    return lambda environment, name: environment.get(name, "").strip().lower() in values


def _share(environment: Mapping[str, str], name: str) -> float:
    try:
        return float(environment.get(name) or 0.0)
    except ValueError:
        return math.nan


def _greedy(environment: Mapping[str, str], name: str) -> bool:
    return _share(environment, name) > 0.95


def _no_number(environment: Mapping[str, str], name: str) -> bool:
    return math.isnan(_share(environment, name))


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
SETTINGS = (
    Setting("JAX_DISABLE_JIT", asked, Level.ERROR,
            "runs every operation on its own; plans and receipts need jit", "unset JAX_DISABLE_JIT"),
    Setting("JAX_DEBUG_NANS", asked, Level.WARNING,
            "waits for each step and looks at all its results", "unset JAX_DEBUG_NANS; collc.fit skips "
            "steps that are not finite (max_skipped)"),
    Setting("JAX_DEBUG_INFS", asked, Level.WARNING,
            "waits for each step and looks at all its results", "unset JAX_DEBUG_INFS"),
    Setting("JAX_DISABLE_MOST_OPTIMIZATIONS", asked, Level.WARNING,
            "compiles without optimisations: for tests", "unset JAX_DISABLE_MOST_OPTIMIZATIONS"),
    Setting("JAX_ENABLE_X64", asked, Level.NOTE,
            "makes float64 and int64 the default: twice the bytes, on every link too",
            "unset JAX_ENABLE_X64 if that is not on purpose"),
    Setting("JAX_DEFAULT_MATMUL_PRECISION", _is("highest", "float32"), Level.NOTE,
            "multiplies matrices in float32 without tensor cores",
            "unset JAX_DEFAULT_MATMUL_PRECISION if that is not on purpose"),
    Setting("JAX_LOG_COMPILES", asked, Level.NOTE, "logs each compilation, from every process",
            "unset JAX_LOG_COMPILES"),
    Setting("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", asked, Level.WARNING,
            "hides CUDA libraries that are too old: results may be wrong",
            "unset JAX_SKIP_CUDA_CONSTRAINTS_CHECK, and install what jax then asks for"),
    Setting("XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), Level.WARNING,
            "asks CUDA for each buffer, and waits for it: slow",
            "unset XLA_PYTHON_CLIENT_ALLOCATOR, or set it to default"),
    Setting("XLA_PYTHON_CLIENT_PREALLOCATE", _off, Level.NOTE,
            "lets memory grow in pieces, which can split it up",
            "unset XLA_PYTHON_CLIENT_PREALLOCATE where nothing else uses the GPU"),
    *(Setting(name, _greedy, Level.WARNING, "leaves NCCL and CUDA no memory of their own",
              f"set {name} to 0.9 or less") for name in (SHARE, OLD_SHARE)),
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
        Finding(CHECK, s.level, f"{s.name}={environment[s.name]} {s.what}", s.remedy)
        for s in SETTINGS
        if s.name in environment and s.when(environment, s.name)
    ]
    return found or [ok(CHECK, "none that a run should be without")]
