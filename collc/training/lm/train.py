"""The run behind `collc train`: a byte-level Transformer learns Python's standard library."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from collc.errors import CollcError, DataError, MeshError, PlanError, nearest
from collc.lowering.collectives import pmean
from collc.models import transformer
from collc.planning.plan import Plan
from collc.planning.plan import plan as make_plan
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.checkpoint import write_text
from collc.training.fitting.interrupt import Interrupt
from collc.training.lm import compare, data, folder, loop, report
from collc.training.lm.compare import SideBySide
from collc.training.lm.config import TrainConfig, make_mesh
from collc.training.lm.report import Summary
from collc.training.step import schedule


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW, its rate warmed up linearly and let down by half a cosine."""
    warm = min(max(10, config.steps // 20), config.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.lr, warm, config.steps + 1, config.lr / 20
    )
    return optax.adamw(rate, b2=0.98, weight_decay=config.weight_decay)


def model_config(name: str) -> transformer.Config:
    """The sizes of that name; DataError if there are none."""
    if name not in transformer.SIZES:
        raise DataError(f"There is no model size {name!r}. {nearest(name, transformer.SIZES)}")
    return transformer.SIZES[name]


def planned_step(plan: Plan, *, donate: bool = False) -> compare.Step:
    """A train step whose gradients and loss the plan reduces: (model, optimizer, batch) to the mean
    loss. `donate`: the new model and optimizer take the memory of the old.
    """

    @functools.partial(nnx.jit, donate_argnums=(0, 1) if donate else ())
    @schedule(plan, batch="batch")
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
        optimizer.update(model, pmean(grads))
        return pmean(loss)

    return train_step


def lax_step(mesh: jax.sharding.Mesh, *, donate: bool = False) -> compare.Step:
    """The same step in plain JAX, without collc: what XLA's own collectives do."""
    axes = mesh.axis_names

    @functools.partial(nnx.jit, donate_argnums=(0, 1) if donate else ())
    def train_step(model, optimizer, batch):
        graph, state = nnx.split((model, optimizer))

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axes)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        def per_device(state, batch):
            model, optimizer = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(transformer.loss)(model, batch)
            optimizer.update(model, jax.lax.pmean(grads, axes))
            return jax.lax.pmean(loss, axes), nnx.state((model, optimizer))

        loss, state = per_device(state, batch)
        nnx.update((model, optimizer), state)
        return loss

    return train_step


def evaluation_step(plan: Plan) -> Callable[[nnx.Module, jax.Array], jax.Array]:
    """(model, batch) to the mean loss over all devices."""

    @nnx.jit
    @schedule(plan, batch="batch")
    def evaluate(model, batch):
        return pmean(transformer.loss(model, batch))

    return evaluate


class Trainer:
    """Model, optimizer, text and compiled steps of one run, on its mesh."""

    def __init__(
        self, config: TrainConfig, mesh: jax.sharding.Mesh, plan: Plan, corpus: data.Corpus
    ) -> None:
        self.config, self.mesh, self.corpus = config, mesh, corpus
        self.sizes = model_config(config.model)
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.step, self.evaluation = planned_step(plan), evaluation_step(plan)
        self.model, self.optimizer = self.fresh()
        self.parameters = transformer.parameters(self.model)

    def fresh(self) -> tuple[transformer.Transformer, nnx.Optimizer]:
        """The initial state, the same for the same seed, a copy on each device."""
        model = transformer.Transformer(self.sizes, rngs=nnx.Rngs(self.config.seed))
        state = model, nnx.Optimizer(model, optimizer(self.config), wrt=nnx.Param)
        nnx.update(state, jax.device_put(nnx.state(state), self.everywhere))
        return state

    def batch(self, step: int) -> jax.Array:
        """The training batch of a step, each device holding its part."""
        config = self.config
        return jax.device_put(
            data.batch(self.corpus.train, config.seed, step, config.batch, config.seq), self.split
        )

    def advance(self, step: int) -> float:
        """Train one step; returns the loss over the whole batch."""
        return float(self.step(self.model, self.optimizer, self.batch(step)))

    def validation(self, batches: int) -> np.ndarray:
        return data.validation_batches(
            self.corpus.validation, self.config.batch, self.config.seq, batches
        )

    def evaluate(self, batches: int) -> float:
        """The mean loss over at most that many batches, spread over the validation text."""
        # float() waits. Were many batches in flight, virtual devices that wait for each other in a
        # collective could take all of XLA:CPU's threads, and the last device would never get one.
        losses = [
            float(self.evaluation(self.model, jax.device_put(batch, self.split)))
            for batch in self.validation(batches)
        ]
        return math.fsum(losses) / len(losses)

    def state(self) -> dict[str, Any]:
        """All that a step changes, as nested dicts of arrays."""
        parts = {"model": self.model, "optimizer": self.optimizer}
        return {name: nnx.to_pure_dict(nnx.state(part)) for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Put what `state` returned back."""
        for name, part in (("model", self.model), ("optimizer", self.optimizer)):
            own = nnx.state(part)
            nnx.replace_by_pure_dict(own, state[name])
            nnx.update(part, own)


def train(
    config: TrainConfig,
    console: Console | None = None,
    after: Callable[[int], object] | None = None,
    interrupt: Interrupt | None = None,
) -> Summary:
    """Train as `config` says, talking to `console`, and leave a run folder.

    `after(step)` is called after each step. The mesh's devices must exist: the number of virtual
    ones is set before jax is imported. Raises MeshError, PlanError, ScheduleError, DataError and
    CheckpointError before anything is written, StepError if a loss is no longer finite. Ctrl-C and
    SIGTERM finish the step, save, and say how to resume; see `Summary.exit_status`. A finished run
    that is resumed is only shown again. `interrupt`: one that the caller has entered already.
    """
    console = console or Console()
    if config.resume and (done := Summary.finished(folder.same_run(config))):
        report.closing(console, done)
        report.say(console, "This run is finished: there is nothing to resume.")
        return done
    mesh = make_mesh(config.mesh)
    data.divide(config.batch, mesh.size)
    model_config(config.model)
    corpus = data.corpus()
    _check_windows(config, corpus)
    entropy = data.entropy(corpus.train, corpus.validation)
    plan, plan_text = _plan(config, mesh)
    trainer = Trainer(config, mesh, plan, corpus)
    with (
        interrupt or Interrupt() as interrupt,
        folder.open_run(config, plan_text, corpus.digest) as run,
    ):
        interrupt.starting = False
        report.opening(console, plan.explain(), run, config, corpus, trainer.parameters, mesh.size)
        notes = {
            "identity": config.identity(),
            "corpus": corpus.digest,
            "plan": plan_text,
            "jax": jax.__version__,
        }
        try:
            summary = _run(trainer, run, notes, entropy, console, interrupt, after)
        except KeyboardInterrupt:
            saved = max(checkpoint.steps(run.checkpoints), default=0)
            report.say(
                console, f"Stopped at once. The last checkpoint is of step {saved}. To go on:"
            )
            report.say(console, f"  {folder.resume_command(run.path)}")
            raise
        report.closing(console, summary)
    return summary


def _check_windows(config: TrainConfig, corpus: data.Corpus) -> None:
    """DataError if the text is too short for an example, or for a batch."""
    data.batch(corpus.train, config.seed, 0, 1, config.seq)
    data.validation_batches(corpus.validation, 1, config.seq, 1)
    if config.batch * config.seq > len(corpus.train):
        raise DataError(
            f"A batch of {config.batch:,} × {config.seq:,} bytes is more than the whole text, "
            f"which has {len(corpus.train):,}. Choose a smaller batch or seq."
        )


def _plan(config: TrainConfig, mesh: jax.sharding.Mesh) -> tuple[Plan, str]:
    """The plan and its text."""
    for axis in mesh.axis_names:
        if axis not in config.schedules:
            raise MeshError(
                f"The mesh {config.mesh} has the axis {axis}, but no schedule was given for it. "
                "Give it one; native is XLA's own."
            )
    try:
        plan = make_plan(mesh, dict(config.schedules))
        return plan, plan.text
    except CollcError as error:
        if not config.resume:
            raise
        raise PlanError(
            f"{error}\nThe run in {config.folder} needs its schedules as they were when it began. "
            "Bring the file back, or start a fresh run in another folder."
        ) from error


def _run(
    trainer: Trainer,
    run: folder.RunFolder,
    notes: dict[str, Any],
    entropy: data.Entropy,
    console: Console,
    interrupt: Interrupt,
    after: Callable[[int], object] | None,
) -> Summary:
    """Train, validate and compare in an open folder, and leave the summary there."""
    config = trainer.config
    losses: list[float] = []

    def advance(step: int) -> float:
        losses[:] = [trainer.advance(step)]
        if after:
            after(step + 1)
        return losses[0]

    job = loop.Job(
        advance=advance,
        evaluate=lambda: trainer.evaluate(config.evaluation_batches),
        save=lambda step: checkpoint.save(run.checkpoints, step, trainer.state(), notes),
        steps=config.steps,
        tokens=config.batch * config.seq,
        save_every=config.save_every,
        evaluate_every=config.evaluate_every,
    )
    if run.checkpoint:
        trainer.load(checkpoint.restore(run.checkpoint, trainer.state()))
    metrics = loop.Metrics(run.path / folder.METRICS, run.start)
    if config.resume and not run.checkpoint:
        kept = f"; the old metrics are kept in {metrics.backup}" if metrics.backup else ""
        report.say(console, f"no checkpoint: starting again from step 0{kept}")
    try:
        step = loop.run(job, run.start, metrics, console, interrupt)
        final, validation, both = 4 * config.evaluation_batches, None, None
        if not interrupt.signal:
            validation = trainer.evaluate(final)
            loop.check_finite("validation loss", validation, step, step)
            metrics.write(step, validation_loss=validation, final=True)
            if losses:
                report.say(console, loop.validated(step, losses[0], validation, metrics.seconds))
            both = _side_by_side(trainer, console, interrupt)
        finished = validation is not None and (both or not config.side_by_side)
        summary = Summary(
            folder=run.path,
            step=step,
            steps=config.steps,
            parameters=trainer.parameters,
            validation=validation,
            validation_bytes=trainer.validation(final)[..., 1:].size,
            unigram=entropy.unigram,
            bigram=entropy.bigram,
            seconds=round(metrics.seconds, 3),
            tokens_per_s=round(metrics.steps * job.tokens / (metrics.seconds or 1), 1),
            side_by_side=both,
            interrupted=0 if finished else interrupt.signal,
        )
        text = json.dumps(summary.to_json(), indent=1, allow_nan=False)
        write_text(run.path / folder.SUMMARY, text + "\n")
    finally:
        metrics.close()
    return summary


def _side_by_side(trainer: Trainer, console: Console, interrupt: Interrupt) -> SideBySide | None:
    if not (steps := trainer.config.side_by_side):
        return None
    with console.status(f"The first {steps} steps again, both ways ...") as status:
        return compare.side_by_side(
            trainer.step,
            lax_step(trainer.mesh),
            trainer.fresh,
            trainer.batch,
            steps,
            stop=lambda: bool(interrupt.signal),
            done=lambda step: status.update(
                f"The first {steps} steps again, both ways: {step} of {steps}"
            ),
        )
