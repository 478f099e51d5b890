"""Whether an optimizer does to a shard what it does to the whole parameter.

Masks and labels are often functions of a parameter's path, size or shape, and a shard has others. So
the optimizer is traced with whole parameters too, and what happens to each is compared: the
operations in their order, and the numbers in them. What has been summed up counts as one number.

    mask = lambda tree: tree.map(lambda x: x.size > 20, tree)       w: [5, 8] in 8 shards of [5, 1]
    of w:  u = add u (mul 0.1 w)          of a shard of w:  u = u      -->   refused
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten_with_path

from collc.errors import CollcError, StepError
from collc.lowering.shards import UNPADDED, Shard, is_shard
from collc.training.check.values import CALLS, opened, scan_split
from collc.training.paths import word
from collc.training.separable_flow import REDUCTIONS, SHAPES

_ALIKE = SHAPES | {"copy", "copy_p", "pcast", "pvary", "psum", "pmax", "pmin", "collc_collective"}
_INSTEAD = (
    "What is a function of paths, sizes or shapes, as mask= and labels may be, sees those of the "
    "shard. Call it on the whole parameters yourself, and give what it returns: mask=mask(params). "
    "Or take strategy.all_reduce for these parameters."
)

# A value is (kind, number): equal numbers are computed equally. PART: of a shard, element by element;
# TOTAL: from what has been summed up over one.
_PART, _TOTAL, _OTHER = "part", "total", "other"
_Seen = tuple[str, int]


def check_alike(
    function: Callable[..., Any],
    args: Sequence[Any],
    traced: tuple[Any, Any],
    names: Sequence[str],
) -> None:
    """Raises StepError where a function of trees does something else to the whole parameters.

    ``args``: with shards. ``traced``: the function's jaxpr of them, and the shapes of its results.
    ``names``: what messages call each of these.
    """
    whole = wholes(args)
    try:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*whole)
    except CollcError:
        raise
    except Exception as error:
        raise StepError(
            f"the optimizer takes shards, but not the whole parameters: {error}. {_INSTEAD}"
        ) from error
    _check_structure(wholes(traced[1]), shapes)
    parts = [x for node in _nodes(args) for x in [is_shard(node)] * len(jax.tree.leaves(node))]
    seen = _Numbers()
    ins = [(_PART if part else _OTHER, seen(("in", i))) for i, part in enumerate(parts)]
    results = seen.run(traced[0], ins), seen.run(closed, ins)
    for name, x, one, other in zip(names, jax.tree.leaves(shapes), *results, strict=True):
        if one != other and x.size:  # of what is empty jax drops operations
            raise StepError(
                f"the optimizer does something else to a shard than to the whole parameter: {name} "
                f"differs. {_INSTEAD}"
            )


def refuse_paths(function: Callable[..., Any], args: Sequence[Any], error: Exception) -> None:
    """Raises StepError where an error is of the shards alone, and the whole parameters have none."""
    try:
        jax.eval_shape(function, *wholes(args))
    except Exception:
        return
    raise StepError(
        f"the optimizer takes the whole parameters, but not their shards: "
        f"{type(error).__name__}: {error}. {_INSTEAD}"
    ) from error


def wholes(tree: Any) -> Any:
    """The same tree, with the shape of the whole leaf in place of each shard, and nothing in place of
    a shard of nothing, as a mask leaves it.
    """

    def whole(x: Any) -> Any:
        if not is_shard(x):
            return x
        if not jax.tree.leaves(x):
            return x.value
        assert isinstance(x, Shard)
        weak = getattr(x.value, "weak_type", False)
        return jax.ShapeDtypeStruct((*x.layers, *x.shape), x.value.dtype, weak_type=weak)

    return jax.tree.map(whole, tree, is_leaf=is_shard)


def _nodes(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_shard)


def _check_structure(kept: Any, wanted: Any) -> None:
    if jax.tree.structure(kept) == jax.tree.structure(wanted):
        return
    found = [{path for path, _ in tree_flatten_with_path(tree)[0]} for tree in (kept, wanted)]
    paths = sorted(found[0] ^ found[1], key=str)
    only = f" {'/'.join(map(word, paths[0]))} is there for one of them only." if paths else ""
    raise StepError(
        f"the optimizer keeps something else for shards than for the whole parameters.{only} {_INSTEAD}"
    )


class _Numbers:
    """Gives each value of a jaxpr a number, the same for what is computed in the same way."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.factors: dict[int, frozenset[Any]] = {}  # of totals

    def __call__(self, key: Any) -> int:
        return self.known.setdefault(key, len(self.known))

    def total(self, factors: frozenset[Any]) -> _Seen:
        number = self(("total", factors))
        self.factors[number] = factors
        return _TOTAL, number

    def constant(self, x: Any) -> _Seen:
        if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
            return _OTHER, self(("an array", id(x)))
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.asarray(x)
        is_number = array.size == 1  # of whatever shape: see what is alike
        said = repr(array.item()) if is_number else (array.shape, array.tobytes())
        return _OTHER, self(("constant", said))

    def run(self, jaxpr: Any, ins: Sequence[_Seen]) -> list[_Seen]:
        inner = opened(jaxpr)
        known = dict(zip(inner.invars, ins, strict=True))
        known |= zip(inner.constvars, map(self.constant, getattr(jaxpr, "consts", ())))

        def seen(atom: Any) -> _Seen:
            return self.constant(atom.val) if hasattr(atom, "val") else known[atom]

        for eqn in inner.eqns:
            known.update(
                zip(eqn.outvars, self.equation(eqn, list(map(seen, eqn.invars))), strict=True)
            )
        return [seen(atom) for atom in inner.outvars]

    def equation(self, eqn: Any, ins: list[_Seen]) -> list[_Seen]:
        name, params = eqn.primitive.name, eqn.params
        if params.get("name") == UNPADDED:
            return ins
        if name in CALLS:
            return self.run(params[CALLS[name]], ins)
        if name == "cond":
            outs = [self.run(branch, ins[1:]) for branch in params["branches"]]
            return [self.joined((name,), [ins[0], *each]) for each in zip(*outs, strict=True)]
        if name == "while":
            a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carry = self.turns(params["body_jaxpr"], ins[a:b], ins[b:], [])
            (by,) = self.run(params["cond_jaxpr"], [*ins[:a], *carry])
            return [self.joined((name,), [by, x]) for x in carry]
        if name == "scan":
            a, carried = scan_split(params)
            outs = self.turns(params["jaxpr"], ins[:a], ins[a : a + carried], ins[a + carried :])
            return [self.joined((name, params["length"]), [x]) for x in outs]
        same = name in _ALIKE or (
            name == "convert_element_type" and eqn.invars[0].aval.dtype == params["new_dtype"]
        )
        if same and len(ins) == len(eqn.outvars):
            return ins
        if name in REDUCTIONS and ins[0][0] == _PART:
            return [self.total(frozenset())]
        said = params.get("new_dtype"), params.get("y"), params.get("axis_name")
        return [self.joined((name, *map(str, said), i), ins) for i in range(len(eqn.outvars))]

    def joined(self, name: tuple[Any, ...], ins: Sequence[_Seen]) -> _Seen:
        """The result of an operation. What totals are multiplied by is all that counts of them."""
        kinds = {kind for kind, _ in ins}
        if _PART in kinds or _TOTAL not in kinds:
            kind = _PART if _PART in kinds else _OTHER
            return kind, self((name, tuple(ins)))
        factors = frozenset[Any]().union(*(self.factors[n] for kind, n in ins if kind == _TOTAL))
        if name[0] in ("mul", "div"):
            factors |= {(name[0], n) for kind, n in ins if kind != _TOTAL}
        return self.total(factors)

    def turns(
        self, body: Any, consts: Sequence[_Seen], carry: Sequence[_Seen], xs: Sequence[_Seen]
    ) -> list[_Seen]:
        """What a loop carries and returns: two turns of it, after which no kind changes any more."""
        outs = list(carry)
        for _ in range(2):
            outs = self.run(body, [*consts, *outs[: len(carry)], *xs])
        return outs
