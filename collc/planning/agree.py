"""Processes that disagree hang a pod: they compare what they are about to run, before it compiles."""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any

import jax

from collc.errors import PlanError

TIMEOUT_S = 120

_calls = count()


def distributed() -> bool:
    """Whether this is one of several processes of JAX's distributed runtime."""
    return jax.distributed.is_initialized() and state().num_processes > 1


def host_name() -> str:
    """This host, as ``collc launch`` calls it, or else as the system does."""
    return os.environ.get("COLLC_HOST") or socket.gethostname()


def compare(topic: str, facts: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> None:
    """Compares facts between all processes, through JAX's own key-value store.

    Every process has to call this for the same topics in the same order. Raises PlanError, on every
    process, that names the odd one out, its host, and what differs; or who did not come.
    """
    if not distributed():
        return
    mine = {"host": host_name(), "facts": dict(facts)}
    said = meet(f"compare its {topic}", json.dumps(mine), timeout_s)
    everyone = {process: json.loads(text) for process, text in said.items()}
    found = differences({p: said["facts"] for p, said in everyone.items()})
    if found:
        hosts = {p: said["host"] for p, said in everyone.items()}
        lines = [
            f"process {p} (host {hosts[p]}) has {name} = {value!r}, the others {usual!r}"
            for p, name, value, usual in found
        ]
        raise PlanError(
            f"the processes differ in their {topic}, so their programs would wait for each other for "
            "ever:\n  " + "\n  ".join(lines) + "\nMake them alike."
        )


def meet(topic: str, said: str = "", timeout_s: float = TIMEOUT_S) -> dict[int, str]:
    """Waits for all processes, and returns what each of them said, by process.

    Each has to call this for the same topics in the same order. Raises PlanError that names the one
    that did not come in time.
    """
    if not distributed():
        return {0: said}
    job = state()
    client, me, n = job.client, job.process_id, job.num_processes
    prefix, began = f"collc/{next(_calls)}/{topic}", time.monotonic()
    client.key_value_set(f"{prefix}/{me}", said)
    everyone = {}
    for other in range(n):
        try:
            everyone[other] = client.blocking_key_value_get(
                f"{prefix}/{other}", int(timeout_s * 1000)
            )
        except Exception as e:
            raise PlanError(
                f"process {other} of {n} has not come to {topic} {_within(began, timeout_s, e)} "
                f"(process {me} waited). It may have failed, or do things in another order. Look at "
                f"its log. ({type(e).__name__})"
            ) from e
    return everyone


def share(topic: str, value: str, timeout_s: float = TIMEOUT_S) -> str:
    """Process 0's value, on every process. Each has to call this for the same topics in order.

    Raises PlanError where process 0 does not say it in time.
    """
    if not distributed():
        return value
    client, me = state().client, state().process_id
    key, began = f"collc/{next(_calls)}/{topic}", time.monotonic()
    if me == 0:
        client.key_value_set(key, value)
    try:
        return client.blocking_key_value_get(key, int(timeout_s * 1000))
    except Exception as e:
        raise PlanError(
            f"process 0 has not said {topic} {_within(began, timeout_s, e)} (process {me} waited). "
            f"Look at its log. ({type(e).__name__})"
        ) from e


class Box:
    """Where any process may leave one word for process 0. Each has to make it, in the same order."""

    def __init__(self) -> None:
        self._prefix, self._left = f"collc/{next(_calls)}/box", False

    def leave(self, word: str) -> None:
        """Only the first word of a process counts."""
        if distributed() and not self._left:
            self._left = True
            state().client.key_value_set(f"{self._prefix}/{state().process_id}", word)

    def words(self) -> list[str]:
        """What was left until now; nothing on other processes than 0."""
        if not distributed() or state().process_id:
            return []
        return [word for _, word in state().client.key_value_dir_get(f"{self._prefix}/")]


def _within(began: float, timeout_s: float, error: Exception) -> str:
    """The time is over, or before that the store broke, as where process 0 has ended."""
    if "DEADLINE_EXCEEDED" in str(error):
        return f"within {timeout_s:g} s"
    return f"after {time.monotonic() - began:.1f} s, when the store of process 0 broke"


def differences(facts: Mapping[int, Mapping[str, str]]) -> list[tuple[int, str, str, str]]:
    """(process, name, its value, the usual value) for each value that is not the commonest.

    Where two values are as common, the one of the lower process is the usual one.

    >>> differences({0: {"jax": "1"}, 1: {"jax": "1"}, 2: {"jax": "2"}})
    [(2, 'jax', '2', '1')]
    """
    found = []
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        values = {p: own.get(name, "") for p, own in sorted(facts.items())}
        usual = Counter(values.values()).most_common(1)[0][0]
        found += [(p, name, value, usual) for p, value in values.items() if value != usual]
    return found


def state() -> Any:
    """JAX's distributed runtime in this process: ``client``, ``process_id``, ``num_processes``."""
    # JAX offers its key-value store to nobody; orbax reaches for it in the same way.
    from jax._src import distributed

    return distributed.global_state
