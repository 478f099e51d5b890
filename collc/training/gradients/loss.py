"""A loss with what is differentiated, and what of its arguments is a batch."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from collc.errors import DataError, StepError, nearest
from collc.training.layouts import is_constant
from collc.training.modules import is_module
from collc.training.step import argument_names


@dataclass(frozen=True)
class Loss:
    """Made by ``loss_of``.

    ``argnums``: without negative numbers, an integer or a tuple of them. ``differentiated``: the
    names of these arguments; ``batches``: of those that are split.
    """

    function: Callable[..., Any]
    signature: inspect.Signature
    argnums: Any
    differentiated: tuple[str, ...]
    batches: tuple[str, ...]
    has_aux: bool

    @property
    def wrt(self) -> str | tuple[str, ...]:
        """The names of what is differentiated, as gradients come back: of one, or of several."""
        return self.differentiated if isinstance(self.argnums, tuple) else self.differentiated[0]

    def bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """The arguments by name, defaults among them, so that positions are the signature's; and the
        names of those which were given and are split.
        """
        bound = self.signature.bind(*args, **kwargs)
        given = {n: x for n, x in bound.arguments.items() if n in self.batches}
        split = [n for n, x in given.items() if not is_module(x) and not is_constant(x)]
        bound.apply_defaults()
        return bound.arguments, split

    def call(self, values: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Any:
        """What the loss returns, or another function of its arguments."""
        here: Any = {n: values[n] for n in self.signature.parameters if n in values}
        arguments = inspect.BoundArguments(self.signature, here)
        return (function or self.function)(*arguments.args, **arguments.kwargs)

    def grad(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
        """The gradient function of one that takes these values in their order."""
        nnx = sys.modules.get("flax.nnx") if is_module(values[self.differentiated[0]]) else None
        return (nnx or jax).value_and_grad(function, argnums=self.argnums, has_aux=self.has_aux)

    def unpacked(self, out: Any) -> tuple[Any, Any]:
        """Value and auxiliary results of what the loss returns."""
        return out if self.has_aux else (out, None)

    def packed(self, value: Any, aux: Any) -> Any:
        """What the loss returns, of these two."""
        return (value, aux) if self.has_aux else value


def loss_of(
    function: Callable[..., Any], argnums: Any, has_aux: bool, batch: str | Sequence[str] | None
) -> Loss:
    """Raises StepError for what is no loss, and for arguments that it does not have."""
    if not callable(function):
        raise StepError(f"value_and_grad takes a loss function, not {function!r}.")
    signature = inspect.signature(function)
    given = argnums
    argnums, positions = _positions_of(argnums, function, signature)
    names = list(signature.parameters)
    differentiated = tuple(names[i] for i in positions)
    rest = tuple(name for name in names if name not in differentiated)
    batches = rest if batch is None else argument_names(batch)
    for name in batches:
        if name in differentiated:
            raise StepError(f"batch={name!r} is differentiated (argnums={given!r}): not both.")
        if name not in rest:
            raise StepError(
                f"{getattr(function, '__name__', 'the loss')} has no argument {name!r} for batch=. "
                f"{nearest(name, names)}"
            )
    return Loss(function, signature, argnums, differentiated, batches, has_aux)


def check_microbatches(k: Any) -> None:
    """Raises DataError for what is no number of pieces."""
    if type(k) is not int or k < 1:
        raise DataError(f"microbatches is a positive integer, not {k!r}")


def _positions_of(
    argnums: Any, function: Callable[..., Any], signature: inspect.Signature
) -> tuple[Any, list[int]]:
    """argnums without negative numbers, and its positions among the arguments that have one."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(p.kind in positional for p in signature.parameters.values())
    each = argnums if isinstance(argnums, list | tuple) else (argnums,)
    numbers = [getattr(x, "argnum", x) for x in each]  # nnx.DiffState has one
    numbers = [i + count if type(i) is int and -count <= i < 0 else i for i in numbers]
    name = getattr(function, "__name__", "the loss")
    if not numbers or not all(type(i) is int and 0 <= i < count for i in numbers):
        last = f"0 to {count - 1}" if count else "none, it has no positional arguments"
        raise StepError(f"argnums={argnums!r}: the positions of {name}'s arguments are {last}.")
    if len(set(numbers)) < len(numbers):
        raise StepError(f"argnums={argnums!r} names an argument twice.")
    pairs = zip(each, numbers, strict=True)
    same = [dataclasses.replace(x, argnum=i) if hasattr(x, "argnum") else i for x, i in pairs]
    return (tuple(same) if isinstance(argnums, list | tuple) else same[0]), numbers
