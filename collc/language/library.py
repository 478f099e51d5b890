"""Where schedules are found by name: the modules of ``collc.schedules``, of packages, and files.

A package brings its own schedules with an entry point in the group ``collc.schedules``, whose name
is the module's short name and whose value the module.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from types import FunctionType, ModuleType

from collc.errors import CollcError, ScheduleError, nearest
from collc.language.algebra import Leaf, Order, Pass, Schedule
from collc.language.foreign import line_in, said, shown
from collc.language.leaves import Family

Named = Schedule | Family | Order


def name_schedules(module: ModuleType) -> None:
    """Gives each composite schedule of a module the name under which it stands there, once."""
    short = module.__name__.rpartition(".")[2]
    for attribute, value in vars(module).items():
        if isinstance(value, Schedule) and value.name is None and not isinstance(value, Leaf):
            object.__setattr__(value, "name", f"{short}.{attribute}")


@functools.cache
def modules() -> dict[str, ModuleType]:
    """All schedule modules by their short names, collc's own first."""
    package = importlib.import_module("collc.schedules")
    found = {
        info.name: importlib.import_module(f"collc.schedules.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
    }
    for entry in importlib.metadata.entry_points(group="collc.schedules"):
        if entry.name in found:
            raise ScheduleError(
                f"the entry point {entry.name} = {entry.value} has the name of another schedule "
                "module. Rename it."
            )
        try:
            found[entry.name] = entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            raise ScheduleError(
                f"the schedules {entry.name} = {entry.value}, which an installed package brings, cannot "
                f"be loaded: {said(e)}. Mend that package or remove it."
            ) from e
        short = found[entry.name].__name__.rpartition(".")[2]
        if short != entry.name:
            raise ScheduleError(
                f"the entry point {entry.name} = {entry.value} has another name than its module, after "
                f"which its schedules print. Call the entry point {short}."
            )
        name_schedules(found[entry.name])
    return found


def contents(module: ModuleType) -> dict[str, Named]:
    """The schedules, families and orders that a module defines, by attribute."""
    short = module.__name__.rpartition(".")[2]
    return {
        attribute: value
        for attribute, value in vars(module).items()
        if isinstance(value, Schedule | Family | Order)
        and str(value.name).partition("(")[0] in (f"{short}.{attribute}", attribute)
    }


@functools.cache
def passes() -> dict[str, type[Pass]]:
    """The passes that a text may name, as in ``through(Pipeline(4))``."""
    module = importlib.import_module("collc.analysis.passes")
    return {name: getattr(module, name) for name in module.__all__}


def lookup(name: str) -> Named:
    """What ``ring.all_reduce`` or ``hierarchical`` means. Raises ScheduleError for unknown names."""
    short, _, attribute = name.partition(".")
    if short not in modules():
        raise ScheduleError(f"there is no schedule module {short!r}. {nearest(short, modules())}")
    here = contents(modules()[short])
    attribute = attribute or short
    if attribute not in here:
        known = [f"{short}.{a}" if a != short else short for a in here]
        if name == short and known:
            raise ScheduleError(
                f"{name} is a module: {', '.join(known)}. Name one of its schedules."
            )
        raise ScheduleError(f"there is no schedule {name!r}. {nearest(name, known)}")
    return here[attribute]


def find(source: str) -> Schedule:
    """A schedule by name, as an expression, or as either after ``path/to/file.py:``.

    There the names of the file come first. Raises ScheduleError.
    """
    from collc.language.parse import parse

    path, colon, text = source.rpartition(".py:")
    if not colon:
        if ":" in source or source.endswith(".py"):
            raise ScheduleError(
                f"{shown(source)}: a schedule file ends in .py, and after a colon stands which of "
                "its schedules: path/to/file.py:name."
            )
        return parse(source)
    path = Path(f"{path}.py")
    here = vars(load(path))
    # Also what the file makes of others: `mine = server.shards(4)` keeps its name but stands here.
    own = {k: v for k, v in here.items() if isinstance(v, Named)}

    def meaning(name: str) -> Named:
        if name in own:
            return own[name]
        found = here.get(name)
        plain = name in here and not isinstance(found, ModuleType)
        if "." in name or (name in modules() and not plain):
            return lookup(name)
        if isinstance(found, FunctionType):
            raise ScheduleError(
                f"{name} is a function without a decorator. Say above it which collective it is, "
                "as in @cl.all_reduce."
            )
        if plain:
            raise ScheduleError(f"{name} is {shown(found)}, which is no schedule.")
        raise ScheduleError(f"it defines no schedule {name!r}. {nearest(name, own)}")

    try:
        return parse(text, lookup=meaning)
    except ScheduleError as e:
        raise ScheduleError(f"{path}: {e}") from e


def load(path: Path) -> ModuleType:
    """The module of a schedule file, its schedules named after it. Raises ScheduleError."""
    if not os.path.isfile(path):
        raise ScheduleError(f"there is no schedule file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader and spec.origin
    module = importlib.util.module_from_spec(spec)
    hidden = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        line = line_in(spec.origin, e) or (isinstance(e, SyntaxError) and e.lineno) or 1
        what = str(e) if isinstance(e, CollcError) else said(e)
        raise ScheduleError(f"{path}:{line}: {what}") from e
    finally:
        # Nothing else of that name is to be shadowed by a file that only happens to bear it.
        if hidden is not None:
            sys.modules[path.stem] = hidden
        else:
            sys.modules.pop(path.stem, None)
    name_schedules(module)
    return module
