"""Batches as functions of the step, which a resumed run asks again; and where their rows lie.

feed.batches(arrays, 64, seed=0)          t -> the rows of batch t, as numpy
feed.local(load, 64, plan)                t -> a global batch; each process loads its own rows
feed.joined(parts, plan)                  global batches from each process's parts, as they come
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from collc.errors import DataError
from collc.planning.plan import Plan, check_plan
from collc.training.fitting.forms import is_number
from collc.training.kinds import differs

Short = Literal["error", "drop", "pad"]
_SHORT = ("error", "drop", "pad")


@dataclass(frozen=True, eq=False)
class Batches:
    """Rows of arrays in an order that is new in each epoch: see ``batches``.

    ``rows``: in an epoch. ``per_epoch``: batches. ``steps``: batches in all, None without an end.
    ``facts``: what decides which rows batch t has, as a checkpoint notes it.
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

    @property
    def facts(self) -> dict[str, Any]:
        rows = {
            _path(path): f"{x.dtype}{list(x.shape[1:])} a row"
            for path, x in jax.tree.leaves_with_path(self.arrays)
        }
        counts = {"rows": self.rows, "size": self.size, "seed": self.seed}
        return {**counts, "batches an epoch": self.per_epoch, "padded": self.short == "pad", **rows}

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
    of different lengths; sizes, seeds and epochs that cannot be.
    """
    size, seed = _whole("size", size, 1), _whole("seed", seed, 0)
    epochs = None if epochs is None else _whole("epochs", epochs, 1, ", or None for no end")
    arrays = jax.tree.map(np.asarray, arrays)
    lengths = {_path(path): x.shape[:1] for path, x in jax.tree.leaves_with_path(arrays)}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        said = ", ".join(f"{path} {list(n)}" for path, n in lengths.items()) or "none"
        raise DataError(f"batches needs arrays [rows, ...] of the same number of rows: {said}.")
    ((rows,),) = set(lengths.values())
    if short not in _SHORT:
        raise DataError(f"short is {short!r}. Known: {', '.join(_SHORT)}.")
    if rows < 1 or (short != "pad" and size > rows):
        raise DataError(f"Batches of {size} cannot be cut from {rows} rows. Choose 1 to {rows}.")
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


def _whole(name: str, value: Any, least: int, other: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(f"{name} is {value!r}: a whole number from {least} on is needed{other}.")
    return int(value)


@dataclass(frozen=True, eq=False)
class Global:
    """Global batches as a function of t, and what is known of the ``Batches`` they are made of."""

    _of: Callable[[int], Any] = field(repr=False)
    steps: int | None = None
    facts: Mapping[str, Any] | None = None

    def __call__(self, t: int) -> Any:
        return self._of(t)


def _global(of: Callable[[int], Any], made_of: Any) -> Global:
    known = getattr(made_of, "__self__", made_of)  # of the method ``at``, its Batches
    return Global(of, getattr(known, "steps", None), getattr(known, "facts", None))


def place(batch: Any, plan: Plan) -> Any:
    """A whole batch, split on dimension 0 over the devices of the plan's axes.

    The same batch is given on every process, which keeps its own rows. Ranked nodes, and arrays
    that lie on several processes already, are left as they are. Raises DataError, which names the
    leaf, where dimension 0 does not divide, and for what is no number.
    """
    sharding = _split(plan)

    def put(keys: Any, x: Any) -> Any:
        if differs(x):
            return x
        shape = np.shape(x)
        if not shape or shape[0] % plan.ranks or not shape[0]:
            raise _uneven(_path(keys), shape, plan)
        x = _numbers(keys, x)
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x
        whole = np.asarray(x)
        return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])

    return jax.tree.map_with_path(put, batch, is_leaf=differs)


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


def _numbers(keys: Any, x: Any) -> Any:
    """A leaf as an array of jax or numpy. Raises DataError for texts and objects."""
    if isinstance(x, jax.Array):
        return x
    found = np.asarray(x)
    if is_number(found.dtype):
        return found
    raise DataError(
        f"{_path(keys)} has the dtype {found.dtype}, but devices hold numbers only. Make numbers of it, "
        "or leave it out of the batch."
    )


def local(load: Callable[[int, slice], Any], size: int, plan: Plan) -> Global:
    """Global batches of ``size`` rows, of which each process loads those of its own devices only.

    ``load(t, rows)`` returns rows of batch t as a pytree of numpy arrays [rows, ...]: the method
    ``at`` of ``batches`` does. It is asked for each run of rows that this process's devices hold.
    Raises DataError where ``size`` does not divide over the devices, or is another one than that of
    the ``batches``; and where other rows come.
    """
    sharding = _split(plan)
    if _whole("size", size, 1) % plan.ranks:
        raise _uneven("the batch", (size,), plan)
    whole = getattr(load, "__self__", None)
    if isinstance(whole, Batches) and whole.size != size:
        raise DataError(
            f"local is asked for {size} rows a batch of batches of {whole.size}. Give {whole.size}."
        )
    runs = _runs(sharding, size)

    def batch(t: int) -> Any:
        parts = [jax.tree.map_with_path(_numbers, load(t, slice(*run))) for run in runs]

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

    return _global(batch, load)


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
            return jax.make_array_from_process_local_data(sharding, np.asarray(_numbers(keys, x)))

        return jax.tree.map_with_path(put, part)

    if callable(parts):
        return _global(lambda t: join(parts(t)), parts)
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
