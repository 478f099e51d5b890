"""Why one schedule is quicker than another on a machine, and what would make the other one win."""

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from collc.language.algebra import Schedule
from collc.machine import nccl
from collc.machine.price import Price, price
from collc.machine.topology import NETWORK, Machine
from collc.machine.units import bandwidth, seconds
from collc.planning.curves import PLAIN, Costs

FARTHEST = 100.0  # times as slow or fast: what does not help within that is said not to help
_HALVINGS = 24  # of a factor of 100: to seven digits
_KNOBS = {
    "launch": "a launch",
    "inside": "links inside nodes",
    "network": "NICs",
}


@dataclass(frozen=True, eq=False)
class Side:
    """A schedule and its price at one size.

    ``terms``: what its lowered seconds are made of: latencies, bytes by class of link, additions.
    """

    schedule: Schedule
    price: Price

    @property
    def terms(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in self.price.rows:
            each = row.lowered
            over = f"bytes over {row.kind}" if row.kind and not row.how else "bytes"
            for name, t in (("latency", each.latency), (over, each.bytes), ("adding", each.adding)):
                if t:
                    found[name] = found.get(name, 0.0) + row.steps * t
        return found

    @property
    def rounds(self) -> int:
        return sum(row.steps * row.rounds for row in self.price.rows)

    @property
    def how(self) -> str:
        """What XLA's own does in it."""
        ways = dict.fromkeys(row.how for row in self.price.rows if row.how)
        return ", ".join([*ways, *(["in-network"] if self.price.in_network else [])])


def side(costs: Costs, schedule: Schedule, size: int) -> Side:
    """A schedule at a size."""
    return Side(schedule, price(schedule, costs.placement, size))


def times(one: float, other: float) -> float:
    """How many times as long one takes as the other; 1 where neither takes time."""
    return one / other if other else (math.inf if one else 1.0)


def predicted(own: Side) -> str:
    """``412 us lowered, abstract unknown (nvls Simple, in-network)``."""
    abstract = own.price.abstract
    known = "abstract unknown" if abstract is None else f"{seconds(abstract)} abstract"
    how = f" ({own.how})" if own.how else ""
    return f"{seconds(own.price.lowered)} lowered, {known}{how}"


def why(quick: Side, slow: Side, names: tuple[str, str]) -> str:
    """What each one's time is made of, and which of it makes most of the difference."""
    parts = [_made_of(own, name) for own, name in zip((quick, slow), names, strict=True)]
    both = {**_sums(slow), **_sums(quick)}
    gaps = {k: _sums(slow).get(k, 0.0) - _sums(quick).get(k, 0.0) for k in both}
    most = max(gaps, key=lambda k: (gaps[k], k), default="")
    if most and gaps[most] > 0:
        parts.append(f"most of the difference: {most} (+{seconds(gaps[most])})")
    return "; ".join(parts)


def _made_of(own: Side, name: str) -> str:
    terms = own.terms
    if not terms:
        return f"{name} takes no time"
    launches = f" of {own.rounds} {'launch' if own.rounds == 1 else 'launches'}"
    total = sum(terms.values())
    each = (
        f"{k}{launches if k == 'latency' and own.rounds else ''} {seconds(t)}"
        for k, t in terms.items()
        if t >= total / 100
    )
    bottleneck = max(terms, key=lambda k: (terms[k], k))
    return f"{name} takes {', '.join(each)} (bottleneck: {bottleneck})"


def _sums(own: Side) -> dict[str, float]:
    """The terms with bytes of all classes together: XLA's own are not told apart by class."""
    found: dict[str, float] = {}
    for name, t in own.terms.items():
        key = "launches and latency" if name == "latency" else name.split()[0]
        found[key] = found.get(key, 0.0) + t
    return found


# ---- what would have to change ------------------------------------------------------------------


def change(
    costs: Costs, quick: Schedule, slow: Schedule, size: int, error: float, names: tuple[str, str]
) -> str:
    """What alone would make the slower one beat the other, by more than the model's error.

    A third one may be quicker still then. ``names``: what the two are called, the slower one last.
    """
    machine = costs.placement.machine
    found, not_found = [], []
    for knob, what in _KNOBS.items():
        if knob == "network" and machine.nodes == 1:
            continue
        if knob == "inside" and machine.node.devices == 1:
            continue
        said = [_said(machine, knob, f) for f in _needed(costs, quick, slow, size, error, knob)]
        if said:
            found.append(" or ".join(said))
        else:
            not_found.append(what)
    beats = f"{names[1]} would beat {names[0]} by more than {error:.0%}"
    none = f"no change of {', '.join(not_found)} by up to {FARTHEST:.0f} times does it"
    if not found:
        return f"{beats} by nothing that was tried: {none}"
    return f"{beats} if {'; or if '.join(found)}{'; ' + none if not_found else ''}"


def _needed(
    costs: Costs, quick: Schedule, slow: Schedule, size: int, error: float, knob: str
) -> Iterator[float]:
    """The nearest factors, below 1 and above, from which on the slower one wins."""

    def wins(log: float) -> bool:
        speeds = replace(PLAIN, **{knob: math.exp(log)})
        return costs.of(slow, size, speeds) * (1 + error) < costs.of(quick, size, speeds)

    for end in (-math.log(FARTHEST), math.log(FARTHEST)):
        if wins(end):
            yield math.exp(_bisected(wins, 0.0, end))


def _bisected(wins: Callable[[float], bool], no: float, yes: float) -> float:
    for _ in range(_HALVINGS):
        middle = (no + yes) / 2
        no, yes = (no, middle) if wins(middle) else (middle, yes)
    return yes


def _said(machine: Machine, knob: str, factor: float) -> str:
    if knob == "launch":
        now = nccl.constants(machine).launch
        way = "under" if factor < 1 else "over"
        return (
            f"a launch took {way} {seconds(now * factor)} (now {seconds(now)}), with NCCL's hops in "
            "proportion and XLA's own as they are"
        )
    what, now = ("links inside nodes", _inside(machine))
    if knob == "network":
        what, now = ("NICs", [1 / x.beta for x in machine.node.links if x.kind == NETWORK])
    way, many = ("slower", 1 / factor) if factor < 1 else ("faster", factor)
    rates = sorted({float(f"{x:.6g}") for x in now})
    rate = f" (now {bandwidth(rates[0])})" if len(rates) == 1 else ""
    return f"{what} were {many:.3g} times {way}{rate}"


def _inside(machine: Machine) -> list[float]:
    routes = machine.node.within
    return [1 / machine.node.links[i].beta for i in set(routes[routes >= 0].tolist())]


# ---- in lines -----------------------------------------------------------------------------------


def wrapped(text: str, indent: int, width: int = 100) -> list[str]:
    """The text in lines, later ones indented further."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def against(
    costs: Costs, own: Side, other: Side, size: int, error: float, names: tuple[str, str]
) -> list[str]:
    """Lines about another schedule beside one's own: how long it takes, why, what would change that.

    ``names``: what the two are called.
    """
    ratio = times(other.price.lowered, own.price.lowered)
    lines = wrapped(f"{names[1]}: {other.schedule}", 2)
    lines += wrapped(f"{predicted(other)}: {judged(ratio, error)}", 4)
    quick, slow = (own, other) if ratio >= 1 else (other, own)
    called = names if ratio >= 1 else (names[1], names[0])
    lines += wrapped(f"why: {why(quick, slow, called)}", 4)
    if tied(ratio, error):  # then one's own was taken all the same
        told = change(costs, own.schedule, other.schedule, size, error, names)
    else:
        told = change(costs, quick.schedule, slow.schedule, size, error, called)
    return lines + wrapped(f"change: {told}", 4)


def judged(ratio: float, error: float) -> str:
    """How a time is to another one: so many times as long, or a tie."""
    if tied(ratio, error):
        return f"tie (within the model's error of {error:.0%})"
    return f"{ratio:.3g} times as long" if ratio > 1 else f"{1 / ratio:.3g} times as quick"


def tied(ratio: float, error: float) -> bool:
    """Whether two times differ by no more than the model's error."""
    return 1 / (1 + error) <= ratio <= 1 + error
