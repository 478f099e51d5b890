"""``collc launch``: a command on several hosts of this machine, as a pod would run it."""

from typing import Annotated

import typer

from collc.cli.common import Debug, guarded
from collc.runtime.launch.job import MOST, Host, Job
from collc.runtime.launch.logs import Logs

# For the command's registration: what follows the program's name is the program's.
SETTINGS = {"allow_interspersed_args": False}


@guarded
def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="What each host runs: -- python train.py",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=MOST, metavar="N", help="Processes, named h0, h1, ...")
    ] = 2,
    devices_per_host: Annotated[
        int, typer.Option(min=1, metavar="N", help="Virtual CPU devices of each.")
    ] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="How often all hosts are started anew after one has failed."
        ),
    ] = 0,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e6,
            metavar="SECONDS",
            help="From SIGTERM to SIGKILL, for hosts that outlive the failure of another.",
        ),
    ] = 10.0,
    debug: Debug = False,
) -> None:
    """Run a command as several hosts on this machine, with virtual CPU devices that talk over gloo.

    In the command collc.init() needs no arguments. Each line that a host writes has its name before
    it. When one fails, it is named, its last lines are shown again, and the others are ended.
    SIGINT, SIGTERM and SIGHUP are passed on to all, and a second one kills them.

    Leaves with 0, or the failed host's code: 128 + the signal where one killed it, 75 where its
    watchdog ended the job.
    """
    if not command:
        raise typer.BadParameter(
            "there is none. Say what to start, after --: python train.py", param_hint="COMMAND"
        )
    named = tuple(Host(f"h{i}") for i in range(hosts))
    job = Job(tuple(command), named, devices_per_host, grace_s=grace)
    if code := job.run(Logs(), max_restarts).code:
        raise typer.Exit(code)
