"""What becomes of values that each rank has its own of, when there are other ranks."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from collc.errors import CheckpointError, nearest
from collc.training.paths import matches

DOES = {
    "first": "gives rank 0's value to all",
    "sum": "gives the sum to rank 0 and zeros to the others",
    "mean": "gives the mean to all",
    "split": "joins the values in rank order and cuts them anew",
}


def words(path: str) -> str:
    """A path as errors say it: that of a state that is one leaf is empty."""
    return path or "the state"


def rules_for(resize: Mapping[str, str], ranked: list[str], every: list[str]) -> dict[str, str]:
    """The rule of each path that a pattern names. Raises CheckpointError.

    >>> rules_for({"count/*": "sum"}, ["count/seen", "error"], ["count/seen", "error", "w"])
    {'count/seen': 'sum'}
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern, rule in resize.items():
        if rule not in DOES:
            raise CheckpointError(
                f"resize={{{pattern!r}: {rule!r}}}: there is no such rule. {nearest(str(rule), DOES)}"
            )
        named = [path for path in ranked if matches(pattern, path)]
        if not named:
            others = [path for path in every if matches(pattern, path)]
            what = f"only {words(others[0])}, which is not ranked" if others else "no leaf"
            known = nearest(pattern, [_pattern(path) for path in ranked])
            raise CheckpointError(
                f"resize names {pattern!r}, but this matches {what}. "
                f"{known if ranked else 'Drop it: no leaf of the state is ranked.'}"
            )
        for path in named:
            before, other = found.setdefault(path, (pattern, rule))
            if other != rule:
                raise CheckpointError(
                    f"resize has two rules for {words(path)}: {before!r} says {other}, {pattern!r} says "
                    f"{rule}. Drop one of them."
                )
    return {path: rule for path, (_, rule) in found.items()}


def splits(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether [ranks, d, ...] can be cut anew to the other shape.

    >>> splits((4, 6, 3), (8, 3, 3)), splits((4, 6), (8, 6)), splits((4,), (8,))
    (True, False, False)
    """
    return len(old) == len(new) >= 2 and old[0] * old[1] == new[0] * new[1] and old[2:] == new[2:]


def resized(
    path: str, x: np.ndarray, shape: tuple[int, ...], rule: str | None, is_key: bool = False
) -> np.ndarray:
    """The values of all ranks, [ranks, shape...], for other ranks, ``shape``.

    Without a rule: cut anew where the parts' sizes say so; what is equal on all ranks stays equal; of
    floats each gets the mean, which leaves the mean over the ranks as it was. Raises CheckpointError.
    """
    if x.shape == shape:
        return x
    what = "random keys" if is_key else str(x.dtype)
    possible = _possible(x, shape, is_key)
    asked, rule = rule, rule or _fitting(x, shape, is_key)
    if rule not in possible:
        why = f'no "{asked}" of them leads there' if asked else "their values differ"
        old, new = (list(s[1:-1] if is_key else s[1:]) for s in (x.shape, shape))  # keys have words
        raise CheckpointError(
            f"{words(path)} holds {what}{old} of each of {x.shape[0]} ranks; here it is {new} of each "
            f"of {shape[0]}, and {why}. {_remedy(path, possible)}"
        )
    if rule == "split":
        return x.reshape(shape)
    if rule == "first":
        return np.broadcast_to(x[0], shape)
    wide = np.result_type(x.dtype, np.float64) if _is_float(x) else object  # bfloat16 adds badly
    if rule == "mean":
        return np.broadcast_to(x.mean(0, dtype=wide).astype(x.dtype), shape)
    total, exact = np.zeros(shape, x.dtype), np.asarray(x.astype(wide).sum(0), wide)
    if not _is_float(x) and not _fits(exact, x.dtype):
        others = {other: does for other, does in possible.items() if other != "sum"}
        raise CheckpointError(
            f"The sum of {words(path)} over {x.shape[0]} ranks is more than {what} can hold. "
            f"{_remedy(path, others)}"
        )
    total[0] = exact.astype(x.dtype)
    return total


def _fits(exact: np.ndarray, dtype: Any) -> bool:
    """Whether Python integers are numbers of an integer type."""
    info = jnp.iinfo(dtype)
    return all(info.min <= n <= info.max for n in exact.ravel())


def _possible(x: np.ndarray, shape: tuple[int, ...], is_key: bool) -> dict[str, str]:
    """The rules that lead to ``shape``, and what each does."""
    adds = x.shape[1:] == shape[1:] and not is_key and x.dtype != bool
    leads = {
        "first": x.shape[1:] == shape[1:],
        "sum": adds,
        "mean": adds and _is_float(x),
        "split": splits(x.shape, shape),
    }
    return {rule: does for rule, does in DOES.items() if leads[rule]}


def _remedy(path: str, possible: Mapping[str, str]) -> str:
    says = [f'"{rule}" {does}' for rule, does in possible.items()]
    return (
        f'Say what becomes of it: resize={{"{_pattern(path)}": rule}}, where '
        f"{', '.join(says[:-1])}{' and ' if says[1:] else ''}{says[-1]}."
    )


def _pattern(path: str) -> str:
    """The pattern of a leaf; the root of a state has no name."""
    return path or "*"


def _fitting(x: np.ndarray, shape: tuple[int, ...], is_key: bool) -> str | None:
    if x.shape[1:] != shape[1:]:
        return "split"
    bits: Any = np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    if (bits == bits[:1]).all():
        return "first"
    return "mean" if _is_float(x) and not is_key else None


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind in "fc" or x.dtype.name.startswith(("bfloat16", "float"))
