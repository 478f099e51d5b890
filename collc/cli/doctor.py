"""``collc doctor``: what is wrong with a host, its settings and its links, before a run finds out."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from collc.cli import common
from collc.cli.common import Debug, Json, Output, guarded, print_json
from collc.runtime.doctor.examine import examine, gathered
from collc.runtime.doctor.finding import Finding, Level, Said, count, listed
from collc.runtime.doctor.host import Host
from collc.runtime.doctor.jobs import called, read_job

STYLES = {Level.OK: "green", Level.NOTE: "", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@guarded
def doctor(
    links: Annotated[
        bool | None,
        typer.Option(
            "--links/--no-links",
            help="Measure the links between hosts, on one host those between its devices. "
            "Default: only where several processes were started.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            callback=common.seconds_given,
            help="How long to wait for jax to start, for the other processes, and for the links.",
        ),
    ] = 120.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this host before a run: devices, versions, settings, scheduler, name, clock, counters.

    Each finding but ok says what to do. Started as several processes (collc launch, srun, mpirun),
    each host is checked, and process 0 prints what all have found, with the order of devices, clocks
    and links.

    Leaves with 1 where there are errors, with 0 where there are none; warnings do not count.
    """
    host = Host(os.environ)
    own = gathered(host, timeout)
    job, unclear = read_job(os.environ)
    name = called(os.environ, own.name)
    mine = examine(host, own)
    found, prints = [(name, finding) for finding in mine], True
    wanted = job is not None if links is None else links
    # XLA would abort this process too, where it has aborted the other one.
    if own.probe.started and not unclear and (job is not None or wanted):
        from collc.runtime.doctor.sweep import left_behind
        from collc.runtime.doctor.together import ask

        with _printed_elsewhere():
            asked = ask(host, name, mine, job, wanted, timeout)
        found, prints = asked.found, asked.prints
        common.left_behind.extend(left_behind)
    if not prints:
        return
    if json:
        print_json([{"host": at, **asdict(finding)} for at, finding in found])
    else:
        show(found)
    sys.stdout.flush()  # a link that hangs is left behind without python's own way out
    if any(finding.level == Level.ERROR for _, finding in found):
        raise typer.Exit(1)


@contextmanager
def _printed_elsewhere() -> Iterator[None]:
    """To stderr what libraries write to standard output: gloo tells there of its connections."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def show(found: Sequence[Said]) -> None:
    """Prints the findings: what several hosts have in common once, the worst at the end. Of several
    hosts, what is ok is counted, but for links.
    """
    output = Output()
    hosts: dict[Finding, list[str]] = {}
    for host, finding in found:
        hosts.setdefault(finding, []).append(host)
    several = len({host for host, _ in found}) > 1
    for level in Level:
        for finding, at in hosts.items():
            if finding.level != level or (
                several and level == Level.OK and finding.check != "links"
            ):
                continue
            where = f"{listed(at)}: " if several else ""
            output.line(f"{level:<8} {finding.check}: {where}{finding.found}", STYLES[level])
            if finding.remedy:
                output.line(f"         {finding.remedy}")
    counts = {level: sum(finding.level == level for finding in hosts) for level in Level}
    amiss = {finding.check for finding in hosts if finding.level in (Level.WARNING, Level.ERROR)}
    well = {finding.check for finding in hosts if finding.level == Level.OK} - amiss
    parts = [(counts[Level.ERROR], "error", ""), (counts[Level.WARNING], "warning", "")]
    parts += [(len(well), "check", " well")] if well else []
    output.line(", ".join(f"{count(n, noun)}{end}" for n, noun, end in parts), "bold")
