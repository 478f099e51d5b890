"""The run behind `collc train`: a byte-level Transformer learns Python's standard library."""

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
from collc.models import transformer
from collc.planning.meshes import mesh_of
from collc.planning.plan import Plan
from collc.planning.plan import plan as make_plan
from collc.training.checkpoints import checkpoint
from collc.training.checkpoints.files import write_text
from collc.training.fitting.carried import Carried
from collc.training.fitting.event import Event
from collc.training.fitting.feed import place
from collc.training.fitting.interrupt import Interrupt
from collc.training.fitting.options import Options
from collc.training.fitting.outputs import opened
from collc.training.fitting.running import Loop
from collc.training.fitting.shares import Profiler
from collc.training.fitting.source import Source
from collc.training.lm import compare, data, folder, report
from collc.training.lm.compare import SideBySide
from collc.training.lm.config import TrainConfig
from collc.training.lm.report import Summary
from collc.training.lm.steps import evaluation_step, lax_step, planned_step


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


class Trainer:
    """Text, compiled steps and initial state of one run, on its mesh."""

    def __init__(
        self, config: TrainConfig, mesh: jax.sharding.Mesh, plan: Plan, corpus: data.Corpus
    ) -> None:
        self.config, self.mesh, self.plan, self.corpus = config, mesh, plan, corpus
        self.step, self.evaluation = planned_step(plan), evaluation_step(plan)
        self.state = self.fresh()
        self.parameters = transformer.parameters(self.state[0])

    def fresh(self) -> tuple[transformer.Transformer, nnx.Optimizer]:
        """The initial state, the same for the same seed, a copy on each device."""
        sizes = model_config(self.config.model)
        model = transformer.Transformer(sizes, rngs=nnx.Rngs(self.config.seed))
        state = model, nnx.Optimizer(model, optimizer(self.config), wrt=nnx.Param)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        nnx.update(state, jax.device_put(nnx.state(state), everywhere))
        return state

    def batch(self, step: int) -> jax.Array:
        """The training batch of a step, each device holding its part."""
        config, text = self.config, self.corpus.train
        return place(data.batch(text, config.seed, step, config.batch, config.seq), self.plan)

    def validation(self, finished: bool) -> np.ndarray:
        """Batches spread over the validation text, at the end four times as many."""
        config, text = self.config, self.corpus.validation
        most = config.evaluation_batches * (4 if finished else 1)
        return data.validation_batches(text, config.batch, config.seq, most)

    def evaluate(self, model: transformer.Transformer, optimizer: nnx.Optimizer) -> float:
        """The mean loss over the validation batches."""
        # float() waits. Were many batches in flight, virtual devices that wait for each other in a
        # collective could take all of XLA:CPU's threads, and the last device would never get one.
        losses = [
            float(self.evaluation(model, place(batch, self.plan)))
            for batch in self.validation(int(optimizer.step[...]) == self.config.steps)
        ]
        return math.fsum(losses) / len(losses)


def train(
    config: TrainConfig,
    console: Console | None = None,
    callbacks: tuple[Callable[[Event], object], ...] = (),
    interrupt: Interrupt | None = None,
) -> Summary:
    """Train as `config` says, talking to `console`, and leave a run folder.

    `callbacks`: as `collc.fit` takes them. The mesh's devices must exist: the number of virtual ones
    is set before jax is imported. Raises MeshError, PlanError, ScheduleError, DataError and
    CheckpointError before anything is written, StepError if a loss is no longer finite. Ctrl-C and
    SIGTERM finish the step, save, and say how to resume; see `Summary.exit_status`. A finished run
    that is resumed is only shown again. `interrupt`: one that the caller has entered already.
    """
    console = console or Console()
    if config.resume and (done := Summary.finished(folder.same_run(config))):
        report.closing(console, done)
        report.say(console, "This run is finished: there is nothing to resume.")
        return done
    mesh = mesh_of(config.mesh)
    data.check_divides(config.batch, mesh.size)
    model_config(config.model)
    corpus = data.corpus()
    _check_windows(config, corpus)
    entropy = data.entropy(corpus.train, corpus.validation)
    plan, plan_text = _plan(config, mesh)
    trainer = Trainer(config, mesh, plan, corpus)
    with (
        interrupt or Interrupt() as interrupt,
        folder.open_run(
            config, plan_text, corpus.digest, lambda told: report.say(console, told)
        ) as run,
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
            summary = _run(trainer, run, notes, entropy, console, interrupt, callbacks)
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
    callbacks: tuple[Callable[[Event], object], ...],
) -> Summary:
    """Train, validate and compare in an open folder, and leave the summary there."""
    config = trainer.config
    options = Options(
        steps=config.steps,
        evaluate=trainer.evaluate,
        evaluate_every=config.evaluate_every,
        save_every=config.save_every,
        callbacks=callbacks,
        tokens=config.batch * config.seq,
        notes=notes,
    )
    state, source = Carried(trainer.state, trainer.plan), Source(trainer.batch, config.steps)
    loop = Loop(trainer.step, state, source, None, options, Profiler(0, ()))
    if run.checkpoint:
        loop.resume(run.checkpoint)
    with opened(run.path, run.checkpoint, console, resume=config.resume) as outputs:
        loop.run(outputs, interrupt)
    ended = loop.step == config.steps
    validation = loop.metrics.get("validation_loss") if ended else None
    both = _side_by_side(trainer, console, interrupt) if ended and not interrupt.signal else None
    finished = validation is not None and (both or not config.side_by_side)
    summary = Summary(
        folder=run.path,
        step=loop.step,
        steps=config.steps,
        parameters=trainer.parameters,
        validation=validation,
        validation_bytes=trainer.validation(finished=True)[..., 1:].size,
        unigram=entropy.unigram,
        bigram=entropy.bigram,
        seconds=round(outputs.seconds, 3),
        tokens_per_s=round(outputs.steps * config.batch * config.seq / (outputs.seconds or 1), 1),
        side_by_side=both,
        interrupted=0 if finished else interrupt.signal,
    )
    text = json.dumps(summary.to_json(), indent=1, allow_nan=False)
    write_text(run.path / folder.SUMMARY, text + "\n")
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
