"""How receipts write numbers and lay out columns."""

from rich.table import Table


def grid(*justify: str) -> Table:
    """A table without lines or titles, whose columns are as wide as their text."""
    made = Table.grid(padding=(0, 2, 0, 0))
    for side in justify:
        made.add_column(justify="right" if side == "right" else "left", overflow="fold")
    return made


def flops(n: float) -> str:
    """FLOPs, as one reads them.

    >>> flops(0), flops(1500), flops(2.5e12)
    ('0 FLOP', '1.5 kFLOP', '2.5 TFLOP')
    """
    for unit in ("", "k", "M", "G", "T", "P"):
        if n < 1000 or unit == "P":
            return f"{n:.1f} {unit}FLOP" if unit else f"{n:.0f} FLOP"
        n /= 1000
    raise AssertionError
