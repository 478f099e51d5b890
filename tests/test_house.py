"""The house rules that a machine can check."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import collc

ROOT = Path(__file__).parents[1]
HOMES = ("collc", "schedules", "models")
SKIPPED = {".git", ".venv", "build", "dist", "runs", "shared"}


def files() -> list[Path]:
    """What git tracks or would track; without git, all that is no build leftover."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
    return [
        ROOT / name
        for name in names
        if not SKIPPED & set(name.parts)
        and not any(part.endswith((".egg-info", "cache", "__")) for part in name.parts[:-1])
        and (ROOT / name).is_file()
    ]


def python_files() -> list[Path]:
    found = [path for path in files() if path.suffix == ".py"]
    assert len(found) >= 40, f"only {len(found)} python files: the test looks in the wrong place"
    return found


def test_files_stay_readable():
    long = {
        str(p): n
        for p in python_files()
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long, f"more than 600 lines, split them: {long}"


def test_no_file_names_a_package_index():
    """Where packages come from is the installer's setting; an address would bypass or break it."""
    ends = (b"pypi.", b"pythonhosted.", b"npmjs.", b"debian.")  # in pieces: this file is read too
    hosts = [name + b"org" for name in ends]
    named = [str(path) for path in files() if any(host in path.read_bytes() for host in hosts)]
    assert not named, f"these files name the host of a package index: {named}"


def test_packages_are_packages_and_say_what_they_hold():
    for home in HOMES:
        folders = {path.parent for path in python_files() if path.is_relative_to(ROOT / home)}
        assert folders, f"{home} holds no python file"
        for folder in folders:
            init = folder / "__init__.py"
            assert init.exists(), (
                f"{folder} has modules but no __init__.py: it would be missing from the wheel"
            )
            assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), (
                f"{init} has no docstring"
            )


def test_project_data_agrees():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == collc.__version__
    assert project["scripts"] == {"collc": "collc.cli:main"}
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in lock
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for requirement in wanted:
        name = re.match(r"[\w-]+", requirement)[0]
        assert re.search(rf"^{name}==", lock, re.M), (
            f"{name} is not in requirements.lock: run make lock"
        )


def test_the_wheel_owns_one_name(tmp_path):
    """Built from a copy, since setuptools leaves its build folder beside the sources."""
    shipped = [
        path.relative_to(ROOT) for path in files() if path.relative_to(ROOT).parts[0] in HOMES
    ]
    for name in (*shipped, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    built = subprocess.run(
        [*pip, *options, str(tmp_path / "source")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"collc-{collc.__version__}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"collc", info}
    assert "collc = collc.cli:main" in entry_points
    assert "collc/py.typed" in names
    expected = {p.as_posix() if p.parts[0] == "collc" else f"collc/{p.as_posix()}" for p in shipped}
    assert expected <= names, f"not in the wheel: {sorted(expected - names)}"
