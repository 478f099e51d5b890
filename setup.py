"""Where the packages are. All metadata is in pyproject.toml, which cannot say "find, then rename".

The folders schedules/ and models/ stand at the top of the repository, for people, and ship as
collc.schedules and collc.models: the wheel owns no top-level name but collc.
"""

from setuptools import find_packages, setup

HOMES = {"collc": "collc", "collc.schedules": "schedules", "collc.models": "models"}


def packages() -> list[str]:
    """Every folder with an __init__.py under the three homes, by the name that it ships under."""
    found = []
    for name, home in HOMES.items():
        found += [name, *(f"{name}.{inner}" for inner in find_packages(home))]
    return found


setup(packages=packages(), package_dir=HOMES)
