"""Collective schedules, one file for each algorithm. They import ``collc.language`` and NumPy only."""

import importlib
import pkgutil

from collc.language.library import name_schedules

for _info in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_info.name}")
    name_schedules(_module)
    globals()[_info.name] = _module
