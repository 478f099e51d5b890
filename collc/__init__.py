"""collc compiles collective schedules to JAX: proved, priced, lowered, and checked when traced.

Public names are resolved when first used, so that the language and the proofs work without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collc.analysis.certificate import Certificate as Certificate
    from collc.analysis.certificate import verify as verify
    from collc.analysis.passes import Coalesce as Coalesce
    from collc.analysis.passes import Pipeline as Pipeline
    from collc.analysis.passes import Relabel as Relabel
    from collc.analysis.passes import Roll as Roll
    from collc.analysis.passes import Rounds as Rounds
    from collc.errors import CollcError as CollcError
    from collc.language.library import find as find
    from collc.language.parse import parse as parse
    from collc.lowering.collectives import all_gather as all_gather
    from collc.lowering.collectives import all_to_all as all_to_all
    from collc.lowering.collectives import pbroadcast as pbroadcast
    from collc.lowering.collectives import pmax as pmax
    from collc.lowering.collectives import pmean as pmean
    from collc.lowering.collectives import pmin as pmin
    from collc.lowering.collectives import psum as psum
    from collc.lowering.collectives import psum_scatter as psum_scatter
    from collc.lowering.shards import Shard as Shard
    from collc.planning.plan import Plan as Plan
    from collc.planning.plan import plan as plan
    from collc.receipts.pods import pod as pod
    from collc.receipts.reading import receipt as receipt
    from collc.runtime.init import init as init
    from collc.runtime.watchdog.watchdog import Watchdog as Watchdog
    from collc.training import consistency as consistency
    from collc.training import strategy as strategy
    from collc.training.fitting import feed as feed
    from collc.training.fitting.fit import fit as fit
    from collc.training.fitting.switch import Switch as Switch
    from collc.training.gradients.plain import value_and_grad as value_and_grad
    from collc.training.gradients.sync import sync as sync
    from collc.training.kinds import Batch as Batch
    from collc.training.kinds import Ranked as Ranked
    from collc.training.kinds import rank_key as rank_key
    from collc.training.kinds import ranked as ranked
    from collc.training.norms import all_finite as all_finite
    from collc.training.norms import clip_by_global_norm as clip_by_global_norm
    from collc.training.norms import global_norm as global_norm
    from collc.training.norms import skip_nonfinite as skip_nonfinite
    from collc.training.server import ServerState as ServerState
    from collc.training.server import server as server
    from collc.training.step import schedule as schedule
    from collc.training.strategies import strategies as strategies

_HOME = {
    "Certificate": "collc.analysis.certificate",
    "verify": "collc.analysis.certificate",
    "Coalesce": "collc.analysis.passes",
    "Pipeline": "collc.analysis.passes",
    "Relabel": "collc.analysis.passes",
    "Roll": "collc.analysis.passes",
    "Rounds": "collc.analysis.passes",
    "CollcError": "collc.errors",
    "find": "collc.language.library",
    "parse": "collc.language.parse",
    "all_gather": "collc.lowering.collectives",
    "all_to_all": "collc.lowering.collectives",
    "pbroadcast": "collc.lowering.collectives",
    "pmax": "collc.lowering.collectives",
    "pmean": "collc.lowering.collectives",
    "pmin": "collc.lowering.collectives",
    "psum": "collc.lowering.collectives",
    "psum_scatter": "collc.lowering.collectives",
    "Shard": "collc.lowering.shards",
    "Plan": "collc.planning.plan",
    "plan": "collc.planning.plan",
    "pod": "collc.receipts.pods",
    "receipt": "collc.receipts.reading",
    "init": "collc.runtime.init",
    "Watchdog": "collc.runtime.watchdog.watchdog",
    "consistency": "collc.training",
    "feed": "collc.training.fitting",
    "strategy": "collc.training",
    "fit": "collc.training.fitting.fit",
    "value_and_grad": "collc.training.gradients.plain",
    "Batch": "collc.training.kinds",
    "Ranked": "collc.training.kinds",
    "rank_key": "collc.training.kinds",
    "ranked": "collc.training.kinds",
    "all_finite": "collc.training.norms",
    "clip_by_global_norm": "collc.training.norms",
    "global_norm": "collc.training.norms",
    "skip_nonfinite": "collc.training.norms",
    "ServerState": "collc.training.server",
    "server": "collc.training.server",
    "schedule": "collc.training.step",
    "strategies": "collc.training.strategies",
    "Switch": "collc.training.fitting.switch",
    "sync": "collc.training.gradients.sync",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from collc.errors import nearest

        raise AttributeError(f"module 'collc' has no attribute {name!r}. {nearest(name, _HOME)}")
    module = importlib.import_module(_HOME[name])
    return getattr(module, name, None) or importlib.import_module(f"{_HOME[name]}.{name}")


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
