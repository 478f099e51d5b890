"""Files that are written as a whole, and what is in a folder."""

import hashlib
import os
from pathlib import Path

from collc.errors import CheckpointError


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> dict[str, Path]:
    """All files below a folder by their names from there."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole: readers see the old text or the new, never half of it.

    Raises CheckpointError if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that the disk does not take."""
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}. Make it writable, or free some space."
    )
