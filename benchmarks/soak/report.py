"""The report on a soak."""

import re
from collections.abc import Sequence

import common

from soak import judge
from soak.judge import Limits, Trial
from soak.soaking import Soaked

SETTING = (
    "A training on {hosts} emulated hosts of one device, joined by links of 1 Gb/s, their run folder on",
    "a small disk of its own, under `collc launch` with restarts and `collc.fit(resume=True,",
    "watchdog={watchdog:g})`. Faults of seed {seed} befall it one after the other, at random steps and",
    "phases. After a failure the launcher starts all hosts anew; by then a cable is back in, and a disk",
    "has room again.",
)
NAMING = (
    "*Named by*: whose lines name the host or the file, and after how many seconds the first of them",
    "came. The launcher names the host that was killed once the others have ended too. A full disk is",
    "seen at the next write. A slow link is named by `collc doctor --links`, which is run while the",
    "training goes on. The promise on seconds leaves these two out. *Gone*: seconds until no",
    "process of that attempt was left. *Phase*: where the host was, as its own watchdog has it; at the",
    "start it has not begun to train.",
)
EVIDENCE = (
    "Each job is compared with one of the same seed that nobody disturbed: the losses of all {steps}",
    "steps bit for bit, the samples of every step that counts, the parameters on every host at the end;",
    "and every epoch has every sample once.",
)


def report(
    soaked: Soaked, seed: int, hosts: Sequence[str], limits: Limits, watchdog: float
) -> list[str]:
    own = {"hosts": len(hosts), "seed": seed, "watchdog": watchdog, "steps": soaked.steps}
    lines = [
        *common.prose(*(line.format(**own) for line in SETTING)),
        "",
        *common.prose(*(line.format(**own) for line in EVIDENCE)),
        "",
        *common.table(
            ["promise", "measured", "at most", ""], promises(soaked, hosts, limits)
        ),
        "",
        "## The faults",
        "",
        *common.prose(*NAMING),
        "",
        *common.table(
            [
                "", "seed", "fault", "host", "step", "phase", "named by", "after, s", "gone, s",
                "outcome", "losses, samples, parameters",
            ],
            [row(trial, seed, soaked, hosts, limits) for trial in soaked.trials],
        ),
    ]  # fmt: skip
    return lines


def promises(soaked: Soaked, hosts: Sequence[str], limits: Limits) -> list[list[object]]:
    trials = soaked.trials
    bad = sum(bool(judge.failing(trial, hosts, limits)) for trial in trials)
    itself = [trial for trial in trials if judge.at_once(trial)]
    named = [at for trial in itself if (at := judge.named(trial, hosts)[0][1]) is not None]
    gone = [trial.gone_s for trial in trials if trial.gone_s is not None]
    rows = [
        (f"faults of {len(trials)} that were not named, or not survived", bad, 0),
        ("seconds until a fault that holds up the job was named", max(named, default=0.0), limits.named),
        ("seconds until all processes were gone", max(gone, default=0.0), limits.gone),
        (f"jobs of {soaked.jobs} with other losses, samples or parameters",
         sum(map(bool, soaked.wrong)), 0),
    ]  # fmt: skip
    return [[*each, common.verdict(each[1], each[2])] for each in rows]


def row(
    trial: Trial, seed: int, soaked: Soaked, hosts: Sequence[str], limits: Limits
) -> list[object]:
    fault = trial.fault
    said = judge.named(trial, hosts)
    who = ", ".join(who if at is not None else f"not the {who}" for who, at in said)
    first = min((at for _, at in said if at is not None), default=None)
    outcome = "; ".join([judge.outcome(trial), *judge.failing(trial, hosts, limits)])
    wrong = soaked.wrong[trial.job - 1]
    return [
        fault.number, seed, f"{fault.kind}{detail(trial)}", fault.host, trial.step, trial.phase, who,
        "never" if first is None else round(first, 2),
        "" if trial.gone_s is None else f"{trial.gone_s:.2f}",
        outcome, "; ".join(wrong) or "equal",
    ]  # fmt: skip


def detail(trial: Trial) -> str:
    said = re.sub(r"(\b[0-9a-f]{6})[0-9a-f]{26}\b", r"\1…", trial.detail) or trial.fault.rate
    return f" ({said})" if said else ""
