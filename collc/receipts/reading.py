"""Receipts of programs: traced, lowered, compiled, or as HLO text."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from collc.errors import HloError, MeshError
from collc.lowering import account
from collc.lowering.account import Asked
from collc.receipts import pods
from collc.receipts.compare import compare
from collc.receipts.hlo import Collective, parse
from collc.receipts.receipt import By, Entry, Memory, Receipt
from collc.receipts.spans import links, spanned

_LAX = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute")


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

    Raises HloError for text that is not understood, MeshError for a mesh that is not the program's.
    """
    what, asked, seconds = _unwrapped(what), _unwrapped(asked), dict[str, float]()
    if isinstance(what, jax.stages.Traced):
        if asked is not None:
            raise HloError("asked= has no effect: what is traced says it itself. Drop it.")
        asked = what
        what = _timed(seconds, "lower", what.lower)
    if isinstance(what, jax.stages.Lowered):
        what = _timed(seconds, "compile", what.compile)
    if asked is not None and not isinstance(asked, jax.stages.Traced):
        raise HloError(
            f"asked= takes what jax.jit(step).trace(...) returns, not a {type(asked).__name__}"
        )
    start = time.perf_counter()
    if isinstance(what, jax.stages.Compiled):
        text, memory = what.as_text(), what.memory_analysis()
        if text is None:
            raise HloError("this executable has no HLO text. Compile the step in this process.")
        mesh = _mesh_of(what) if mesh is None else mesh
    elif isinstance(what, str):
        text, memory = what, None
    else:
        raise HloError(
            f"a receipt is of a compiled program or of HLO text, not of a {type(what).__name__}. "
            "Pass what jax.jit(step).trace(...), .lower(...) or .compile() returns."
        )
    requests = None if asked is None else account.asked(asked.jaxpr)
    made = _made(text, mesh, requests, memory, seconds)
    seconds["receipt"] = time.perf_counter() - start
    return made


def _unwrapped(stage: Any) -> Any:
    """The stage of ``jax.jit`` inside that of ``nnx.jit``."""
    for inner in ("traced", "lowered", "compiled"):
        if type(stage).__module__.startswith("flax.") and hasattr(stage, inner):
            return getattr(stage, inner)
    return stage


def _timed(seconds: dict[str, float], name: str, stage: Any) -> Any:
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


def _made(
    text: str,
    mesh: Mesh | Mapping[str, int] | None,
    requests: tuple[Asked, ...] | None,
    memory: Any,
    seconds: Mapping[str, float],
) -> Receipt:
    module = parse(text)
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh or {})
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
    entries = []
    for c, over in zip(collectives, axes, strict=True):
        serves = () if compared is None else compared.served.get(c.name, ())
        by = _by(c) if compared is None else _served(serves)
        entries.append(Entry(c, over, links(c, pod.domain_of) if pod else None, by, serves))
    return Receipt(
        module=module,
        sizes=sizes,
        pod=pod,
        entries=tuple(entries),
        asked=requests,
        differences=() if compared is None else compared.differences,
        absent=() if compared is None else compared.absent,
        memory=_memory(memory, pod),
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
    return "program" if c.op_name.rpartition("/")[2].startswith(_LAX) else "XLA"


def _served(serves: Iterable[tuple[Asked, int]]) -> By:
    plans = [asked.plan for asked, _ in serves]
    return "plan" if any(plans) else "program" if plans else "XLA"


def _memory(found: Any, pod: pods.Pod | None) -> Memory | None:
    if found is None:
        return None
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        capacity=pod.memory if pod else None,
    )
