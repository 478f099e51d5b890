"""The name by which `fitting/shares.py` still knows `clock`."""

from collc.training.fitting.progress import clock as clock
