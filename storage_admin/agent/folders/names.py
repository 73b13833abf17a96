"""What a file, a path and a job may be called. The dashboard asks here as well; the agent asks again, for itself."""

from __future__ import annotations

import re

#: Bytes of a name in a folder (NAME_MAX).
LONGEST = 255
#: A job's id, as it stands in the names of its own files (``.sa-<job>.new``).
JOB = "[0-9a-zA-Z]{1,40}"
_JOB = re.compile(JOB)
#: What the name of a new image ends in: a file's name is what tools and people take its format from.
ENDINGS = {
    "qcow2": (".qcow2",), "raw": (".raw", ".img"), "vmdk": (".vmdk",), "vdi": (".vdi",), "vhdx": (".vhdx",),
    "vpc": (".vhd", ".vpc"),
}  # fmt: skip


def is_job(text: str) -> bool:
    """Whether it can be a job's id."""
    return _JOB.fullmatch(text) is not None


def is_ours(name: bytes | str) -> bool:
    """Whether a file's name is one of those that jobs give to files of their own."""
    return name.startswith(".sa-") if isinstance(name, str) else name.startswith(b".sa-")


def is_absolute(path: bytes) -> bool:
    """Whether the path is absolute, and one that a file can have."""
    return path.startswith(b"/") and b"\0" not in path


def fits_in_folder(name: bytes) -> bool:
    """Whether it is the name of one file in a folder by its length, and leads to no other folder below."""
    return 0 < len(name) <= LONGEST and b"/" not in name


def is_possible(name: bytes) -> bool:
    """Whether a file can have the name."""
    return fits_in_folder(name) and b"\0" not in name and name not in {b".", b".."}


def wrong_name(name: bytes) -> str:
    """Why no new image can be called that, in a few words; empty where it can, as far as its format is not looked at.

    What is no name because of NUL or ``..`` is refused with its path (:func:`.pools.components`).
    """
    if not fits_in_folder(name) or is_ours(name) or b"\n" in name:
        return f"the target needs a name of 1 to {LONGEST} bytes that is none of a job's own files (.sa-…)"
    return ""


def wrong_name_for(name: bytes, form: str) -> str:
    """Why a new image of a format cannot have a name, in a few words; empty where it can."""
    if name.startswith(b"."):
        return "a name that begins with a dot hides the file; choose another one"
    endings = ENDINGS[form]
    if not any(name.lower().endswith(ending.encode()) and len(name) > len(ending) for ending in endings):
        return f"the name of a {form} image ends in {' or '.join(endings)}"
    return ""
