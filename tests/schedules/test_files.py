"""A schedule file is short, imports only the language, and says what it claims."""

import ast
import sys
from pathlib import Path

import pytest

from collc.language.algebra import Leaf
from collc.language.leaves import Family
from collc.language.library import contents, modules

FOLDER = Path(__file__).parents[2] / "schedules"
FILES = sorted(FOLDER.glob("*.py"))
MAY_IMPORT = {"collc.language", "collc.schedules", "numpy"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_schedule_file_is_short_and_imports_the_language_only(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from collc import language`: what is meant is the submodule.
            module = node.module or ""
            names |= (
                {f"collc.{alias.name}" for alias in node.names} if module == "collc" else {module}
            )
    outside = {
        name
        for name in names
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(name == known or name.startswith(f"{known}.") for known in MAY_IMPORT)
    }
    assert not outside


def test_every_file_leaf_and_family_says_what_it_claims():
    assert {path.stem for path in FILES} - {"__init__"} <= {*modules()}
    for name, module in modules().items():
        assert module.__doc__, name
        for value in contents(module).values():
            if isinstance(value, Family) or (isinstance(value, Leaf) and not value.native):
                # A dual says it by the schedule that it is the dual of.
                dual = isinstance(value, Leaf) and value.facing is not value.kind
                assert value.__doc__ or dual, value.name
