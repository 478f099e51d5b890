"""A function of named arguments, modules among them, as a jaxpr."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from collc.training.layouts import is_array
from collc.training.modules import Modules


class Opened:
    """``run`` of these arguments, traced: ``closed`` has its results first, then the modules' state.

    What is no array, such as a flag, is a constant of it.
    """

    def __init__(self, run: Callable[[dict[str, Any]], Any], values: Mapping[str, Any]) -> None:
        self.modules = modules = Modules(values)
        self.plain = {n: x for n, x in values.items() if n not in modules.objects}
        leaves, tree = jax.tree.flatten(self.plain)
        self.arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}

        def body(arrays: dict[int, Any], state: Any) -> Any:
            merged = modules.merge(state)
            filled = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
            full = filled | merged
            return run({n: full[n] for n in values}), modules.after(merged)

        given = self.arrays, modules.state
        self.closed, shape = jax.make_jaxpr(body, return_shape=True)(*given)
        self.args, self.tree = jax.tree.leaves(given), jax.tree.structure(shape)

    def run(self) -> Any:
        """What the function returns, once modules have changed as it says."""
        return self.returned(jaxpr_as_fun(self.closed)(*self.args))

    def returned(self, results: Any) -> Any:
        """The same, of the jaxpr's results."""
        out, state = jax.tree.unflatten(self.tree, results)
        self.modules.update(state)
        return out
