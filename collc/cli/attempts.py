"""A step compiled, by its own plan or by another one, and the receipts of both."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import Mesh

from collc.cli import tracing
from collc.cli.common import files_run
from collc.cli.given import BLUECONNECT, Against, Given
from collc.cli.plans import natively, read_plan
from collc.cli.steps import Source, arguments, loaded
from collc.errors import CollcError, DataError, StepError
from collc.language.foreign import said
from collc.planning.plan import Plan
from collc.receipts import pods
from collc.receipts.reading import receipt
from collc.receipts.receipt import Receipt
from collc.training.abstract import abstract_step


@dataclass(frozen=True)
class Made:
    """A compiled step."""

    receipt: Receipt
    hlo: str


@dataclass
class Attempts:
    """Compiles a step, by one plan or another. ``stack`` holds the file open till all is done."""

    given: Given
    mesh: Mesh
    xla: Mapping[str, Any]
    timeout: float
    stack: ExitStack
    source: Source | None = None  # once it is loaded

    def plain(self) -> Made:
        """The step as it was asked for."""
        return self._made(self._plan(), self.xla)

    def against(self, other: Against) -> Made:
        """The step that it is set beside."""
        plan = self._plan()
        native = plan and natively(plan)
        same = plan and native and plan.schedule("all_reduce") == native.schedule("all_reduce")
        if same and other is Against.NATIVE:
            raise DataError(
                "--against native has no effect: the plan is XLA's own already. Drop it, or choose "
                "schedules with --plan."
            )
        options = dict(self.xla)
        if other is Against.BLUECONNECT:
            hardware = pods.describe(self.mesh)
            assert hardware is not None
            options[BLUECONNECT] = str(hardware.gpus)
        return self._made(native, options)

    def _plan(self) -> Plan | None:
        if self.given.plan is None:
            return None
        with files_run(self.timeout):
            return read_plan(self.given.plan, self.mesh)

    def _made(self, plan: Plan | None, options: Mapping[str, Any]) -> Made:
        if self.source is None and not self.given.model:
            with files_run(self.timeout):
                self.source = self.stack.enter_context(loaded(self.given.step))
        times = [time.perf_counter()]
        with files_run(self.timeout):
            traced = self._of_file(self.source, plan) if self.source else self._of_model(plan)
        times.append(time.perf_counter())
        lowered = _lower(traced)
        times.append(time.perf_counter())
        compiled = _compile(lowered, options)
        times.append(time.perf_counter())
        names = ("trace", "lower", "compile")
        seconds = {name: b - a for name, (a, b) in zip(names, pairwise(times), strict=True)}
        found = receipt(compiled, asked=traced, mesh=self.mesh)
        compiled = getattr(compiled, "compiled", compiled)
        return Made(replace(found, seconds={**seconds, **found.seconds}), compiled.as_text())

    def _of_model(self, plan: Plan | None) -> Any:
        sizes = {name: n for name, n in self.given.sizes.items() if n is not None}
        step, arguments = abstract_step(self.given.step, plan or self.mesh, **sizes)
        return step.trace(*arguments)

    def _of_file(self, source: Source, plan: Plan | None) -> Any:
        tracing.refuse_decorated(source, plan is not None)
        options = self.given.options
        factory = options.get("--shapes", (None,))[0]
        shapes = arguments(source, factory, self.mesh)
        batch = options.get("--batch", ())
        if plan is not None and not batch:
            if "batch" not in shapes:
                raise StepError(
                    f"{source} has no argument named batch, so say with --batch which are split "
                    f"over the plan's axes: {', '.join(shapes)}."
                )
            batch = ("batch",)
        donate = options.get("--donate", ())
        return tracing.traced(source, shapes, self.mesh, plan, batch=batch, donate=donate)


def _lower(traced: Any) -> Any:
    try:
        return traced.lower()
    except CollcError:
        raise
    except Exception as e:  # whatever jax finds only now, such as shardings that do not fit
        raise StepError(f"jax cannot lower the step: {said(e)}") from e


def _compile(lowered: Any, options: Mapping[str, Any]) -> Any:
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as e:
        raise StepError(f"XLA cannot compile the step: {said(e)}") from e
