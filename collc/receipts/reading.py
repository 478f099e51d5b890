"""Receipts of programs: traced, lowered, compiled, or as HLO text."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from collc.errors import DataError, HloError, MeshError
from collc.language.ir import integer
from collc.lowering import account
from collc.lowering.sends import Asked
from collc.receipts import pods
from collc.receipts.compare import compare
from collc.receipts.hlo import Collective, Module, parse
from collc.receipts.matching import called
from collc.receipts.receipt import By, Entry, Memory, Receipt
from collc.receipts.spans import Links, sent, spanned


def receipt(
    what: Any, *, asked: Any = None, mesh: Mesh | Mapping[str, int] | None = None
) -> Receipt:
    """The receipt of a compiled program: its collectives, its memory, and what differs from its plan.

    Args:
      what: what ``jax.jit(step).trace(...)`` or ``.lower(...)`` returns, which is compiled here, or
        what ``.compile()`` does; those of ``nnx.jit`` too. Or HLO text.
      asked: what ``jax.jit(step).trace(...)`` returned, if ``what`` is not that itself: without it
        nothing is known of what was asked for, and no difference is found.
      mesh: the mesh, or its axes and sizes, by which devices are named; by default that of the
        program's shardings.

    Raises HloError for text that is not understood, MeshError for a mesh that is not the program's,
    DataError for anything else than these.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        _check_sizes(mesh)
    what, asked, seconds = unwrapped(what), unwrapped(asked), dict[str, float]()
    if isinstance(what, jax.stages.Traced):
        if asked is not None:
            raise DataError("asked= has no effect: what is traced says it itself. Drop it.")
        asked = what
        what = timed(seconds, "lower", what.lower)
    if isinstance(what, jax.stages.Lowered):
        what = timed(seconds, "compile", what.compile)
    if asked is not None and not isinstance(asked, jax.stages.Traced):
        raise DataError(
            f"asked= takes what jax.jit(step).trace(...) returns, not {type(asked).__name__}."
        )
    start = time.perf_counter()
    if isinstance(what, jax.stages.Compiled):
        text, memory = what.as_text(), what.memory_analysis()
        if text is None:
            raise HloError("this executable has no HLO text. Compile the step in this process.")
        mesh = _agreed(_mesh_of(what), mesh)
    elif isinstance(what, str):
        text, memory = what, None
    else:
        raise DataError(
            f"a receipt is of a compiled program or of HLO text, not {type(what).__name__}. "
            "Pass what jax.jit(step).trace(...), .lower(...) or .compile() returns."
        )
    requests = None if asked is None else account.asked(asked.jaxpr)
    made = _made(text, mesh, requests, memory, seconds)
    seconds["receipt"] = time.perf_counter() - start
    return made


def _check_sizes(mesh: Any) -> None:
    fits = isinstance(mesh, Mapping) and all(
        isinstance(axis, str) and integer(n) is not None and n > 0 for axis, n in mesh.items()
    )
    if not fits:
        raise MeshError(
            f'mesh= takes a jax.sharding.Mesh, or axes and sizes as {{"host": 2, "gpu": 8}}, not '
            f"{mesh!r}"
        )


def unwrapped(stage: Any) -> Any:
    """The stage of ``jax.jit`` inside that of ``nnx.jit``."""
    for inner in ("traced", "lowered", "compiled"):
        if type(stage).__module__.startswith("flax.") and hasattr(stage, inner):
            return getattr(stage, inner)
    return stage


def timed(seconds: dict[str, float], name: str, stage: Callable[[], Any]) -> Any:
    """What a stage returns; how long it took is noted under its name."""
    start = time.perf_counter()
    done = stage()
    seconds[name] = time.perf_counter() - start
    return done


def _mesh_of(compiled: jax.stages.Compiled) -> Mesh | None:
    """The one mesh of the program's shardings; None where there is none, or several."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    meshes = {mesh for mesh in meshes if isinstance(mesh, Mesh)}
    return meshes.pop() if len(meshes) == 1 else None


def _agreed(own: Mesh | None, given: Any) -> Any:
    """The program's own mesh, which one that is given has to be."""
    if given is None or own is None:
        return own if given is None else given
    same = own == given if isinstance(given, Mesh) else dict(own.shape) == dict(given)
    if not same:
        shape = dict(given.shape) if isinstance(given, Mesh) else dict(given)
        raise MeshError(
            f"mesh={shape}, but the program was compiled for {dict(own.shape)}. Drop it."
        )
    return own


def _made(
    text: str,
    mesh: Mesh | Mapping[str, int] | None,
    requests: tuple[Asked, ...] | None,
    memory: Any,
    seconds: Mapping[str, float],
) -> Receipt:
    module = parse(text)
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh or {})
    absent = {a for r in requests or () for a in r.axes} - sizes.keys()
    if sizes and absent:
        raise MeshError(
            f"asked= is of another program: it goes over {', '.join(sorted(absent))}, which the mesh "
            f"{sizes} does not have. Pass what this program was traced as."
        )
    pod = pods.describe(mesh) if isinstance(mesh, Mesh) else None
    if requests is not None and not sizes:
        raise MeshError(
            "the program's shardings name no mesh, or several: to compare what was asked for, a "
            "receipt needs mesh=."
        )
    if sizes and math.prod(sizes.values()) != module.devices:
        raise MeshError(
            f"the mesh is not the program's: it has {math.prod(sizes.values())} devices, and the "
            f"program runs on {module.devices}. Pass the mesh that it is for."
        )
    collectives = [_believed(c, pod) for c in module.collectives]
    axes = [spanned(c, sizes) if sizes else None for c in collectives]
    compared = None
    if requests is not None:
        compared = compare(requests, collectives, sizes)
    served = [()] * len(collectives) if compared is None else compared.served
    entries = tuple(
        Entry(
            c,
            over,
            None if pod is None else Links(*map(round, sent(c, pod.domain_of).sum(axis=1))),
            _by(c) if compared is None else _served(serves),
            serves,
        )
        for c, over, serves in zip(collectives, axes, served, strict=True)
    )
    return Receipt(
        module=module,
        sizes=sizes,
        pod=pod,
        entries=entries,
        asked=requests,
        differences=() if compared is None else compared.differences,
        absent=() if compared is None else compared.absent,
        memory=_memory(memory, module, pod),
        seconds=seconds,
    )


def _believed(c: Collective, pod: pods.Pod | None) -> Collective:
    """The collective with the kernel that can run: XLA's own read their peers' memory, by NVLink.

    The XLA of jax 0.10 chooses them by the size of a group alone, and falls back when it runs.
    """
    if pod is None or c.kernel not in ("one-shot", "two-shot"):
        return c
    across = any(len({int(pod.domain_of[d]) for d in each}) > 1 for each in c.partners)
    return replace(c, kernel="nccl") if across else c


def _by(c: Collective) -> By:
    """Who asked, by the name alone: a partitioner's collective bears that of what it serves."""
    if "collc/" in c.op_name:
        return "plan"
    return "program" if called(c.op_name) else "XLA"


def _served(serves: Iterable[tuple[Asked, int]]) -> By:
    plans = [asked.plan for asked, _ in serves]
    return "plan" if any(plans) else "program" if plans else "XLA"


def _memory(found: Any, module: Module, pod: pods.Pod | None) -> Memory | None:
    if found is None:
        return None
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        constants=module.constants,  # which XLA's own figures leave out
        capacity=pod.memory if pod else None,
    )
