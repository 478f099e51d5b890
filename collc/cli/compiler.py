"""A step compiled for a pod, by its own plan or by another one, and the receipts of both."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh

from collc.cli import tracing
from collc.cli.common import files_run
from collc.cli.plans import natively, read_plan
from collc.cli.request import BLUECONNECT, Against, Request
from collc.cli.steps import Source, arguments, loaded
from collc.errors import CollcError, DataError, StepError
from collc.language.foreign import said
from collc.planning.plan import Plan
from collc.receipts import pods
from collc.receipts.pods import flags
from collc.receipts.reading import receipt, timed, unwrapped
from collc.receipts.receipt import Receipt
from collc.training.lm.abstract import abstract_step


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step. ``hlo()`` is its optimised text."""

    receipt: Receipt
    hlo: Callable[[], str]


@dataclass
class Compiler:
    """Compiles a step, by one plan or another. ``stack`` holds its file open till all is done."""

    request: Request
    mesh: Mesh
    xla: Mapping[str, Any]
    timeout: float  # seconds for each run of the file's code
    stack: ExitStack

    def own(self) -> CompiledStep:
        """The step as it was asked for."""
        return self._compiled(self._plan, self.xla)

    def other(self, against: Against) -> CompiledStep:
        """The step that it is set beside. Raises DataError where that is the same one."""
        plan = self._plan
        native = plan and natively(plan)
        same = plan and native and plan.schedule("all_reduce") == native.schedule("all_reduce")
        if same and against is Against.NATIVE:
            raise DataError(
                "--against native has no effect: the plan is XLA's own already. Drop it, or choose "
                "schedules with --plan."
            )
        options = dict(self.xla)
        if against is Against.BLUECONNECT:
            hardware = pods.describe(self.mesh)
            assert hardware is not None
            if self.mesh.size == hardware.gpus:
                raise DataError(
                    "--against blueconnect has no effect on one host: there is nothing to split by "
                    "host. Drop it, or choose a larger --pod."
                )
            options[BLUECONNECT] = str(hardware.gpus)
        return self._compiled(native, options)

    @cached_property
    def _plan(self) -> Plan | None:
        if self.request.plan is None:
            return None
        with files_run(self.timeout):
            return read_plan(self.request.plan, self.mesh)

    @cached_property
    def _source(self) -> Source | None:
        """The step's file, run once; None for a model."""
        if self.request.model:
            return None
        with files_run(self.timeout):
            return self.stack.enter_context(loaded(self.request.step))

    def _compiled(self, plan: Plan | None, options: Mapping[str, Any]) -> CompiledStep:
        seconds: dict[str, float] = {}
        source = self._source
        trace = partial(self._of_file, source, plan) if source else partial(self._of_model, plan)
        with files_run(self.timeout):
            traced = timed(seconds, "trace", trace)
        lowered = timed(seconds, "lower", partial(_lower, traced))
        options = {**flags.untuned(), **options}
        compiled = timed(seconds, "compile", partial(_compile, lowered, options))
        found = receipt(compiled, asked=traced, mesh=self.mesh)
        found = replace(found, seconds={**seconds, **found.seconds})
        return CompiledStep(found, unwrapped(compiled).as_text)

    def _of_model(self, plan: Plan | None) -> Any:
        sizes = {"batch": self.request.batch_size, "seq": self.request.seq}
        given = {name: size for name, size in sizes.items() if size is not None}
        step, arguments = abstract_step(self.request.step, plan or self.mesh, **given)
        return step.trace(*arguments)

    def _of_file(self, source: Source, plan: Plan | None) -> Any:
        tracing.refuse_decorated(source, plan is not None)
        shapes = arguments(source, self.request.shapes, self.mesh)
        split = self.request.split or ()
        if plan is not None and not split:
            if "batch" not in shapes:
                raise StepError(
                    f"{source} has no argument named batch, so say with --split which are split "
                    f"over the plan's axes: {', '.join(shapes)}."
                )
            split = ("batch",)
        donate = self.request.donate
        return tracing.traced(source, shapes, self.mesh, plan, split=split, donate=donate)


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
