"""The documentation runs: python blocks are executed, commands and their options exist."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
RUN_AS = """
import sys
source = open("page.py", encoding="utf-8").read()
exec(compile(source, sys.argv[1], "exec"), {"__name__": "page"})
"""
# Pages whose code compiles for GPU pods: with the extra of that name, and under the newest Python only.
PODS = {ROOT / "docs" / "pods.md"}
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w-]*)")


def blocks(text: str) -> list[tuple[str, int, list[str]]]:
    """The fenced blocks of a page: (language, number of its first line from 0, lines).

    >>> blocks("Hi\\n```python\\nx = 1\\n```\\n")
    [('python', 2, ['x = 1'])]
    """
    found, open_block = [], None
    for number, line in enumerate(text.splitlines()):
        fence = FENCE.match(line)
        if open_block is None:
            if fence:
                open_block = (fence[2], len(fence[1]), fence[3].lower(), number + 1, [])
        elif fence and fence[2].startswith(open_block[0]) and not fence[3]:
            found.append(open_block[2:])
            open_block = None
        else:
            open_block[4].append(line[open_block[1] :])
    assert open_block is None, f"the block opened in line {open_block[3]} is never closed"
    return found


def program(text: str) -> str:
    """A page's python blocks as one module, each statement on the line where the page has it."""
    lines: list[str] = []
    for language, start, body in blocks(text):
        if language == "python":
            lines += [""] * (start - len(lines)) + body
    return "\n".join(lines)


def files(text: str) -> dict[str, str]:
    """The files that a page shows: a line that is a name in backquotes and a colon, then a block.

    >>> files("`a.py`:\\n\\n```python\\nx = 1\\n```\\n")
    {'a.py': 'x = 1\\n'}
    """
    lines, found = text.splitlines(), {}
    for _, start, body in blocks(text):
        before = [line for line in lines[: start - 1] if line][-1:]
        if named := re.fullmatch(r"`([\w.]+)`:", "".join(before)):
            found[named[1]] = "\n".join(body) + "\n"
    return found


def consoles(text: str) -> list[tuple[str, str]]:
    """Each `$ command` of a page's console blocks, and what the page says it prints."""
    found = []
    for language, _, body in blocks(text):
        for command in "\n".join(body).split("$ ")[1:] if language == "console" else []:
            found.append(tuple(command.partition("\n")[::2]))
    return found


def commands(text: str) -> list[str]:
    """The commands of a page's shell blocks, without prompts, comments and what they print."""
    found = []
    for language, _, body in blocks(text):
        if language not in ("bash", "sh", "shell", "console"):
            continue
        for line in "\n".join(body).replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                continue  # output
            if line := line.removeprefix("$ ").strip():
                found.append(line)
    return found


def words(command: str) -> list[str]:
    """A command's words, without leading VAR=value, and "python -m collc" as "collc"."""
    split = shlex.split(command, comments=True)
    while split and re.match(r"^\w+=", split[0]):
        split.pop(0)
    if split[1:3] == ["-m", "collc"]:
        split = split[2:]
    return split


def environment() -> dict[str, str]:
    devices = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    return os.environ | devices | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(args: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        args, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_shows_code_and_the_two_commands():
    text = README.read_text(encoding="utf-8")
    assert any(language == "python" for language, _, _ in blocks(text)), (
        "README has no python block"
    )
    assert {"make demo", "make test"} <= {" ".join(words(c)) for c in commands(text)}


def runs(page: Path) -> Any:
    """A page as a parameter of a test that runs its code."""
    marks = [pytest.mark.newest_only] if page in PODS else []
    return pytest.param(page, marks=marks, id=page_id(page))


@pytest.mark.parametrize("page", [runs(page) for page in PAGES])
def test_python_blocks_run(page, tmp_path, request):
    source = program(page.read_text(encoding="utf-8"))
    if not source:
        return
    if page in PODS:
        request.getfixturevalue("pod")  # or skip
    for name, content in {"page.py": source, **files(page.read_text(encoding="utf-8"))}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    # Under the page's own name: a traceback, and inspect.getsource, then show the page's lines.
    done = run([sys.executable, "-c", RUN_AS, str(page)], tmp_path)
    assert done.returncode == 0, f"{page_id(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page, tmp_path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for command in commands(page.read_text(encoding="utf-8")):
        match words(command):
            case ["make", *rest]:
                named = [word for word in rest if "=" not in word and not word.startswith("-")]
                assert set(named) <= targets, (
                    f"{page_id(page)}: `{command}`: Makefile has no such target"
                )
            case ["collc", *rest]:
                assert_collc_knows(rest, f"{page_id(page)}: `{command}`")


@cache
def collc_help(*subcommand: str) -> tuple[int, str]:
    done = run([sys.executable, "-m", "collc", *subcommand, "--help"], ROOT)
    return done.returncode, done.stdout + done.stderr


def assert_collc_knows(rest: list[str], where: str) -> None:
    """The command has a help page, and that page has every option used; so has what it starts."""
    if "--" in rest:
        rest, started = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
        if started[:1] == ["collc"]:
            assert_collc_knows(started[1:], where)
    subcommand = rest[:1] if rest and not rest[0].startswith("-") else []
    status, text = collc_help(*subcommand)
    assert status == 0, f"{where}: {text[-2000:]}"
    for word in rest:
        option = word.split("=")[0]
        assert not option.startswith("--") or option in text, (
            f"{where}: no option {option} in its help"
        )


def shown(text: str) -> str:
    """Without blanks at the ends of lines, which a table has."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


# What "3. Break it" of write-a-schedule.md has its reader change.
BREAK = ("(c - t - 1) % n", "(c - t - 2) % n")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_console_blocks_print_what_they_say(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    for command, said in consoles(text):
        if words(command)[0] != "collc":
            continue
        fails = said.startswith("error: ")
        for name, content in files(text).items():
            assert not fails or BREAK[0] in content
            (tmp_path / name).write_text(
                content.replace(*BREAK) if fails else content, encoding="utf-8"
            )
        done = run([sys.executable, "-m", "collc", *words(command)[1:]], tmp_path)
        pattern = re.escape(shown(said)).replace(re.escape("..."), r"(?s:.*)")
        printed = shown(done.stdout + done.stderr)
        assert re.fullmatch(pattern, printed), f"{page_id(page)}: `{command}` prints\n{printed}"
        assert done.returncode == fails


def test_a_page_keeps_its_line_numbers():
    page = "Title\n\n```python\na = 1\n```\ntext\n~~~python\nb = 2\n~~~\n"
    assert program(page).splitlines()[3] == "a = 1"
    assert program(page).splitlines()[7] == "b = 2"


def test_commands_are_read_as_a_shell_would():
    page = """
```console
$ CI=1 make test  # all
3 passed
$ python -m collc list
```
```bash
collc show \\
  ring
```
"""
    found = [words(command) for command in commands(page)]
    assert found == [["make", "test"], ["collc", "list"], ["collc", "show", "ring"]]
