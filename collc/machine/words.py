"""The text of a machine, taken apart; ``collc.machine.text`` says what it means.

machine ::= source? word*                   separated by blanks
source  ::= name | file ; files and a GPU model joined with + ; then optionally :HOSTS
word    ::= gpus=8 | link=450GB/s,1us | ... , see WORDS; rails also without a value
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from collc.errors import MachineError, nearest
from collc.machine.shape import Wire, parse_wire
from collc.machine.topology import MOST_DEVICES

# Each word with an example. GPUs and NICs are of a host; bandwidths are each way.
WORDS = {
    "gpus": "gpus=8",
    "domain": "domain=18",  # hosts of one NVLink domain
    "link": "link=450GB/s,1us",  # of a GPU, and the whole way to another one of its node
    "nics": "nics=8",
    "net": "net=400Gb/s,5us",  # of a NIC, and the whole way from a GPU to one of another node
    "hosts": "hosts=4",
    "rails": "rails=1us",  # NICs of one number share a switch; to others it takes so much more
    "racks": "racks=4",
    "uplink": "uplink=3200Gb/s,2us",  # of a rack, and how much more it takes between racks
    "add": "add=1500GB/s",  # what a GPU adds to its own
    "ports": "ports=8",  # messages in flight at once, each way, before latencies add up
}
FLAG = "rails"  # the word that also stands alone
_EXAMPLE = "dgx-h100:64 racks=4 uplink=3200Gb/s,2us"
_LONGEST = 4096


@dataclass(frozen=True)
class Said:
    """The parts of its source, how many hosts, and its other words."""

    parts: tuple[str, ...]
    hosts: int | None
    words: Mapping[str, str]

    def text(self, source: str) -> str:
        """The text anew, in one order; what ``split`` takes apart into the same."""
        found = {word: self.words[word] for word in WORDS if word in self.words}
        words = [f"{word}={value}" if value else word for word, value in found.items()]
        if source:
            many = "" if self.hosts is None else f":{self.hosts}"
            return " ".join([shlex.quote(source + many), *words])
        own = [] if self.hosts is None else [f"hosts={self.hosts}"]
        return " ".join([*words, *own])

    def number(self, word: str, most: int) -> int | None:
        """The number that a word says; None where it is not said."""
        return number(f"{word}=", self.words[word], most) if word in self.words else None

    def wire(self, word: str) -> Wire | None:
        """The bandwidth and the latency that a word says, either None if not said."""
        if word not in self.words:
            return None
        try:
            return parse_wire(self.words[word], WORDS[word])
        except MachineError as e:
            raise MachineError(f"{word}={self.words[word]}: {e}") from e

    def refuse(self, words: tuple[str, ...], why: str) -> None:
        """Raises MachineError for each of the words that is said, for that reason."""
        for word in words:
            if word in self.words:
                raise MachineError(f"{word} {why}. Leave it out.")

    def without(self, word: str) -> "Said":
        return replace(self, words={w: v for w, v in self.words.items() if w != word})


def split(text: str) -> Said:
    """The parts of a text. Raises MachineError for words that are unknown, doubled or empty."""
    if not isinstance(text, str):
        raise MachineError(f"a machine is a text, not {type(text).__name__}. Write {_EXAMPLE!r}.")
    if len(text) > _LONGEST:
        raise MachineError(f"a text of {len(text):,} characters is no machine. Write {_EXAMPLE!r}.")
    try:
        tokens = shlex.split(text)
    except ValueError as e:
        raise MachineError(f"{text!r}: {e}. Quotes are for file names with blanks.") from e
    if not any(tokens):
        raise MachineError(f"the machine is empty. Write {_EXAMPLE!r}, or gpus=8 link=450GB/s,1us.")
    parts: tuple[str, ...] = ()
    hosts, words = None, {}
    for at, token in enumerate(tokens):
        word, equals, value = token.partition("=")
        if at == 0 and word not in WORDS and (not equals or "/" in word or "." in word):
            parts, hosts = _source(token)
            continue
        if word not in WORDS:
            raise MachineError(f"{word!r} is no word of a machine. {_near(word)}")
        if word in words:
            raise MachineError(f"{word} is said twice, {words[word]} and {value}. Leave one out.")
        value = "".join(value.split())
        if not value and (equals or word != FLAG):
            raise MachineError(f"{word} has no value. Write {WORDS[word]}.")
        words[word] = value
    if "hosts" in words:
        if hosts is not None:
            raise MachineError(
                f":{hosts} and hosts={words['hosts']} both say how many hosts. Leave one out."
            )
        hosts = number("hosts=", words.pop("hosts"), MOST_DEVICES)
    return Said(parts, hosts, words)


def _near(word: str) -> str:
    """The known words that are near, with an example."""
    close = get_close_matches(word, sorted(WORDS), n=1, cutoff=0.5)
    return f"{nearest(word, WORDS)} Write {WORDS[close[0]] if close else _EXAMPLE}."


def _source(token: str) -> tuple[tuple[str, ...], int | None]:
    source, colon, tail = token.rpartition(":")
    if not colon or "/" in tail or "." in tail:  # none, or one in the name of a file
        source, hosts = token, None
    else:
        hosts = number(f"{token!r}: the number of hosts is ", tail, MOST_DEVICES)
    parts = tuple(source.split("+"))
    if not all(parts):
        raise MachineError(f"{token!r}: a name is empty. Write dgx-h100:4, or topo.xml+h100.")
    return parts, hosts


def number(what: str, value: str, most: int) -> int:
    """A whole number from 1 to ``most``. Raises MachineError."""
    if not re.fullmatch(r"[0-9]{1,9}", value, re.ASCII) or not 1 <= int(value) <= most:
        raise MachineError(f"{what}{value!r}: it has to be a number from 1 to {most:,}.")
    return int(value)
