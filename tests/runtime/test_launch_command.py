"""`collc launch` as a command."""

import os

import pytest
from typer.testing import CliRunner

from collc.cli import app

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs process groups")


@pytest.fixture
def command():
    """`command("--hosts", "2", "--", "true")` is `collc launch --hosts 2 -- true`."""
    return lambda *words: CliRunner().invoke(app, ("launch", *words))


@pytest.mark.parametrize("dashes", [("--",), ()])
def test_the_command(command, dashes):
    script = 'echo "$# $1 $2"; exit $COLLC_RESTARTS'
    words = (
        "--hosts",
        "3",
        "--devices-per-host=2",
        *dashes,
        "sh",
        "-c",
        script,
        "x",
        "--hosts",
        "--",
    )
    result = command(*words)
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == [f"h{i} | 2 --hosts --" for i in range(3)]


def test_the_command_leaves_with_the_code_of_the_host(command):
    result = command("--hosts", "1", "--max-restarts", "2", "--", "sh", "-c", "kill -9 $$")
    assert result.exit_code == 137
    assert "restart 2 of 2" in result.stderr and "killed by SIGKILL" in result.stderr


@pytest.mark.parametrize(
    "words, code, why",
    [
        ((), 2, "there is none. Say what"),
        (("--", "no-such-program"), 1, "error: there is no program 'no-such-program' on the PATH."),
        (("--hosts", "0", "--", "true"), 2, "hosts"),
        (("--hosts", "1025", "--", "true"), 2, "hosts"),
        (("--max-restarts", "-1", "--", "true"), 2, "max-restarts"),
        (("--grace", "-1", "--", "true"), 2, "grace"),
    ],
)
def test_the_command_refuses(command, words, code, why):
    result = command(*words)
    assert result.exit_code == code and why in result.stderr
    assert "Traceback" not in result.stderr
