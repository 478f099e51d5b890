"""What jax finds on this host, and the order in which a job's devices come."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from collc.runtime.doctor.finding import Finding, count, error, listed, note, ok, short, warning
from collc.runtime.doctor.host import Host

MARK = "collc doctor found "
PROBE = f"""
import json, jax
found = [(d.platform, d.device_kind) for d in jax.local_devices()]
print("\\n{MARK}" + json.dumps(found))
"""
GPUS = "/proc/driver/nvidia/gpus"


@dataclass(frozen=True)
class Probe:
    """What a process that asked jax for its devices said: them, or why there are none.

    ``devices``: (platform, kind) of each. ``unknown``, ``malformed``: XLA flags at which it has
    aborted, as name=value. ``complaint``: the last lines of a process that failed, or
    of a plugin that could not be used.
    """

    devices: tuple[tuple[str, str], ...] = ()
    complaint: str = ""
    unknown: tuple[str, ...] = ()
    malformed: tuple[str, ...] = ()
    started: bool = True

    @property
    def platform(self) -> str:
        return self.devices[0][0] if self.devices else ""


def probe(environment: Mapping[str, str], timeout_s: float) -> Probe:
    """Asks jax in another process: XLA aborts the one that has a flag which it does not know."""
    own = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            env=own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Probe((), f"jax has not found its devices within {timeout_s:g} s", started=False)
    except OSError as problem:
        return Probe((), f"{sys.executable} does not start: {problem.strerror}", started=False)
    return read(done.returncode, done.stdout, done.stderr)


def read(code: int, stdout: str, stderr: str) -> Probe:
    """Reads what the other process has left."""
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", stderr)
    flags = tuple(word for word in unknown[1].split() if word.startswith("-")) if unknown else ()
    values = re.findall(r"Couldn't interpret value (.*) for flag (\w+)", stderr)
    malformed = tuple(f"{name}={value}" for value, name in values)
    lines = [line for line in stderr.splitlines() if line.strip()]
    found = [line for line in stdout.splitlines() if line.startswith(MARK)]
    if code or not found:
        causes = [line for line in lines if re.match(r"\w*(Error|Exception)\b|F\d{4} ", line)]
        return Probe(
            (), (causes or lines or [f"exit code {code}"])[-1].strip(), flags, malformed, False
        )
    devices = tuple((platform, kind) for platform, kind in json.loads(found[-1][len(MARK) :]))
    plugin = [line for line in lines if re.search(r"\w*Error: |cuda|CUDA", line)]
    return Probe(devices, plugin[-1].strip() if plugin else "")


def visible_gpus(host: Host) -> int:
    """NVIDIA GPUs that this process may use, by the driver's files and CUDA_VISIBLE_DEVICES."""
    chosen = host.environment.get("CUDA_VISIBLE_DEVICES")
    there = len(host.entries(GPUS))
    if chosen is None:
        return there
    names = [name for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return min(len(names), there) if there else 0


def devices(host: Host, found: Probe, installed: Mapping[str, str]) -> list[Finding]:
    """What jax finds against what the host has."""
    check, there, gpus = "devices", len(host.entries(GPUS)), visible_gpus(host)
    plugin = any(name.startswith("jax-cuda") for name in installed)
    wanted = host.environment.get("JAX_PLATFORMS", "")
    if not found.started:
        if found.unknown or found.malformed:  # said by the check of flags
            return []
        remedy = "Run python -c 'import jax; print(jax.devices())' and repair what it says."
        return [error(check, f"jax does not start: {short(found.complaint, 500)}", remedy)]
    kinds = [kind for _, kind in found.devices]
    shown = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in sorted(set(kinds)))
    if found.platform == "cpu" and "cpu" in wanted.split(",")[:1]:
        rest = f"; JAX_PLATFORMS={short(wanted)} leaves {count(gpus, 'GPU')} idle" if gpus else ""
        remedy = "Unset JAX_PLATFORMS if the run is to use GPUs." if gpus else ""
        return [note(check, shown + rest, remedy) if gpus else ok(check, shown)]
    if found.platform == "cpu" and gpus and not plugin:
        what = f"{shown}, though the host has {count(gpus, 'NVIDIA GPU')}: jax has no CUDA plugin"
        return [warning(check, what, 'pip install -U "jax[cuda13]", or set JAX_PLATFORMS=cpu')]
    if found.platform == "cpu" and gpus:
        what = f"{shown}, though the host has {count(gpus, 'NVIDIA GPU')} and the CUDA plugin"
        said = f": {short(found.complaint, 500)}" if found.complaint else ""
        remedy = "Set JAX_PLATFORMS=cuda, so that jax says why it cannot use them; see the driver."
        return [error(check, what + said, remedy)]
    if found.platform == "cpu" and plugin:
        what = f"{shown}: the CUDA plugin is installed, but no NVIDIA GPU is here"
        remedy = (
            "Run nvidia-smi; give a container --gpus all; where there is none, JAX_PLATFORMS=cpu"
        )
        return [warning(check, what, remedy)]
    if found.platform in ("gpu", "cuda") and len(kinds) < there:
        what = f"jax uses {len(kinds)} of the host's {there} NVIDIA GPUs ({shown})"
        remedy = (
            "See CUDA_VISIBLE_DEVICES and the scheduler's GPUs per task, if that is not on purpose."
        )
        return [note(check, what, remedy)]
    if len(set(kinds)) > 1:
        what = f"{shown}: of several kinds, and each collective waits for the slowest"
        return [warning(check, what, "Choose equal ones with CUDA_VISIBLE_DEVICES.")]
    return [ok(check, shown)]


@dataclass(frozen=True)
class Placed:
    """A device of the job, as jax lists it."""

    host: str
    slice: int = 0


def order(all_devices: Sequence[Placed], platform: str) -> list[Finding]:
    """Whether jax's own order keeps hosts together, and what a mesh over it would be."""
    check = "mesh order"
    runs = [(host, len(list(group))) for host, group in groupby(all_devices, lambda d: d.host)]
    hosts = list(dict.fromkeys(host for host, _ in runs))
    slices = len({device.slice for device in all_devices})
    found = []
    if len(runs) > len(hosts):
        what = f"jax.devices() does not keep hosts together: {listed([host for host, _ in runs])}"
        remedy = (
            "Take the mesh from collc.init(), not from np.reshape(jax.devices(), ...): an axis of one "
            "host's GPUs would cross hosts."
        )
        found.append(warning(check, what, remedy))
    if slices > 1 and platform in ("gpu", "cuda"):
        what = f"{slices} slices (NVLink domains): jax.make_mesh refuses meshes over several"
        found.append(note(check, what, "Take the mesh from collc.init()."))
    each = len(all_devices) // len(hosts)  # collc.init has seen that all have as many
    return found or [ok(check, f"host by host: {len(hosts)} × {count(each, 'device')}")]
