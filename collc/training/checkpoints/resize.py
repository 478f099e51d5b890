"""What becomes of values that each rank has its own of, when there are other ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from collc.errors import CheckpointError, nearest
from collc.training.paths import matches

RULES = ("first", "sum", "mean", "split")
REMEDY = (
    'Say what becomes of it: resize={{"{path}": rule}}, where "first" gives rank 0\'s value to all, '
    '"sum" the sum to rank 0 and zeros to the others, "mean" the mean to all, and "split" joins the '
    "values in rank order and cuts them anew."
)


def rules_for(resize: Mapping[str, str], ranked: list[str], every: list[str]) -> dict[str, str]:
    """The rule of each path that a pattern names. Raises CheckpointError.

    >>> rules_for({"count/*": "sum"}, ["count/seen", "error"], ["count/seen", "error", "w"])
    {'count/seen': 'sum'}
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern, rule in resize.items():
        if rule not in RULES:
            raise CheckpointError(
                f"resize={{{pattern!r}: {rule!r}}}: there is no such rule. {nearest(str(rule), RULES)}"
            )
        named = [path for path in ranked if matches(pattern, path)]
        if not named:
            others = [path for path in every if matches(pattern, path)]
            what = f"only {others[0]}, which is not ranked" if others else "no leaf"
            raise CheckpointError(
                f"resize names {pattern!r}, but this matches {what}. {nearest(pattern, ranked)}"
            )
        for path in named:
            before, other = found.setdefault(path, (pattern, rule))
            if other != rule:
                raise CheckpointError(
                    f"resize has two rules for {path}: {before!r} says {other}, {pattern!r} says "
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
    if rule is None:
        rule = _fitting(x, shape, is_key)
    if rule == "split" and splits(x.shape, shape):
        return x.reshape(shape)
    name = "random keys" if is_key else str(x.dtype)
    if rule is None or rule == "split" or x.shape[1:] != shape[1:]:
        why = "their values differ" if rule is None else f"{rule} does not lead there"
        raise CheckpointError(
            f"{path} holds {name}{list(x.shape[1:])} of each of {x.shape[0]} ranks; here it is "
            f"{list(shape[1:])} of each of {shape[0]}, and {why}. {REMEDY.format(path=path)}"
        )
    if rule == "first":
        return np.broadcast_to(x[0], shape)
    if is_key or x.dtype == bool or (rule == "mean" and not _is_float(x)):
        raise CheckpointError(
            f"{path} holds {name}, which have no {rule}. {REMEDY.format(path=path)}"
        )
    wide = np.result_type(x.dtype, np.float64) if _is_float(x) else x.dtype  # bfloat16 adds badly
    if rule == "mean":
        return np.broadcast_to(x.mean(0, dtype=wide).astype(x.dtype), shape)
    total = np.zeros(shape, x.dtype)
    total[0] = x.sum(0, dtype=wide).astype(x.dtype)
    return total


def _fitting(x: np.ndarray, shape: tuple[int, ...], is_key: bool) -> str | None:
    if x.shape[1:] != shape[1:]:
        return "split"
    bits: Any = np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    if (bits == bits[:1]).all():
        return "first"
    return "mean" if _is_float(x) and not is_key else None


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind in "fc" or x.dtype.name.startswith(("bfloat16", "float"))
