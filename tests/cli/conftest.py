"""The command line in this process: what it prints, where, and the status that it leaves with."""

import os

# typer reads it when imported: on some CI machines it would colour what is no terminal.
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"

import pytest
from typer.testing import CliRunner

from collc.cli import app


@pytest.fixture
def cli(monkeypatch):
    """`cli("list", "--json")` runs a command; the result has exit_code, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str):
        return CliRunner().invoke(app, list(args))

    return run


@pytest.fixture
def refused(cli):
    """`refused("show", "x")` is what a command says on stderr that ends with status 1."""

    def run(*args: str) -> str:
        result = cli(*args)
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.stderr
        return result.stderr

    return run


FILE = '''
from collc import language as cl
from collc.language import ALL, add, copy, ranks


@cl.all_reduce
def star(n):
    """Everyone to rank 0, and back."""
    yield add(ALL, ranks(n)[1:], 0)
    yield copy(ALL, 0, ranks(n)[1:])


@cl.all_reduce
def forever(n):
    while n:
        n += 1
    yield add(0, 0, 1)


@cl.all_reduce
def deaf(n):
    while n:
        try:
            for i in range(1000):
                n += i
        except Exception:
            pass
    yield add(0, 0, 1)


@cl.all_reduce
def endless(n):
    while True:
        yield add(0, 0, 1), add(0, 1, 0)


@cl.all_reduce
def nonsense(n):
    yield 42


@cl.all_reduce
def raises(n):
    yield add(0, 1, 0)
    raise ValueError("out of luck")


@cl.all_reduce
def wrong(n):
    yield add(ALL, ranks(n)[1:], 0)


server = star @ "gpu"
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of a file with one good schedule and several bad ones."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"
