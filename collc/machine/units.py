"""Bytes, bandwidths and times as people write and read them."""

import math
import re
from fractions import Fraction

from collc.errors import DataError, MachineError

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "ns": 10**9}  # of them in a second
_FASTEST, _LONGEST = 1e18, 365 * 24 * 3600.0  # bytes a second, seconds
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"


def parse_size(text: str) -> int:
    """Bytes, with K, M, G or T for powers of 1024, as in nccl-tests. Raises DataError.

    >>> parse_size("4K"), parse_size("1.5M"), parse_size("64MiB"), parse_size("100")
    (4096, 1572864, 67108864, 100)
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(iB|B)?", text.strip(), re.I)
    if not found:
        raise DataError(f"{text!r} is no size. Write bytes as 4096, 4K, 4KiB or 1.5M.")
    number, unit, ending = found[1], found[2].upper(), (found[3] or "").lower()
    if unit and ending == "b":
        raise DataError(
            f"{text!r} means powers of 1000 to some and of 1024 to others. Write {number}{unit} or "
            f"{number}{unit}iB for the latter."
        )
    size = Fraction(number) * _BINARY[unit]
    if size.denominator > 1 or size < 1:
        raise DataError(f"{text!r} is {float(size):g} bytes. Give a whole number, 1 or more.")
    return int(size)


def show_size(size: int) -> str:
    """The size as ``parse_size`` reads it, as short as can be.

    >>> show_size(4096), show_size(1 << 20), show_size(1500)
    ('4K', '1M', '1500')
    """
    for unit, scale in reversed(_BINARY.items()):
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


def parse_bandwidth(text: str) -> float:
    """Bytes a second: ``450GB/s`` or, in bits, ``400Gb/s``; B and b differ. Raises MachineError.

    >>> parse_bandwidth("400Gb/s")
    50000000000.0
    """
    found = re.fullmatch(rf"{_NUMBER}\s*([KkMGT]?)(i?)([Bb])(?:/s|ps)", text.strip())
    if not found:
        raise MachineError(f"{text!r} is no bandwidth. Write 450GB/s, or in bits 400Gb/s.")
    scale = (_BINARY if found[3] else _DECIMAL)[found[2].upper()]
    value = float(found[1]) * scale / (8 if found[4] == "b" else 1)
    if value <= 0:
        raise MachineError(f"the bandwidth {text!r} is not positive: nothing would ever arrive.")
    if value > _FASTEST:
        raise MachineError(
            f"the bandwidth {text!r} is more than there is. Write 450GB/s, or 400Gb/s."
        )
    return value


def parse_time(text: str) -> float:
    """Seconds: ``5us``, ``120ms``, ``1.5s``, ``0s``. Raises MachineError.

    >>> parse_time("120ms"), parse_time("20us")
    (0.12, 2e-05)
    """
    found = re.fullmatch(rf"{_NUMBER}\s*(s|ms|us|[µμ]s|ns)", text.strip())
    if not found:
        raise MachineError(f"{text!r} is no time. Write 5us, 120ms or 1.5s.")
    value = float(found[1]) / _TIMES[found[2].replace("μ", "µ")]
    if value > _LONGEST:
        raise MachineError(f"the time {text!r} is more than a year. Write 5us, 120ms or 1.5s.")
    return value


def size(n: float) -> str:
    """Bytes, as one reads them.

    >>> size(1000), size(4 * 2**20), size(1.5 * 2**30)
    ('1000 B', '4 MiB', '1.5 GiB')
    """
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def bandwidth(bytes_per_second: float) -> str:
    """A bandwidth with three digits.

    >>> bandwidth(450e9), bandwidth(1 / (1 / 1e9))
    ('450 GB/s', '1 GB/s')
    """
    return _scaled(bytes_per_second, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def seconds(t: float) -> str:
    """A time with three digits.

    >>> seconds(1.5e-6), seconds(0.01234), seconds(0), seconds(float("inf"))
    ('1.5 us', '12.3 ms', '0 s', 'never')
    """
    if t == 0:
        return "0 s"
    if math.isinf(t):
        return "never"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(t) >= scale * 0.9995:
            return f"{_digits(t / scale)} {unit}"
    return f"{_digits(t / 1e-9)} ns"


def _scaled(n: float, base: int, units: tuple[str, ...]) -> str:
    scale = 0
    while n >= base * 0.9995 and scale < len(units) - 1:
        n, scale = n / base, scale + 1
    return f"{n:.0f} {units[0]}" if not scale else f"{_digits(n)} {units[scale]}"


def _digits(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 999.5 else f"{x:.3g}"
