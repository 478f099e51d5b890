"""Flax models for demos, benchmarks and tests: one file or folder each; none imports collc."""
