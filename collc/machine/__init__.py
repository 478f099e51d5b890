"""Machines, prices and timelines: what a schedule costs where it will run. Without jax."""
