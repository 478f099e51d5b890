"""Examples in docstrings run: those of collc, the schedules, the models, and these tests."""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
HOMES = {"collc": "collc", "schedules": "collc.schedules", "models": "collc.models"}


def modules_with_examples() -> list[str]:
    """Found by text, so that collecting the tests imports nothing."""
    found = []
    for home, package in HOMES.items():
        for path in sorted((ROOT / home).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / home).with_suffix("").parts
                found.append(".".join((package, *parts)).removesuffix(".__init__"))
    return found


MODULES = modules_with_examples()


def assert_examples_hold(module) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    tests = doctest.DocTestFinder().find(module, module.__name__)
    for test in tests:
        runner.run(test, out=report.append)
    # A module whose examples all sit where doctest does not look would pass untested.
    assert runner.tries > 0, f"no example of {module.__name__} was run"
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert_examples_hold(importlib.import_module(name))


@pytest.mark.parametrize("name", ["test_layers", "test_readme"])
def test_examples_of_the_house(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert_examples_hold(module)


def test_there_are_examples():
    assert len(MODULES) >= 6, MODULES
    assert "collc.errors" in MODULES
