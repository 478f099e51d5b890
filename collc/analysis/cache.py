"""Proofs, kept by the digest of their program, so that a job does not pay for them at each start."""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from collc.analysis import proof as proof_module
from collc.analysis import rounds as rounds_module
from collc.analysis.proof import Proof
from collc.language import ir, states
from collc.language.ir import Program

SMALL = 4096  # sends below which proving is quicker than reading a file

_memory: dict[str, Proof] = {}


def proof(program: Program, prove: Callable[[Program], Proof]) -> Proof:
    """The proof of the program: from memory, from disk, or made now and kept."""
    digest = program.digest
    if digest in _memory:
        return _memory[digest]
    small = sum(step.size for step in program.steps) < SMALL and program.n <= 64
    found = None if small else _read(digest)
    if found is None:
        found = prove(program)
        if not small:
            _write(digest, found)
    _memory[digest] = found
    return found


def folder() -> Path:
    """``$COLLC_CACHE``, else ``collc`` in the user's cache folder."""
    own = os.environ.get("COLLC_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "collc"


@functools.cache
def _rules() -> str:
    """A digest of the prover itself: another one does not believe this one's proofs."""
    h = hashlib.sha256()
    for module in (proof_module, rounds_module, ir, states):
        h.update(Path(module.__file__ or "").read_bytes())
    return h.hexdigest()[:16]


def _path(digest: str) -> Path:
    return folder() / "proofs" / _rules() / f"{digest}.json"


def _read(digest: str) -> Proof | None:
    try:
        data = json.loads(_path(digest).read_text())
        data |= {side: tuple(int(x) for x in data[side]) for side in ("sent", "received")}
        found = Proof(**{**data, "chunk": Fraction(data["chunk"])})
        counts = (found.steps, found.rounds, found.depth)
        flags = (found.consistent, found.narrow)
        if not all(type(x) is int for x in counts) or not all(type(x) is bool for x in flags):
            return None
        return found
    except (OSError, ValueError, TypeError, KeyError):
        return None  # absent or damaged: prove again


def _write(digest: str, found: Proof) -> None:
    keep(_path(digest), json.dumps({**asdict(found), "chunk": str(found.chunk)}))


def keep(path: Path, text: str) -> None:
    """Writes a file of the cache, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return  # a read-only home only costs the time that the cache would have saved
    try:
        with open(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(name, path)
    except OSError:  # a full disk, too
        with contextlib.suppress(OSError):
            os.unlink(name)
