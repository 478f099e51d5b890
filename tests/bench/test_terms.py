"""Sizes, dtypes and bus bandwidth, as nccl-tests has them."""

from fractions import Fraction

import pytest

from collc.bench.terms import bus_factor, counts, lengths, parse_dtype, swept
from collc.errors import DataError
from collc.machine.units import parse_size, show_size


@pytest.mark.parametrize(
    "text, size",
    [
        ("4096", 4096), ("4K", 4096), ("4k", 4096), ("4KiB", 4096), ("1M", 1 << 20),
        ("1MiB", 1 << 20), ("1.5m", 3 << 19), ("2G", 2 << 30), ("1T", 1 << 40), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes_are_read(text, size):
    assert parse_size(text) == size
    assert parse_size(show_size(size)) == size


@pytest.mark.parametrize(
    "text, needed",
    [
        ("4KB", "4K or 4KiB"), ("4X", "is no size"), ("", "is no size"), ("-4K", "is no size"),
        ("0", "whole number, 1 or more"), ("0.3K", "307.2 bytes"), ("1e6", "is no size"),
    ],
)  # fmt: skip
def test_what_is_no_size(text, needed):
    with pytest.raises(DataError, match=needed):
        parse_size(text)


def test_sweeps():
    assert swept(8, 128, 2) == [8, 16, 32, 64, 128]
    assert swept(4096, 20000) == [4096, 16384]
    assert swept(100, 100) == [100]
    assert swept(4, 8, 1e308) == [4]
    assert swept(10, 40, step=15) == [10, 25, 40]
    assert swept(1, 4, 1.1) == [1, 2, 3, 4], "every size is larger than the last"


@pytest.mark.parametrize(
    "begin, end, how, needed",
    [
        (4096, 1024, {}, "begin at 4K and end at 1K, which is less. End at 4K or more"),
        (1, 2, {"factor": 1}, "Give one above 1"),
        (1, 2, {"factor": float("nan")}, "Give one above 1"),
        (1, 2, {"step": 0}, "Give 1 or more"),
        (1, 1 << 40, {"step": 1}, "more than 1000 sizes"),
    ],
)
def test_sweeps_that_cannot_be(begin, end, how, needed):
    with pytest.raises(DataError, match=needed):
        swept(begin, end, **how)


def test_sizes_are_rounded_down():
    assert counts("all_reduce", [4096, 4099, 5000], 3, "float32") == [1024, 1250]
    assert counts("all_gather", [4096], 3, "float32") == [1023], "whole chunks"
    assert counts("broadcast", [1], 3, "int8") == [1]
    with pytest.raises(DataError, match=r"one bfloat16 for each of 3 ranks. Begin at 6 or more"):
        counts("all_to_all", [5], 3, "bfloat16")
    with pytest.raises(DataError, match=r"one float32. Begin at 4 or more"):
        counts("all_reduce", [3], 3, "float32")


def test_lengths():
    assert lengths("all_gather", 12, 4) == (3, 12)
    assert lengths("reduce_scatter", 12, 4) == (12, 3)
    assert lengths("all_to_all", 12, 4) == lengths("all_reduce", 12, 4) == (12, 12)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 4096])
def test_bus_bandwidth(n):
    """2(n - 1)/n for all-reduce, (n - 1)/n where the buffer is cut, 1 for broadcast."""
    assert bus_factor("all_reduce", n) == Fraction(2 * (n - 1), n)
    for cut in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(cut, n) == Fraction(n - 1, n)
    assert bus_factor("broadcast", n) == 1


def test_dtypes():
    assert [parse_dtype(d) for d in ("half", "float", "double", "bfloat16", "int8")] == [
        "float16", "float32", "float64", "bfloat16", "int8",
    ]  # fmt: skip
    with pytest.raises(DataError, match="Did you mean float32"):
        parse_dtype("flot32")
