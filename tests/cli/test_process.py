"""The command as a process: imports, terminals, pipes, signals."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

COMMAND = (sys.executable, "-m", "collc")


def environment(**more: str) -> dict[str, str]:
    colours = {"COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "GITHUB_ACTIONS", "PY_COLORS"}
    return {**{k: v for k, v in os.environ.items() if k not in colours}, **more}


def test_no_jax_for_what_needs_none():
    code = """
import sys
from typer.testing import CliRunner
from collc.cli import app
for args in (["list", "--mesh", "gpu=4"], ["show", "ring.all_reduce", "--mesh", "gpu=4"],
             ["verify", "hierarchical('host', 'gpu')", "--mesh", "host=2,gpu=4"], ["--version"],
             ["train", "--help"], ["launch", "--", "true"]):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    loaded = {"jax", "jaxlib", "flax", "optax", "orbax"} & sys.modules.keys()
    assert not loaded, (args, loaded)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_python_m_collc_and_its_errors():
    run = subprocess.run(
        [*COMMAND, "verify", "rnig.x", "--mesh", "gpu=4"], capture_output=True, text=True
    )
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "error: there is no schedule module 'rnig'. Did you mean ring?\n"


@pytest.mark.skipif(os.name != "posix", reason="needs a pipe that closes")
def test_a_reader_that_leaves():
    run = subprocess.Popen(
        [*COMMAND, "show", "ring.all_reduce", "--mesh", "gpu=2048"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert run.stdout and run.stderr
    assert run.stdout.readline().startswith(b"ring.all_reduce")
    run.stdout.close()
    assert run.stderr.read() == b""
    assert run.wait(20) == 141
    run.stderr.close()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_is_quiet(tmp_path):
    path, begun = tmp_path / "slow.py", tmp_path / "begun"
    path.write_text(f"open({str(begun)!r}, 'w').close()\nwhile True: pass\n")
    run = subprocess.Popen(
        [*COMMAND, "show", f"{path}:x", "--mesh", "gpu=4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell may have started all this in the background, where Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 20
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # into the loop: within open() Python may clear the interrupt away
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=20) == (b"", b"")
    assert run.returncode == 130


@pytest.mark.skipif(os.name != "posix", reason="needs alarms")
def test_a_file_that_catches_everything(tmp_path):
    path = tmp_path / "deaf.py"
    path.write_text(
        "while True:\n    try:\n        [i for i in range(99)]\n    except:\n        pass\n"
    )
    command = [*COMMAND, "show", f"{path}:x", "--mesh", "gpu=4", "--timeout", "0.1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.startswith("error: ") and "stopped after 0.1 s" in run.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs alarms")
@pytest.mark.parametrize(
    "code, words",
    [
        ("import time\nwhile True:\n  try: time.sleep(9)\n  except BaseException: pass", "error: "),
        ("sum(range(10**15))", 'loop.py", line 1 in <module>'),  # C code that keeps the interpreter
    ],
)
def test_a_file_that_cannot_be_interrupted(tmp_path, code, words):
    (tmp_path / "loop.py").write_text(code)
    command = [*COMMAND, "show", f"{tmp_path}/loop.py:x", "--mesh", "gpu=4", "--timeout", "0.1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and run.stdout == "" and words in run.stderr


def test_nobody_waits_for_the_threads_of_a_file(tmp_path):
    path = tmp_path / "thread.py"
    path.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "from collc.schedules import ring\n"
        "f = ring.all_reduce\n"
    )
    command = [*COMMAND, "verify", f"{path}:f", "--mesh", "gpu=4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and run.stdout.startswith("ring.all_reduce @ gpu")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_output_that_cannot_be_written():
    shell = f"{sys.executable} -m collc verify ring.all_reduce --mesh gpu=4"
    full = subprocess.run(f"{shell} >/dev/full", shell=True, capture_output=True, text=True)
    assert full.returncode == 1 and full.stderr == (
        "error: the system refused to read or write: No space left on device\n"
    )
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        run = subprocess.run(f"{shell} {closed}", shell=True, capture_output=True, text=True)
        assert run.returncode == 0 and run.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="needs a folder that goes")
def test_a_working_directory_that_is_gone(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from collc import language as cl\n@cl.reduce\ndef f(n): yield cl.add(0, 0, n)\n"
    )
    (tmp_path / "gone").mkdir()
    shell = (
        f"cd {tmp_path}/gone && rmdir ../gone && "
        f"{sys.executable} -m collc verify {tmp_path}/mine.py:f --mesh gpu=4"
    )
    run = subprocess.run(shell, shell=True, capture_output=True, text=True)
    assert run.returncode == 1 and f"step 0, {tmp_path}/mine.py:3: rank 4 is out" in run.stderr


def test_letters_that_the_terminal_lacks():
    run = subprocess.run(
        [*COMMAND, "list"], capture_output=True, env=environment(PYTHONIOENCODING="ascii")
    )
    assert run.returncode == 0, run.stderr
    run.stdout.decode("ascii")


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("width", [20, 50, 80])
def test_narrow_terminals(width):
    """No line is wider than the terminal, so that none is wrapped by it or cut."""
    import fcntl
    import pty
    import struct
    import termios

    code = """
from typer.testing import CliRunner
from collc.cli import app
for args in (["list"], ["list", "--mesh", "gpu=8"], ["show", "tree.all_reduce", "--mesh", "gpu=16"],
             ["verify", "hierarchical('host', 'gpu')", "--mesh", "host=4,gpu=8"],
             ["verify", "rnig", "--mesh", "gpu=4"]):
    app(args, standalone_mode=False)
"""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(TERM="xterm"),
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux says so at the end
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    run.wait(20)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert len(lines) > 60
    assert max(map(len, lines)) <= max(width, 40)
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for word in ("server.star", "7/4 S", "14 -> 15", "32/31", "Did you mean ring"):
        assert word in text, text
