"""Variables of JAX, of its allocator and of CUDA that are for debugging, or that make a run slow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collc.runtime.doctor.finding import Finding, Level, ok
from collc.runtime.doctor.host import asked

CHECK = "JAX settings"


def _on(environment: Mapping[str, str], name: str) -> bool:
    return asked(environment, name)


def _off(environment: Mapping[str, str], name: str) -> bool:
    return name in environment and not asked(environment, name)


def _is(*values: str) -> Callable[[Mapping[str, str], str], bool]:
    return lambda environment, name: environment.get(name, "").strip().lower() in values


def _greedy(environment: Mapping[str, str], name: str) -> bool:
    try:
        return float(environment.get(name, "0")) > 0.95
    except ValueError:
        return True


@dataclass(frozen=True)
class Setting:
    """A variable, when it is one to speak of, what it does, and what to do instead."""

    name: str
    when: Callable[[Mapping[str, str], str], bool]
    level: Level
    what: str
    remedy: str


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
    Setting("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", _on, Level.WARNING,
            "hides CUDA libraries that are too old: results may be wrong",
            "unset JAX_SKIP_CUDA_CONSTRAINTS_CHECK, and install what jax then asks for"),
    Setting("XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), Level.WARNING,
            "asks CUDA for each buffer, and waits for it: slow",
            "unset XLA_PYTHON_CLIENT_ALLOCATOR, or set it to default"),
    Setting("XLA_PYTHON_CLIENT_PREALLOCATE", _off, Level.NOTE,
            "lets memory grow in pieces, which can split it up",
            "unset XLA_PYTHON_CLIENT_PREALLOCATE where nothing else uses the GPU"),
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", _greedy, Level.WARNING,
            "leaves NCCL and CUDA no memory of their own",
            "set XLA_PYTHON_CLIENT_MEM_FRACTION to 0.9 or less"),
    Setting("CUDA_LAUNCH_BLOCKING", _on, Level.WARNING, "waits for each kernel: nothing overlaps",
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
