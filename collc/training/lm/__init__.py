"""The run behind ``collc train``: a byte-level Transformer on Python's standard library."""
