"""Plans as the command line writes them, and XLA's defaults as a plan."""

import re
from pathlib import Path

from jax.sharding import AbstractMesh, Mesh

from collc.errors import PlanError
from collc.planning.compose import native
from collc.planning.plan import Plan, make, plan
from collc.planning.tune import Tuned


def read_plan(text: str, mesh: Mesh | AbstractMesh) -> Plan:
    """The plan of ``gpu=ring,host=tree``, or of a saved plan's file. Raises PlanError."""
    if Path(text).is_file() or text.endswith(".txt"):
        return Plan.load(text, mesh)
    chosen: dict[str, str] = {}
    for part in _split(text):
        axis, equals, schedule = (word.strip() for word in part.partition("="))
        if not equals or not axis.isidentifier() or not schedule:
            raise PlanError(
                f"--plan {text}: {part.strip()!r} is no axis with its schedule. Write it as "
                "gpu=ring,host=tree, or give the file of a saved plan."
            )
        if axis in chosen:
            raise PlanError(f"--plan {text}: axis {axis} is there twice. Drop one.")
        if schedule == "auto":
            raise PlanError(
                f"--plan {text}: auto measures on the devices that it is for, and a pod is not there. "
                "Name a schedule, or give the file of a plan that was tuned on such a machine."
            )
        chosen[axis] = schedule
    return plan(mesh, chosen)


def _split(text: str) -> list[str]:
    """Parts between commas that are in no parentheses.

    >>> _split("gpu=server.shards(4), host=f(1, 2)")
    ['gpu=server.shards(4)', ' host=f(1, 2)']
    """
    parts, depth = [""], 0
    for piece in re.findall(r"[(\[]|[)\]]|,|[^()\[\],]+", text):
        depth += (piece in "([") - (piece in ")]")
        if piece == "," and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def natively(plan: Plan) -> Plan:
    """XLA's defaults: each collective is one of its own over all of the plan's axes at once."""
    joint = native("all_reduce") @ plan.axes
    return make(plan.mesh, dict.fromkeys(plan.axes, "native"), Tuned("intermediate", ((0, joint),)))
