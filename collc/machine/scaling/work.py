"""The work of a train step, read off a receipt: how long a device computes, how much is reduced.

The receipt is the JSON that ``collc compile --json`` prints.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from collc.errors import CollcError, DataError, nearest
from collc.language.algebra import Schedule
from collc.language.parse import parse
from collc.machine import catalog
from collc.machine.flow import flow

UTILISATION = 0.4
_REDUCE = ("all_reduce", "reduce_scatter", "reduce")
_ANEW = "Write it anew: collc compile --json."


@dataclass(frozen=True)
class Work:
    """A step of one device.

    Attributes:
      flops: of one device.
      compute: seconds: flops / (peak of the GPU x utilisation).
      parameters: bytes that are reduced over all devices, as they travel.
      notes: what was not counted, in sentences.
    """

    flops: float
    compute: float
    parameters: float
    notes: tuple[str, ...]


def work(receipt: Mapping[str, Any], gpu: str = "", utilisation: float = UTILISATION) -> Work:
    """The work of a step.

    ``gpu``: the model that computes; if "", that of the receipt's pod. What a plan's collectives reduce
    counts; in a step without a plan, all that is all-reduced or reduce-scattered. Raises DataError for
    what is no receipt, and where the bytes cannot be told.
    """
    if not 0 < utilisation <= 1:
        raise DataError(
            f"a utilisation of {utilisation}: give what part of its peak a GPU reaches, 0.4."
        )
    flops = _field(receipt, "flops", (int, float))
    if not (math.isfinite(flops) and flops > 0):
        raise DataError(f"the receipt has {flops} FLOPs: its step computes nothing. Say --compute.")
    notes = []
    if not gpu and receipt.get("pod"):
        notes.append(
            f"the machine names no GPU: compute is that of the receipt's, {receipt['pod']}"
        )
    if not receipt.get("flops_exact", True):
        notes.append("FLOPs are a lower bound: some loop of the step has trips that nobody knows")
    peak = _peak(gpu or str(receipt.get("pod") or ""))
    return Work(flops, flops / (peak * utilisation), _reduced(receipt, notes), tuple(notes))


def _peak(gpu: str) -> float:
    known = catalog.models()
    name = next((m for m in known if gpu.startswith(m)), None)  # gb200-nvl72, a100-40gb
    if name is None:
        found = f"of {gpu!r}" if gpu else "of a machine without a GPU model"
        raise DataError(f"the peak {found} is not known. {nearest(gpu, known)} Or say --compute.")
    return catalog.model(name).peak


def _field(receipt: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    if not isinstance(receipt, Mapping) or name not in receipt:
        more = ""
        if isinstance(receipt, Mapping) and all(isinstance(v, Mapping) for v in receipt.values()):
            more = " It holds several; compile without --against." if receipt else ""
        raise DataError(
            f"this is no receipt: it has no {name!r}.{more} Write one: collc compile --json."
        )
    value = receipt[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise DataError(f"the receipt's {name!r} is {value!r}. {_ANEW}")
    return value


# ---- bytes --------------------------------------------------------------------------------------


def _reduced(receipt: Mapping[str, Any], notes: list[str]) -> float:
    """The most that is reduced over an axis: once it is scattered, the others see less of a buffer."""
    entries = _field(receipt, "collectives", (list,))
    mesh = _field(receipt, "mesh", (dict,))
    if not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"a collective of the receipt has no fields. {_ANEW}")
    if not all(type(size) is int and size > 0 for size in mesh.values()):
        raise DataError(
            f"the mesh of the receipt, {mesh}, has a size that is no number above 0. {_ANEW}"
        )
    planned = [e for e in entries if e.get("by") == "plan"]
    if not planned:
        notes.append("no plan asked for collectives: what XLA all-reduces or scatters is counted")
    found: dict[tuple[str, str], Fraction] = {}
    for axes, how, size in _buffers(planned or entries, mesh):
        for axis in axes:
            found[axis, how] = found.get((axis, how), Fraction(0)) + size
    axes = dict.fromkeys(axis for axis, _ in found)
    both = [a for a in axes if (a, "all_reduce") in found and (a, "reduce_scatter") in found]
    if len(both) > 1:
        raise DataError(
            f"{' and '.join(both)} are both scattered and all-reduced over, so how many bytes there are "
            "in all cannot be told from the receipt. Say --parameters and --compute."
        )
    if not axes:
        raise DataError("the step of this receipt reduces nothing. Say --parameters and --compute.")
    return float(max(sum(v for (a, _), v in found.items() if a == axis) for axis in axes))


def _buffers(
    entries: list[Any], mesh: Mapping[str, int]
) -> Iterator[tuple[tuple[str, ...], str, Fraction]]:
    """Each reduction: over which axes, how, and the bytes of the whole buffer."""
    for entry in entries:
        try:
            kind, axes = entry["kind"], entry["axes"]
            bytes = Fraction(entry["bytes"]) * entry["count"]
            scope = entry["scope"]
        except KeyError as e:
            raise DataError(
                f"a collective of the receipt lacks {e}: {_shown(entry)}. {_ANEW}"
            ) from e
        except (TypeError, ValueError, OverflowError) as e:
            raise DataError(f"a collective of the receipt is {_shown(entry)}: {e}. {_ANEW}") from e
        if kind not in ("all-reduce", "reduce-scatter", "collective-permute"):
            continue
        leaf = _leaf(str(scope)) if kind == "collective-permute" else None
        if kind == "collective-permute" and leaf is None:
            continue  # the program's own, of a pipeline or a halo
        if axes is None:
            raise DataError(
                f"the receipt does not say over which axes {entry.get('name')} goes. "
                "Say --parameters and --compute."
            )
        if not isinstance(axes, list) or not all(axis in mesh for axis in axes):
            raise DataError(
                f"the receipt's {entry.get('name')} is over {axes}, its mesh has {list(mesh)}. {_ANEW}"
            )
        n = math.prod(mesh[axis] for axis in axes)
        if leaf is None:
            scattered = kind == "reduce-scatter"
            yield tuple(axes), kind.replace("-", "_"), bytes * (n if scattered else 1)
        elif leaf.collective is not None and leaf.collective.name in _REDUCE:
            moved = _moved(leaf, {axis: mesh[axis] for axis in axes})
            yield tuple(axes), leaf.collective.name, bytes / moved


def _shown(entry: Any) -> str:
    """An entry for a message, not too long."""
    text = str(entry)
    return text if len(text) <= 160 else f"{text[:160]}..."


def _leaf(scope: str) -> Schedule | None:
    """The schedule of a scope such as ``collc/ring.all_gather/gpu``; None where it is none."""
    if not scope.startswith("collc/"):
        return None
    name, _, axes = scope.removeprefix("collc/").rpartition("/")
    try:
        return parse(name) @ tuple(axes.split(","))
    except CollcError as e:
        raise DataError(f"the receipt's {name!r} is not known here: {e} Say --parameters.") from e


def _moved(leaf: Schedule, sizes: Mapping[str, int]) -> Fraction:
    """What the permutes of a leaf carry in all, of its buffer: round by round the largest message."""
    total = Fraction(0)
    for part in flow(leaf, sizes).parts:
        for moment in part.moments or ():
            found = moment.messages()
            rounds = (found.chunks[found.round == k].max() for k in range(found.rounds))
            total += part.chunk * int(sum(rounds))
    return total
