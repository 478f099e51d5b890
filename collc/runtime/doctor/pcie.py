"""PCIe: GPUs and network cards in a slower slot than they could use, and errors counted on the way."""

import re

from collc.runtime.doctor.counters import Counts, counted
from collc.runtime.doctor.finding import Finding, Level, listed, note, ok, warning
from collc.runtime.doctor.host import Host

CHECK, ROOT = "PCIe", "/sys/bus/pci/devices"
NVIDIA = 0x10DE
GPU, NETWORK = 0x03, 0x02  # the first byte of a device's class

RESEAT = (
    "Reseat the card or its riser; if it goes on, see dmesg for AER lines and have it replaced."
)
ERRORS = {
    "TOTAL_ERR_FATAL": "Do not train on it: see dmesg for AER lines, have the card or board replaced.",
    "TOTAL_ERR_NONFATAL": RESEAT,
    "TOTAL_ERR_COR": RESEAT,
}
FILES = ("aer_dev_fatal", "aer_dev_nonfatal", "aer_dev_correctable")


def cards(host: Host) -> dict[str, str]:
    """What GPUs of NVIDIA and network cards are called, by their folder."""
    found = {}
    for name in host.entries(ROOT):
        folder = f"{ROOT}/{name}"
        kind = (host.number(f"{folder}/class") or 0) >> 16
        if kind == GPU and host.number(f"{folder}/vendor") == NVIDIA:
            found[folder] = f"GPU {name}"
        elif kind == NETWORK:
            found[folder] = f"network card {name}"
    return found


def counts(host: Host) -> Counts:
    """The totals of PCIe's error reporting that are there, by card."""
    found = {}
    for folder, name in cards(host).items():
        text = "\n".join(host.text(f"{folder}/{file}") or "" for file in FILES)
        totals = re.findall(r"^(TOTAL_ERR_\w+) ([0-9]{1,20})$", text, re.M)
        found[name] = {total: int(n) for total, n in totals if total in ERRORS}
    return found


def pcie(host: Host) -> list[Finding]:
    """Links below what the card can do, and errors; nothing where there is no such card."""
    found = [f for folder, name in cards(host).items() for f in _link(host, folder, name)]
    errors = counts(host)
    for place, own in errors.items():
        fatal = {k: n for k, n in own.items() if k == "TOTAL_ERR_FATAL"}
        rest = {k: n for k, n in own.items() if k != "TOTAL_ERR_FATAL"}
        found += counted(CHECK, {place: fatal}, ERRORS, "since boot", Level.ERROR)
        found += counted(CHECK, {place: rest}, ERRORS, "since boot")
    bare = [place for place, own in errors.items() if not own]
    read = len(bare) < len(errors) or any(_says_width(host, folder) for folder in cards(host))
    if read and not found:
        rest = f"; no error counters at {listed(bare)}" if bare else ", no errors counted"
        found.append(ok(CHECK, f"GPUs and network cards: {len(errors)}{rest}"))
    return found


def _says_width(host: Host, folder: str) -> bool:
    return host.number(f"{folder}/current_link_width") is not None


def _link(host: Host, folder: str, name: str) -> list[Finding]:
    found = []
    width, most = (
        host.number(f"{folder}/current_link_width"),
        host.number(f"{folder}/max_link_width"),
    )
    if width and most and width < most:
        what = f"{name} runs on {width} of its {most} lanes"
        remedy = "Reseat it; see in the board's manual that the slot has all lanes, and lspci -vv."
        found.append(warning(CHECK, what, remedy))
    speed, best = (_gigatransfers(host, f"{folder}/{way}_link_speed") for way in ("current", "max"))
    if speed and best and speed < best:
        what = f"{name} runs at {speed:g} of its {best:g} GT/s"
        if name.startswith("GPU"):
            remedy = "GPUs slow down when idle: look again under load, with nvidia-smi -q -d PCIE."
            found.append(note(CHECK, what, remedy))
        else:
            remedy = "See the slot's generation in the BIOS, the riser, and lspci -vv (LnkSta)."
            found.append(warning(CHECK, what, remedy))
    return found


def _gigatransfers(host: Host, file: str) -> float | None:
    found = re.match(r"\d+(?:\.\d+)?", host.text(file) or "")
    return float(found[0]) if found else None
