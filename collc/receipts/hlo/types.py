"""The types of HLO values: arrays, and tuples of types."""

import math
import re
from dataclasses import dataclass
from functools import cache

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{[^{}]*\})?")
_BITS = re.compile(r"(?:[su](?:1|2|4|8|16|32|64)|bf16|f(?:4|6|8|16|32|64)|c(?:64|128))(?=e|$)")
_WITHOUT_DATA = ("token", "opaque")


@dataclass(frozen=True)
class Array:
    """An element type as HLO writes it ("f32", "bf16", "pred", "token") and a shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """On one device; types below 8 bits count as packed."""
        return -(-_bits(self.dtype) * math.prod(self.shape) // 8)


Type = Array | tuple["Type", ...]


@cache
def parse_type(text: str) -> Type:
    """A type as it is written before an opcode.

    >>> parse_type("(f32[8,2]{1,0:T(8,128)S(1)}, (s4[], token[]))")[1]
    (Array(dtype='s4', shape=()), Array(dtype='token', shape=()))

    Raises:
      ValueError: what is the matter with it.
    """
    stack: list[list[Type]] = [[]]
    at = 0
    while at < len(text):
        if array := _ARRAY.match(text, at):
            if not _bits(array[1]) and array[1] not in _WITHOUT_DATA:
                raise ValueError("has no known size")
            stack[-1].append(Array(array[1], tuple(int(d) for d in array[2].split(",") if d)))
            at = array.end()
            continue
        if text[at] == "(":
            stack.append([])
        elif text[at] == ")" and len(stack) > 1:
            made = tuple(stack.pop())
            stack[-1].append(made)
        elif text[at] not in ", ":
            raise ValueError("cannot be read")
        at += 1
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError("cannot be read")
    return stack[0][0]


def arrays(tree: Type) -> tuple[Array, ...]:
    """The arrays of a type, in order."""
    return tuple(a for t in tree for a in arrays(t)) if isinstance(tree, tuple) else (tree,)


@cache
def _bits(dtype: str) -> int:
    """Bits of an element, 0 if it is not known or no data."""
    found = _BITS.match(dtype)
    return 8 if dtype == "pred" else int(re.sub(r"\D", "", found[0])) if found else 0
