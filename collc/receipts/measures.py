"""How receipts write numbers and lay out columns."""

from collections.abc import Sequence

from rich.table import Table


def grid(*justify: str) -> Table:
    """A table without lines or titles, whose columns are as wide as their text."""
    made = Table.grid(padding=(0, 2, 0, 0))
    for side in justify:
        made.add_column(justify="right" if side == "right" else "left", overflow="fold")
    return made


def size(n: float) -> str:
    """Bytes, as one reads them.

    >>> size(1000), size(4 * 2**20), size(3 * 2**30)
    ('1000 B', '4.0 MiB', '3.0 GiB')
    """
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops(n: float) -> str:
    """FLOPs, as one reads them.

    >>> flops(0), flops(1500), flops(2.5e12)
    ('0 FLOP', '1.5 kFLOP', '2.5 TFLOP')
    """
    return _scaled(n, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    scale = 0
    while n >= base and scale < len(units) - 1:
        n, scale = n / base, scale + 1
    return f"{n:.1f} {units[scale]}" if scale else f"{n:.0f} {units[0]}"
