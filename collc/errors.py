"""One exception per cause. Every message says what was found, what was needed, and what to do."""

import difflib
from collections.abc import Iterable


class CollcError(Exception):
    """The base of all errors that collc raises on purpose."""


class ScheduleError(CollcError):
    """A schedule is not well formed: its text, its type, its file, or what its steps yield."""


class ProofError(CollcError):
    """A schedule is well formed, but it does not do what its type says."""


class MeshError(CollcError):
    """A mesh and what is asked of it do not fit: axes, sizes, devices."""


class PlanError(CollcError):
    """A plan cannot be made, or is not the one that was saved or that another process has."""


class StepError(CollcError):
    """A train step would return or compute something else than what it says it does."""


class DataError(CollcError):
    """Shapes, dtypes or batches that cannot work."""


class CheckpointError(CollcError):
    """A run folder or checkpoint that is truncated, foreign, or of another run."""


class HloError(CollcError):
    """HLO text that collc does not understand and therefore refuses to count."""


class MachineError(CollcError):
    """A machine that cannot be: its text, its topology file, or what is to be priced on it."""


class PodError(CollcError):
    """A pod that cannot be compiled for: its shape, its target, XLA's flags, what is missing."""


class LaunchError(CollcError):
    """A job whose processes cannot be started or ended: its command, its hosts, their options."""


class ReceiptError(CollcError, AssertionError):
    """A receipt that is not as a test expects it to be."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known ones, or all of them.

    >>> nearest("rnig", ["ring", "tree"])
    'Did you mean ring?'
    >>> nearest("x", ["ring", "tree"])
    'Known: ring, tree.'
    """
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known: {', '.join(known)}." if known else "None are known."
