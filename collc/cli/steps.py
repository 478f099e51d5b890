"""A step in a file, ``path.py:function``, and its arguments as shapes, from a factory beside it."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from collc.errors import CollcError, DataError, StepError, nearest
from collc.language.foreign import line_in, said, shown

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Source:
    """A function of a file. ``name``: of the function."""

    path: Path
    name: str
    module: ModuleType
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def signature(self) -> inspect.Signature:
        """What the function takes."""
        return inspect.signature(self.function)


@contextmanager
def blamed(path: Path, doing: str) -> Iterator[None]:
    """What the file's code raises in the block becomes a StepError, with the line to blame.

    Errors of collc pass through: they say where and what themselves.
    """
    try:
        yield
    except (CollcError, KeyboardInterrupt):
        raise
    except BaseException as e:  # also SystemExit
        line = line_in(_absolute(path), e)
        if isinstance(e, SyntaxError) and e.filename == _absolute(path):
            line = e.lineno or 0
        where = f"{path}:{line}" if line else f"{path}"
        raise StepError(f"{where}: {doing}: {said(e)}") from e


def named(step: str) -> tuple[Path, str]:
    """The file and the function of ``path.py:function``. Raises StepError where there is no file."""
    file, _, name = step.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not name.isidentifier():
        raise StepError(
            f"{shown(step)} names no step. Write path/to/file.py:function, or a model with its size, "
            "as transformer:medium."
        )
    if not path.is_file():
        raise StepError(f"there is no file {path}. Check its path.")
    return path, name


@contextmanager
def loaded(step: str) -> Iterator[Source]:
    """The function that ``path.py:function`` names.

    In the block, modules beside the file can be imported, as if Python ran it. Raises StepError.
    """
    path, name = named(step)
    folder, hidden = str(path.resolve().parent), sys.modules.get(path.stem)
    sys.path.insert(0, folder)
    try:
        module = _run(path)
        yield Source(path, name, module, _function(path, name, module))
    finally:
        sys.path.remove(folder)
        sys.modules.pop(path.stem, None)
        if hidden is not None:
            sys.modules[path.stem] = hidden


def _absolute(path: Path) -> str:
    return str(path.absolute())


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, _absolute(path))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look for their module there
    with blamed(path, "it cannot be loaded"):
        spec.loader.exec_module(module)
    return module


def _function(path: Path, name: str, module: ModuleType) -> Callable[..., Any]:
    own = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
    if name not in vars(module):
        here = [k for k, v in own.items() if getattr(v, "__module__", "") == module.__name__]
        raise StepError(f"{path} has no function {name!r}. {nearest(name, here)}")
    found = vars(module)[name]
    if not callable(found) or isinstance(found, type):
        raise StepError(f"{path}: {name} is {shown(found)}, but a step is a function.")
    return found


# ---- shapes ---------------------------------------------------------------------------------------


def arguments(source: Source, factory: str | None, mesh: "Mesh") -> dict[str, Any]:
    """The step's arguments by name, as the factory beside it makes them.

    ``factory``: its name; by default ``<function>_shapes`` or ``shapes``. It takes the mesh, or
    nothing. Raises StepError, and DataError for arguments that are not the step's.
    """
    name, make = _factory(source, factory)
    with blamed(source.path, f"{name} cannot make the shapes"):
        takes = _takes_mesh(source.path, name, make)
        made = make(mesh) if takes else make()
    return _bound(source, name, made)


def _factory(source: Source, name: str | None) -> tuple[str, Callable[..., Any]]:
    names = (name,) if name is not None else (f"{source.name}_shapes", "shapes")
    for each in names:
        found = vars(source.module).get(each)
        if callable(found):
            return each, found
        if found is not None:
            raise StepError(f"{source.path}: {each} is {shown(found)}, not a function.")
    if name is not None:
        known = [k for k, v in vars(source.module).items() if inspect.isfunction(v)]
        raise StepError(f"--shapes: {source.path} has no function {name!r}. {nearest(name, known)}")
    raise StepError(
        f"{source.path} does not say which shapes {source.name} takes. Write beside it a function "
        f"{names[0]}(mesh) that returns the arguments by name, as jax.ShapeDtypeStructs; or name "
        "another one with --shapes."
    )


def _takes_mesh(path: Path, name: str, make: Callable[..., Any]) -> bool:
    parameters = inspect.signature(make).parameters.values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in parameters if p.name in needed):
        raise StepError(
            f"{path}: {name} needs {', '.join(needed)}, but it is called with the mesh alone, or with "
            "nothing. Give the others defaults."
        )
    return bool(needed) or any(p.name == "mesh" for p in parameters)


def _bound(source: Source, factory: str, made: Any) -> dict[str, Any]:
    where, signature = f"{source.path}: {factory}", source.signature
    if isinstance(made, Mapping):
        given = dict(made)
        unknown = [name for name in given if name not in signature.parameters]
        if unknown and not _takes_any(signature):
            raise DataError(
                f"{where} gives {unknown[0]!r}, which is no argument of {source.name}{signature}. "
                f"{nearest(str(unknown[0]), signature.parameters)}"
            )
    elif isinstance(made, tuple | list):
        try:
            given = dict(signature.bind_partial(*made).arguments)
        except TypeError as e:
            raise DataError(
                f"{where} gives {len(made)} arguments, but the step is {source.name}{signature}: {e}."
            ) from None
    else:
        raise DataError(
            f"{where} returns {shown(made)}, but has to return the arguments of {source.name}: a dict "
            "by name, or a tuple in their order."
        )
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in given
    ]
    if missing:
        raise DataError(
            f"{where} does not give {', '.join(missing)}, which {source.name}{signature} needs."
        )
    return given


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def called(source: Source, given: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The positional and the keyword arguments of a call."""
    own = {k: v for k, v in given.items() if k in source.signature.parameters}
    rest = {k: v for k, v in given.items() if k not in own}
    bound = inspect.BoundArguments(source.signature, own)
    return bound.args, {**bound.kwargs, **rest}
