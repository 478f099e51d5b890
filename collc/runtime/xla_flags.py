"""XLA_FLAGS as XLA reads it, and what it has to hold for virtual CPU devices. No jax."""

from pathlib import Path

from collc.errors import LaunchError

DEVICES = "--xla_force_host_platform_device_count"
# The devices are threads, and on a busy machine one may wait long for its turn: XLA gives up a
# collective after 40 s, which is too soon.
PATIENCE, PATIENCE_S = "--xla_cpu_collective_call_terminate_timeout_seconds", 300


def named_file(text: str) -> str | None:
    """The file that a value of XLA_FLAGS names: what begins with no ``-``. None where it is flags."""
    text = text.strip()
    return None if not text or text.startswith("-") else text


def read(text: str) -> list[str]:
    """The flags in a value of XLA_FLAGS, or in the file that it names.

    Raises LaunchError where there is no such file: XLA would abort the process.
    """
    if (file := named_file(text)) is None:
        return text.split()
    try:
        return Path(file).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"XLA_FLAGS is {text!r}, which XLA takes for a file of flags, since it does not begin with "
            f"-, but cannot read: {why}. Write flags as --xla_name=value, with blanks between."
        ) from error


def virtual(text: str, devices: int, *, keep: bool = False) -> str:
    """The value of XLA_FLAGS for so many virtual CPU devices, beside the flags that it has.

    ``keep``: a number of devices that it says already stays. Raises LaunchError as ``read``.

    >>> virtual("--xla_dump_to=a", 2).split()[1:]
    ['--xla_cpu_collective_call_terminate_timeout_seconds=300', '--xla_dump_to=a']
    """
    flags = read(text)
    if not keep:
        flags = [flag for flag in flags if _name(flag) != DEVICES]
    names = {_name(flag) for flag in flags}
    new = ((DEVICES, devices), (PATIENCE, PATIENCE_S))
    # Before the others, so that the first word is no file's name whatever those are.
    return " ".join([*(f"{name}={value}" for name, value in new if name not in names), *flags])


def _name(flag: str) -> str:
    return flag.partition("=")[0]
