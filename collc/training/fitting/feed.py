"""Batches as functions of the step, which a resumed run asks again; and where their rows lie.

feed.batches(arrays, 64, seed=0)          t -> the rows of batch t, as numpy
feed.local(load, 64, plan)                t -> a global batch; each process loads its own rows
feed.joined(parts, plan)                  global batches from each process's parts, as they come
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import DataError
from collc.planning.plan import Plan, check_plan
from collc.training.kinds import rank_axes

Short = Literal["error", "drop", "pad"]
_SHORT = ("error", "drop", "pad")


@dataclass(frozen=True, eq=False)
class Batches:
    """Rows of arrays in an order that is new in each epoch: see ``batches``.

    ``rows``: in an epoch. ``per_epoch``: batches. ``steps``: batches in all, None without an end.
    """

    arrays: Any
    size: int
    seed: int
    rows: int
    per_epoch: int
    steps: int | None
    short: Short
    _order: Callable[[int], np.ndarray] = field(repr=False)

    def __call__(self, t: int) -> Any:
        """Batch t, each leaf [size, ...]; with "pad", that and its weights, float32 [size]."""
        return self.at(t, slice(0, self.size))

    def at(self, t: int, rows: slice) -> Any:
        """Some rows of batch t only, for a process that needs no others: see ``local``."""
        if not 0 <= t < (t + 1 if self.steps is None else self.steps):
            raise DataError(f"There is no batch {t}: the data has {self.steps} in all its epochs.")
        epoch, number = divmod(t, self.per_epoch)
        chosen = self._order(epoch)[number * self.size : (number + 1) * self.size][rows]
        count = len(range(*rows.indices(self.size)))

        def take(x: np.ndarray) -> np.ndarray:
            own = x[chosen]
            if len(own) == count:
                return own
            return np.concatenate([own, np.zeros((count - len(own), *x.shape[1:]), x.dtype)])

        batch = jax.tree.map(take, self.arrays)
        if self.short != "pad":
            return batch
        return batch, (np.arange(count) < len(chosen)).astype(np.float32)


def batches(
    arrays: Any, size: int, *, seed: int = 0, epochs: int | None = None, short: Short = "error"
) -> Batches:
    """Batches of ``size`` rows of a pytree of numpy arrays [rows, ...], as a function of t.

    The rows of an epoch come in an order that is drawn from (seed, epoch). ``short`` says what
    becomes of the last batch of an epoch where ``size`` does not divide the rows: "drop" leaves it
    out, and "pad" fills it up with zeros. Each batch is then a pair (batch, weights), where the
    weights, float32 [size], are 1 of a row and 0 of padding: a sum of weighted losses, divided by
    the sum of weights over all ranks (``mean="tokens"``), counts each row once.

    Raises DataError for a last batch that is short, where ``short`` does not say what to do; arrays
    of different lengths; sizes that cannot be.
    """
    arrays = jax.tree.map(np.asarray, arrays)
    lengths = {_path(path): x.shape[:1] for path, x in jax.tree.leaves_with_path(arrays)}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        said = ", ".join(f"{path} {list(n)}" for path, n in lengths.items()) or "none"
        raise DataError(f"batches needs arrays [rows, ...] of the same number of rows: {said}.")
    ((rows,),) = set(lengths.values())
    if short not in _SHORT:
        raise DataError(f"short is {short!r}. Known: {', '.join(_SHORT)}.")
    if size < 1 or rows < 1 or (short != "pad" and size > rows):
        raise DataError(f"Batches of {size} cannot be cut from {rows} rows. Choose 1 to {rows}.")
    if epochs is not None and epochs < 1:
        raise DataError(f"epochs is {epochs}: 1 or more are needed, or None for no end.")
    whole, rest = divmod(rows, size)
    if rest and short == "error":
        raise DataError(
            f"The last batch of an epoch is short: {rows} rows are {whole} batches of {size} and "
            f'{rest} rows. Say short="drop" to leave these out, or short="pad" to fill the batch up '
            "with rows of weight 0."
        )
    per_epoch = whole + (rest > 0 and short == "pad")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(rows)

    steps = None if epochs is None else epochs * per_epoch
    return Batches(arrays, size, seed, rows, per_epoch, steps, short, order)


def _path(keys: Any, name: str = "the batch") -> str:
    return name + jax.tree_util.keystr(keys)


def place(batch: Any, plan: Plan) -> Any:
    """A whole batch, split on dimension 0 over the devices of the plan's axes.

    The same batch is given on every process, which keeps its own rows. Ranked nodes, and arrays
    that lie on several processes already, are left as they are. Raises DataError, which names the
    leaf, where dimension 0 does not divide.
    """
    sharding = _split(plan)

    def put(keys: Any, x: Any) -> Any:
        if rank_axes(x) is not None:
            return x
        shape = np.shape(x)
        if not shape or shape[0] % plan.ranks or not shape[0]:
            raise _uneven(_path(keys), shape, plan)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        whole = np.asarray(x)
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])

    return jax.tree.map_with_path(put, batch, is_leaf=lambda x: rank_axes(x) is not None)


def _split(plan: Plan) -> NamedSharding:
    check_plan(plan, "feed")
    return NamedSharding(plan.mesh, PartitionSpec(plan.axes))


def _uneven(leaf: str, shape: tuple[int, ...], plan: Plan) -> DataError:
    over = f"the {plan.ranks} devices of {' and '.join(plan.axes)}"
    if not shape:
        return DataError(
            f"{leaf} is a scalar, and a batch is split on dimension 0 over {over}. Give it one row "
            "for each example, or keep it in the state."
        )
    nearest = max(1, round(shape[0] / plan.ranks)) * plan.ranks
    return DataError(
        f"{leaf} has the shape {list(shape)}, and dimension 0 does not divide over {over}. Use "
        f"batches of a multiple of {plan.ranks}, for example {nearest}; feed.batches(..., "
        'short="pad") fills the last one up, short="drop" leaves it out.'
    )


def local(load: Callable[[int, slice], Any], size: int, plan: Plan) -> Callable[[int], Any]:
    """Global batches of ``size`` rows, of which each process loads those of its own devices only.

    ``load(t, rows)`` returns rows of batch t as a pytree of numpy arrays [rows, ...]: the method
    ``at`` of ``batches`` does. It is asked for each run of rows that this process's devices hold.
    Raises DataError where ``size`` does not divide over the devices, or other rows come.
    """
    sharding = _split(plan)
    if size < 1 or size % plan.ranks:
        raise _uneven("the batch", (size,), plan)
    runs = _runs(sharding, size)

    def batch(t: int) -> Any:
        parts = [load(t, slice(*run)) for run in runs]

        def join(keys: Any, *own: Any) -> jax.Array:
            for (first, end), x in zip(runs, own, strict=True):
                if np.shape(x)[:1] != (end - first,):
                    raise DataError(
                        f"{_path(keys)} has the shape {list(np.shape(x))}, but the rows {first} to "
                        f"{end - 1} of step {t} were asked for. Return these, {end - first} of them."
                    )

            def rows(index: Any) -> Any:
                at = index[0].start or 0
                k = max(k for k, run in enumerate(runs) if run[0] <= at)
                offset = at - runs[k][0]
                return own[k][offset : offset + size // plan.ranks]

            return jax.make_array_from_callback((size, *own[0].shape[1:]), sharding, rows)

        return jax.tree.map_with_path(join, *parts)

    return batch


def _runs(sharding: NamedSharding, size: int) -> list[tuple[int, int]]:
    """(first, end) of the rows next to each other that this process's devices hold."""
    found = sharding.addressable_devices_indices_map((size,)).values()
    runs: list[tuple[int, int]] = []
    for first, end, _ in sorted({index[0].indices(size) for index in found if index}):
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, end))
    return runs


def joined(parts: Any, plan: Plan) -> Any:
    """Global batches from each process's parts: a function of t, or an iterator that keeps its
    position (``get_state``, ``set_state``) where ``parts`` has one.

    All processes give as many rows. Raises DataError where these do not divide over the process's
    devices.
    """
    sharding = _split(plan)
    devices = len(sharding.addressable_devices)

    def join(part: Any) -> Any:
        def put(keys: Any, x: Any) -> jax.Array:
            shape = np.shape(x)
            if not shape or shape[0] % devices or not shape[0]:
                raise DataError(
                    f"{_path(keys)} has the shape {list(shape)} on process {jax.process_index()}, "
                    f"and dimension 0 does not divide over its {devices} devices. Use a multiple."
                )
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map_with_path(put, part)

    if callable(parts):
        return lambda t: join(parts(t))
    return _Joined(iter(parts), join)


class _Joined:
    """An iterator's items, made global."""

    def __init__(self, items: Iterator[Any], join: Callable[[Any], Any]) -> None:
        self._items, self._join = items, join
        if has_position(items):  # a position that is not there must not seem to be
            self.get_state, self.set_state = items.get_state, items.set_state  # pyright: ignore

    def __iter__(self) -> "_Joined":
        return self

    def __next__(self) -> Any:
        return self._join(next(self._items))


def has_position(items: Any) -> bool:
    """Whether an iterator can say where it is and go there again, as Grain's can."""
    return all(callable(getattr(items, name, None)) for name in ("get_state", "set_state"))
