"""A training that faults of a seed befall, 20 in a row: each named, survived, and the same losses.

    python benchmarks/soak                  draws a seed, prints the report, writes reports/soak.md
    python benchmarks/soak --print          prints it only
    python benchmarks/soak --faults 3 --seed 7 --quick --print

Faults: a host killed or stopped, the coordinator killed, a slow or a cut link, a full disk, a
checkpoint cut off. No seed is written down here: one is drawn for each soak, and the report names
it in the command that repeats the soak. The hosts are network namespaces of this machine, so it
needs root. Leaves with 1 where a promise is missed, with the lines of the faults concerned on
stderr.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # so that this folder is the package soak

import common  # noqa: E402
from hosts import namespaces  # noqa: E402

from soak import disk, faults, judge, report  # noqa: E402
from soak.job import WATCHDOG_S  # noqa: E402
from soak.soaking import HOSTS, soak  # noqa: E402

STEPS, QUICK = 400, 120  # of a job: whole epochs of 40
# A watchdog has the time of the slowest pause of its threads on top; its last words, the launcher's
# look at who else fails, and the grace of a stopped host come after it.
LIMITS = judge.Limits(named=WATCHDOG_S + 1, gone=WATCHDOG_S + 10)


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--seed", type=int, help="of faults, data and model (drawn anew)")
    made.add_argument("--faults", type=int, default=20, help="how many in a row (20)")
    made.add_argument("--quick", action="store_true", help="short jobs, and no slow links")
    made.add_argument("--print", action="store_true", help="do not write the report")
    given = made.parse_args()
    if given.faults < 1:
        made.error("--faults has to be 1 or more.")
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
        # The process that is started anew for its mounts, and the report's command, have it too.
        sys.argv += ["--seed", str(given.seed)]
    return given


def main() -> None:
    given = options()
    if why := namespaces.missing():
        sys.exit(f"soak: {why}")
    disk.own_mounts([sys.executable, *sys.argv])
    hosts = [f"h{i}" for i in range(HOSTS)]
    # While a link is slow, the doctor takes its time, and the training has to last for that long.
    kinds = [kind for kind in faults.KINDS if not (given.quick and kind == faults.SLOW)]
    soaked = soak(given.seed, given.faults, QUICK if given.quick else STEPS, kinds)
    lines = report.report(soaked, given.seed, hosts, LIMITS, WATCHDOG_S)
    common.publish("soak", "A soak on emulated hosts", ["jax", "jaxlib", "flax"], lines)
    bad = [trial for trial in soaked.trials if judge.failing(trial, hosts, LIMITS)]
    for trial in bad:
        print(f"\nfault {trial.fault.number}: {trial.fault}", file=sys.stderr)
        for at, line in trial.lines:
            print(f"{at:7.2f} {line}", file=sys.stderr)
    sys.exit(bool(bad or any(soaked.wrong)))


if __name__ == "__main__":
    main()
