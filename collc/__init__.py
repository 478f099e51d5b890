"""collc compiles collective schedules to JAX: proved, priced, lowered, and checked when traced.

Public names are resolved when first used, so that the language and the proofs work without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collc.analysis.certificate import Certificate as Certificate
    from collc.analysis.certificate import verify as verify
    from collc.errors import CollcError as CollcError
    from collc.language.library import find as find
    from collc.language.parse import parse as parse

_HOME = {
    "Certificate": "collc.analysis.certificate",
    "verify": "collc.analysis.certificate",
    "CollcError": "collc.errors",
    "parse": "collc.language.parse",
    "find": "collc.language.library",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from collc.errors import nearest

        raise AttributeError(f"module 'collc' has no attribute {name!r}. {nearest(name, _HOME)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
