"""The report: what wins on which link, what the wire alone takes, and what crossed it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import numpy as np
from numpy.typing import NDArray

from hosts.names import AGAIN, PSUM, STEP

PROMISED, FROM = 1.05, 1 << 20  # counted to the account, from this many bytes per device
# A full segment at an MTU of 1500 with TCP's time stamps, headers and Ethernet's frame: to its data.
FRAMED = 1514 / 1448
WAYS = ("received", "sent")
UPPER = 0.75  # the quantile of a plan's turns that has to beat psum too
SETTING = (
    "4 hosts of 2 devices each: network namespaces of one machine, each with a link to a switch.",
    "A token bucket (`tc tbf`) holds the rate of a link in both directions; all devices talk by gloo.",
    "A plan is named by what it takes for gpu, within a host, and for host, between hosts; *psum* is",
    "`lax.psum` over both axes at once. The all-reduces are of float32, the sizes those of a device's",
    "buffer. The train step is the language model's, with gradients of 2.5 MiB and one example of 64",
    "bytes for each device. All take turns, and all hosts begin together. They share the machine's",
    "cores, so sums, copies and sockets take longer than on 4 machines, and weigh the more, the faster",
    "the link.",
)
READING = (
    "S being a device's buffer, a flat ring, psum's too, sends 7/4 S over each link, and plans of two",
    "levels that are optimal in bytes 3/2 S: where the wire decides they take at least 0.86 of psum's",
    "time, and what wins more wins by fewer or cheaper rounds. The best of many in a few turns looks",
    "better than it is: a plan *wins* only where it is further from 1 than psum from itself, and the",
    "upper quartile of its turns is below 1 too; else it is *within noise*.",
)
BYTES = (
    "*Account*: the bytes that cross the busiest link in its busier direction, by the receipt of the",
    "compiled program: permute by permute, while gloo's own all-reduce counts as a ring through the",
    "hosts. *Wire*: what that takes at the link's rate, with the headers of an MTU of 1500; it is a",
    "lower bound, but for 32 KiB that a link lets pass at once after a pause. *Counted*: what the",
    "interface counted there. *Counted to account*: the least and the most of all links and directions.",
    "An interface counts one header for a packet of up to 16 KiB, as a host hands it to a network card",
    "that cuts it; the token bucket counts one for each segment.",
)


@dataclass(frozen=True)
class Row:
    """A program on links of one rate. ``seconds``: of every turn, of the slowest host, [turns].

    ``account``, ``counted``: bytes that cross each link in one call, [2, hosts]: received, sent.
    """

    rate: str
    job: str
    name: str
    seconds: NDArray[np.float64]
    account: NDArray[np.float64]
    counted: NDArray[np.float64]
    bits_per_s: float

    @property
    def ms(self) -> float:
        return 1000 * float(np.median(self.seconds))

    @property
    def wire_ms(self) -> float:
        """What the busiest link takes for its bytes in one direction, headers included."""
        return 8000 * FRAMED * float(self.account.max()) / self.bits_per_s

    @property
    def ratios(self) -> NDArray[np.float64]:
        """Counted to account, of each link and direction that the account says is used."""
        used = self.account > 0
        return self.counted[used] / self.account[used]


def rows(found: Mapping[str, Any], rates: Mapping[str, float]) -> Iterator[Row]:
    """``found``: by rate, what the process of each host answered."""
    for rate, answers in found.items():
        for job, first in answers[0].items():
            for name, account in first["account"].items():
                times = [answer[job]["times"][name] for answer in answers]
                yield Row(
                    rate, job, name,
                    np.max([own["seconds"] for own in times], axis=0),
                    np.array([account[way] for way in WAYS]),
                    np.array([[np.median(own[way]) for own in times] for way in WAYS]),
                    rates[rate],
                )  # fmt: skip


def report(found: Mapping[str, Any], rates: Mapping[str, float], turns: int) -> list[str]:
    every = list(rows(found, rates))
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in every:
        groups.setdefault((row.rate, row.job), {})[row.name] = row
    unlike = sorted(
        {n for answers in found.values() for job in answers[0].values() for n in job["unlike"]}
    )
    lines = [
        *common.prose(*SETTING),
        "",
        *common.prose(
            f"*Ms*: the median of {turns} turns, at 16 MiB of a third as many, of the slowest host. *To",
            f"psum*: the median over the turns of its time to that of psum. *{AGAIN}* is the very same",
            "program under another name: a ratio that is no further from 1 says nothing.",
        ),
        "",
        *common.prose(*BYTES),
        "",
        *common.table(["promise", "measured", "at most", ""], promises(every, unlike)),
        "",
        "## What wins where",
        "",
        *common.table(
            [
                "link", "what", "best", "ms", "to psum", "upper quartile", "wire of the best, ms",
                "psum, ms", "psum again", "the best",
            ],
            [
                [rate, what(job), *winner(own), own[PSUM].ms, to_psum(own, AGAIN), says(own)]
                for (rate, job), own in groups.items()
            ],
        ),
    ]  # fmt: skip
    lines += ["", *common.prose(*READING)]
    if unlike:
        lines += ["", f"The receipt is not the plan of: {', '.join(unlike)}."]
    for (rate, job), own in groups.items():
        lines += ["", f"## {what(job)}, {rate}", "", *details(own)]
    return lines


def promises(every: Sequence[Row], unlike: Sequence[str]) -> list[list[Any]]:
    large = [row.ratios for row in every if row.job == STEP or int(row.job) >= FROM]
    worst = round(max(float(max(r.max(), 1 / r.min())) for r in large), 3)
    bytes_ = "counted to account, or the reverse, at 1 MiB and more and in the train step"
    alike = "programs whose receipt is not their plan"
    return [
        [bytes_, worst, PROMISED, common.verdict(worst, PROMISED)],
        [alike, len(unlike), 0, common.verdict(len(unlike), 0)],
    ]


def what(job: str) -> str:
    return "train step" if job == STEP else f"all-reduce of {common.shown(int(job))}"


def to_psum(own: Mapping[str, Row], name: str, quantile: float = 0.5) -> float:
    """Of the turns' ratios of its time to psum's, the median or another quantile."""
    return float(np.quantile(own[name].seconds / own[PSUM].seconds, quantile))


def winner(own: Mapping[str, Row]) -> list[Any]:
    best = min((n for n in own if n != AGAIN), key=lambda name: to_psum(own, name))
    ratios = to_psum(own, best), to_psum(own, best, UPPER)
    return [best, own[best].ms, *ratios, own[best].wire_ms]


def says(own: Mapping[str, Row]) -> str:
    """Whether the best beats psum: by more than psum differs from itself, and in most turns."""
    best, _, ratio, upper, _ = winner(own)
    if best == PSUM:
        return "is psum"
    beyond = abs(np.log(ratio)) > abs(np.log(to_psum(own, AGAIN)))
    return "wins" if beyond and upper < 1 else "within noise"


def details(own: Mapping[str, Row]) -> list[str]:
    made = []
    for name in sorted(own, key=lambda name: to_psum(own, name)):
        row = own[name]
        at = np.unravel_index(int(row.account.argmax()), row.account.shape)
        made.append(
            [
                name, row.ms, to_psum(own, name), row.wire_ms, mib(row.account[at]),
                mib(row.counted[at]), f"{row.ratios.min():.3f} to {row.ratios.max():.3f}",
            ]
        )  # fmt: skip
    header = ["plan", "ms", "to psum", "wire, ms", "account, MiB", "counted, MiB"]
    return common.table([*header, "counted to account"], made)


def mib(count: float) -> str:
    return f"{count / 2**20:.3f}"
