"""Imports go down only, and what is known before running never loads jax."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACADE = "collc"  # collc/__init__.py and __main__.py: above all, nothing inside imports them

# From the ground up. A module imports its own layer and those before it.
LAYERS = [
    "collc.errors",
    "collc.language",
    "collc.schedules",
    "collc.analysis",
    "collc.machine",
    "collc.models",
    "collc.lowering",
    "collc.receipts",
    "collc.planning",
    "collc.runtime",
    "collc.training",
    "collc.bench",
    "collc.cli",
    FACADE,
]
# Narrower than the order: a schedule knows the language and its fellow schedules, a model
# knows nothing of collc.
ONLY = {
    "collc.schedules": {"collc.language", "collc.schedules"},
    "collc.models": {"collc.models"},
}
# The way up: names in a text resolve to schedules and passes, found at run time as plug-ins are.
PLUG_INS = {
    ("collc.language.library", "collc.schedules"),
    ("collc.language.library", "collc.analysis.passes"),
}
# Within a layer: the run behind `collc train` is one user of the loop that everyone has.
BELOW = {
    "collc.training.fitting": ("collc.training.lm",),
    "collc.training.checkpoints": ("collc.training.lm", "collc.training.fitting"),
}
NO_JAX = ["collc.errors", "collc.language", "collc.schedules", "collc.analysis", "collc.machine"]
JAX_FAMILY = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
IMPORTERS = ("importlib.import_module", "import_module", "__import__")


def modules() -> dict[str, Path]:
    """Every module that ships, by the name that it is imported as."""
    found = {}
    for home, package in (
        ("collc", "collc"),
        ("schedules", "collc.schedules"),
        ("models", "collc.models"),
    ):
        for path in sorted((ROOT / home).rglob("*.py")):
            parts = path.relative_to(ROOT / home).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def layer(module: str) -> str:
    """The layer that a module of collc belongs to.

    >>> layer("collc.language.ir"), layer("collc"), layer("collc.__main__"), layer("collc.verify")
    ('collc.language', 'collc', 'collc', 'collc')
    """
    named = ".".join(module.split(".")[:2])
    return named if named in LAYERS else FACADE


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those in functions and import_module("...").

    `from a import b` yields a.b: whether b is a module or a name in it, its layer is the same.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if is_package else module.split(".")[:-1]
                here = here[: len(here) - node.level + 1]
                base = ".".join([*here, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield node.lineno, name


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """The imports of a file that go up, or that load jax where it must stay unloaded."""
    mine = layer(module)
    allowed = ONLY.get(mine, set(LAYERS[: LAYERS.index(mine) + 1]))
    wrong = []
    for line, name in imports(ast.parse(source), module, is_package):
        top = name.split(".")[0]
        if (module, name) in PLUG_INS:
            continue
        if top == "collc" and layer(name) not in allowed:
            wrong.append(f"{module}:{line} imports {name}, which {mine} may not know")
        elif top in ("schedules", "models"):
            wrong.append(f"{module}:{line} imports {name}: write collc.{name}")
        elif top in JAX_FAMILY and mine in NO_JAX:
            wrong.append(f"{module}:{line} imports {name}, and {mine} must not load jax")
        for package, above in BELOW.items():
            if module.startswith(package) and name.startswith(above):
                wrong.append(f"{module}:{line} imports {name}, which is above {package}")
    return wrong


def test_imports_go_down_only():
    found = modules()
    assert len(found) >= 25, (
        f"only {len(found)} modules found under {ROOT}: the test looks in the wrong place"
    )
    unknown = [
        name for name in found
        if layer(name) == FACADE and name not in (FACADE, f"{FACADE}.__main__")
    ]  # fmt: skip
    assert not unknown, (
        f"{unknown} belong to no layer: add them to LAYERS of this test, at the right height"
    )
    wrong = []
    for name, path in found.items():
        wrong += violations(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module, source",
    [
        ("collc.language.ir", "from collc.analysis import verify"),
        ("collc.language.ir", "def late():\n    from ..lowering.lower import lower"),
        ("collc.analysis.verify", "import jax.numpy as jnp"),
        ("collc.analysis.verify", "def late():\n    import jax"),
        ("collc.lowering.lower", "import importlib as i\nimport_module('collc.training.step')"),
        ("collc.training.step", "import collc"),
        ("collc.training.step", "from collc import verify"),
        ("collc.training.step", "from .. import cli"),
        ("collc.schedules.ring", "from collc.analysis import bounds"),
        ("collc.schedules.ring", "import flax"),
        ("collc.models.lm", "from collc.language import add"),
        ("collc.planning.plan", "import schedules.ring"),
        ("collc.errors", "from collc.language import ir"),
        ("collc.training.fitting.shares", "from collc.training.lm import report"),
        ("collc.training.checkpoints.files", "def late():\n    import collc.training.lm.folder"),
        ("collc.training.checkpoints.files", "from collc.training.fitting.outputs import LOCK"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_noticed(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        (
            "collc.language.ir",
            "import numpy\nfrom collc.errors import ScheduleError\nfrom . import states",
        ),
        (
            "collc.training.step",
            "import jax\nfrom ..language import ir\nfrom collc.planning.plan import Plan",
        ),
        ("collc.schedules.hierarchical", "from collc.language import add\nfrom . import ring"),
        ("collc.models.lm", "import jax\nfrom flax import nnx"),
        ("collc.__main__", "from collc.cli import main"),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert violations(module, source) == []


def test_what_is_known_before_running_leaves_jax_unloaded():
    """One interpreter for all, that says after each which one loaded it."""
    names = [name for name in modules() if name == FACADE or layer(name) in NO_JAX]
    assert len(names) >= 10
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    loaded = {JAX_FAMILY!r} & sys.modules.keys()
    assert not loaded, f"importing {{name}} loads {{sorted(loaded)}}"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
