"""What pipeline_gpu.py compiles: programs that all-reduce over hosts and gpus, and sets of XLA flags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Flags = dict[str, bool | int | str]
LIMIT: Flags = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
PARTS: dict[str, Flags] = {
    "limit": LIMIT,
    "streams": LIMIT | {"xla_gpu_experimental_enable_collective_multi_streaming": True},
    "domains": {"xla_gpu_collective_domain_assignment": "scale_up_fabric"},
    "off": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "async": {"xla_disable_hlo_passes": "gpu-convert-async-collectives-to-sync"},
    "apart": {
        f"xla_gpu_{kind}_combine_threshold_bytes": 0
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
    },
}
SETS = (
    "none",
    "limit",
    "streams",
    "streams + async",
    "streams + async + apart",
    "domains",
    "domains + off",
    "domains + apart",
    "domains + async",
    "domains + async + apart",
)
NATIVE = ("native.reduce_scatter", "native.all_reduce", "native.all_gather")
EXPLICIT = ("ring.reduce_scatter", "tree.all_reduce", "ring.all_gather")
PLACES = ("gpu", "host", "gpu")
Body = Callable[[Any], Any]


@dataclass(frozen=True)
class Variant:
    """A program to compile: what it is to a reader, its body, and what belongs to it."""

    about: str
    body: Body
    own: Flags = field(default_factory=dict)


def variants(slices: int, gpus: int) -> dict[str, Variant]:
    """The programs: a flat buffer of one device in, the sum over all devices out."""
    from jax import lax

    from collc.language.parse import parse
    from collc.lowering import collectives

    def placed(leaves: tuple[str, ...]) -> list[str]:
        return [f"{leaf} @ {axis}" for leaf, axis in zip(leaves, PLACES, strict=True)]

    def whole(leaves: tuple[str, ...], k: int) -> Variant:
        chain = " >> ".join(placed(leaves))
        text = chain if k == 1 else f"({chain}).through(Pipeline({k}))"
        schedule = parse(text)
        return Variant(f"`{text}`", lambda x: collectives.psum(x, schedule))

    def loose(leaves: tuple[str, ...]) -> Variant:
        scatter, reduce, gather = map(parse, placed(leaves))
        stages: list[Body] = [
            lambda x: collectives.psum_scatter(x, scatter, tiled=True),
            lambda x: collectives.psum(x, reduce),
            lambda x: collectives.all_gather(x, gather, tiled=True),
        ]
        return Variant(
            f"`{' >> '.join(placed(leaves))}` in {slices} slices by hand, rings in loops, with nothing "
            "to tie the slices to one another",
            partial(staggered, stages=stages, slices=slices),
        )

    def joint(x: Any) -> Any:
        return lax.psum(x, ("host", "gpu"))

    blue: Flags = {"xla_gpu_all_reduce_blueconnect_num_devices_per_host": gpus}
    return {
        "psum": Variant("`lax.psum` over both axes", joint),
        "blueconnect": Variant(f"the same with `--{next(iter(blue))}={gpus}`", joint, blue),
        "native": whole(NATIVE, 1),
        "native, pipelined": whole(NATIVE, slices),
        "native, loose": loose(NATIVE),
        "explicit": whole(EXPLICIT, 1),
        "explicit, pipelined": whole(EXPLICIT, slices),
        "explicit, loose": loose(EXPLICIT),
    }


def staggered(x: Any, stages: list[Body], slices: int) -> Any:
    """x in slices, each a stage behind the one before, as the program is written only."""
    import jax.numpy as jnp

    from collc.language.normal import ticks

    parts = list(jnp.split(x, slices))
    for now in ticks(slices, len(stages)):
        for i, j in now:
            parts[i] = stages[j](parts[i])
    return jnp.concatenate(parts)


def sets(given: Sequence[str]) -> dict[str, Flags]:
    """The sets of flags by name, and that of the command line."""
    made: dict[str, Flags] = {}
    for name in SETS:
        made[name] = {}
        for part in name.split(" + ") if name != "none" else ():
            made[name] |= PARTS[part]
    if given:
        values = {"true": True, "false": False}
        pairs = [flag.removeprefix("--").partition("=")[::2] for flag in given]
        made["given"] = {
            k: values.get(v, int(v) if v.lstrip("-").isdigit() else v) for k, v in pairs
        }
    return made
