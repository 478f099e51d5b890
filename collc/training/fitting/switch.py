"""Several steps of which one runs, switched by name between steps, all compiled before."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from collc.errors import StepError, nearest
from collc.planning.agree import compare
from collc.training.fitting.forms import difference, form


class Switch:
    """Jitted steps by name, called as one of them.

    The first call, or ``compile``, compiles all for its arguments and checks that their results have
    the same tree, shapes, dtypes and shardings. Nothing is traced after that. ``active``: the name
    of the step that runs. ``count``: how often it changed. ``start``: the step that a fresh run
    begins with, by default the first; a run that is resumed goes on with the one that it was at.

    Raises StepError for steps without ``lower`` (jit them), unknown names, results that differ, and
    arguments of other trees or shapes than those it was compiled for.
    """

    def __init__(self, steps: Mapping[str, Callable[..., Any]], start: str | None = None) -> None:
        if not isinstance(steps, Mapping) or not all(isinstance(name, str) for name in steps):
            raise StepError(
                f"Switch is given {steps!r}, but a dict of steps with texts as their names is needed: "
                '{"ring": step, ...}.'
            )
        if not steps:
            raise StepError("Switch({}) has nothing to switch between. Give steps by name.")
        for name, step in steps.items():
            if not callable(step) or not hasattr(step, "lower"):
                raise StepError(
                    f"Switch: {name!r} is {step!r}, which cannot be compiled ahead. Decorate it with "
                    "jax.jit, or nnx.jit where it changes modules."
                )
        self.steps = dict(steps)
        self.active = next(iter(steps)) if start is None else self.check(start)
        self.count = 0
        self._compiled: dict[str, Any] = {}
        self._args: Any = None  # a tree of their forms

    @classmethod
    def plans(
        cls,
        make_step: Callable[[Any], Callable[..., Any]],
        plans: Mapping[str, Any],
        start: str | None = None,
    ) -> "Switch":
        """The step that ``make_step`` makes of each plan, or of whatever stands by the names."""
        if not isinstance(plans, Mapping):
            raise StepError(
                f"Switch.plans is given {plans!r}, but a dict of plans by name is needed."
            )
        return cls({name: make_step(plan) for name, plan in plans.items()}, start)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all steps, in the order in which they were given."""
        return tuple(self.steps)

    @property
    def compiled(self) -> bool:
        """Whether the steps are compiled."""
        return bool(self._compiled)

    def __repr__(self) -> str:
        return f"<switch between {', '.join(self.names)}; {self.active} runs>"

    def check(self, name: str) -> str:
        """The name, if a step has it. Raises StepError."""
        if not isinstance(name, str) or name not in self.steps:
            raise StepError(f"Switch has no step {name!r}. {nearest(str(name), self.steps)}")
        return name

    def use(self, name: str) -> None:
        """Run that step from the next call on. On several processes, do so on all of them at once;
        in ``collc.fit``, ``event.switch`` does.
        """
        if self.check(name) != self.active:
            self.active = name
            self.count += 1

    def notes(self) -> dict[str, Any]:
        """What a checkpoint notes of it: see ``resume``."""
        return {"active": self.active, "switches": self.count}

    def compile(self, *args: Any) -> "Switch":
        """Compile all steps for these arguments, and compare their results. Returns itself."""
        compare("switch", {"steps": ", ".join(self.names), "active": self.active})
        lowered = {name: step.lower(*args) for name, step in self.steps.items()}
        # nnx.jit wraps what jax.jit lowers.
        results = {name: getattr(low, "lowered", low).out_info for name, low in lowered.items()}
        first, *others = lowered
        for name in others:
            self._same(first, results[first], name, results[name])
        compiled = {name: low.compile() for name, low in lowered.items()}
        for name in others:
            self._same_shardings(
                first,
                compiled[first].output_shardings,
                name,
                compiled[name].output_shardings,
                results[first],
            )
        self._compiled, self._args = compiled, jax.tree.map(form, args)
        return self

    def __call__(self, *args: Any) -> Any:
        if not self._compiled:
            self.compile(*args)
        try:
            return self._compiled[self.active](*args)
        except (TypeError, ValueError) as error:
            if found := difference(self._args, jax.tree.map(form, args)):
                path, was, now = found
                raise StepError(
                    f"{self} was compiled for {_path(path)} of {was}, but it is {now}. Nothing is "
                    "compiled between steps: give batches of one tree and shape, or call compile again."
                ) from error
            if isinstance(error, ValueError) and "sharding" in str(error):
                raise StepError(
                    f"{self} was compiled for arguments that lie in another way on the devices: {error} "
                    "Put them there with jax.device_put before compile."
                ) from error
            raise

    def _same(self, first: str, one: Any, name: str, other: Any) -> None:
        if found := difference(one, other):
            path, a, b = found
            raise self._differ(first, a, name, b, _path(path))

    def _same_shardings(self, first: str, one: Any, name: str, other: Any, info: Any) -> None:
        shapes = jax.tree.leaves(info)
        found = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), shapes)
        for (path, a), b, x in found:
            if not a.is_equivalent_to(b, len(x.shape)):
                raise self._differ(first, a, name, b, _path(path))

    def _differ(self, first: str, one: Any, name: str, other: Any, path: str) -> StepError:
        return StepError(
            f"Switch: the results of {first!r} and {name!r} differ: {path} is {one} of {first!r} and "
            f"{other} of {name!r}. Whichever ran, the next step takes the results: make them alike."
        )


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(tuple(keys)) or "the result"


def resume(step: Any, notes: Mapping[str, Any]) -> None:
    """Go on with the step that ran when a checkpoint noted a ``Switch``. Raises StepError where the
    step is none now: which of its steps it is, nobody would know.
    """
    active = notes.get("active")
    if active is None:
        return
    if not isinstance(step, Switch):
        raise StepError(
            f"The run that saved the checkpoint had a collc.Switch, of which {active!r} ran, but the "
            f"step is none now. Give fit collc.Switch({{{active!r}: step}})."
        )
    step.use(active)
    step.count = notes["switches"]
