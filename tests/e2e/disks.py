"""Real images for the browser's tests, and what the real tools say of them."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.rest import Rest

MIB = 1 << 20


def registered(rest: Rest, folder: Path) -> dict[str, Any]:
    """Makes a folder a pool of this machine, scans it, and waits until its images are sampled."""
    host = rest.local()["id"]
    pool = rest.post("pools/", {"host": host, "kind": "dir", "path": str(folder)}, expect=201)
    rest.scan()
    rest.quiet()
    return dict(pool)


def disk(folder: Path, name: str, *, base: str = "", zeros_mib: int = 24, data_mib: int = 4, at_mib: int = 32) -> Path:
    """A qcow2 that a guest has filled partly with zeros and partly with data that can be compressed."""
    path = folder / name
    backing = ["-b", base, "-F", "qcow2"] if base else []
    run("qemu-img", "create", "-q", "-f", "qcow2", *backing, str(path), *([] if base else ["1G"]))
    parts = [f"write -q -P 0 {at_mib - 32}M {zeros_mib}M"] if zeros_mib else []
    write(path, *parts, f"write -q -P {65 + at_mib % 26} {at_mib}M {data_mib}M")
    path.chmod(0o666)
    return path


def noisy(folder: Path, name: str, *, zeros_mib: int, noise_mib: int) -> Path:
    """As :func:`disk`, of data that cannot be compressed, so that a job with a limit is busy with it for a while."""
    path, content = folder / name, folder / ".content"
    content.write_bytes(random.Random(noise_mib).randbytes(noise_mib * MIB))
    run("qemu-img", "create", "-q", "-f", "qcow2", str(path), "1G")
    write(path, f"write -q -P 0 0 {zeros_mib}M", f"write -q -s {content} 64M {noise_mib}M")
    content.unlink()
    path.chmod(0o666)
    return path


def write(path: Path, *commands: str) -> None:
    run("qemu-io", "-f", "qcow2", *(word for command in commands for word in ("-c", command)), str(path))


def run(*command: str) -> str:
    """What a tool printed; raises where it failed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def physical(path: Path) -> int:
    return path.stat().st_blocks * 512


def info(path: Path) -> dict[str, Any]:
    return dict(json.loads(run("qemu-img", "info", "-U", "--output=json", str(path))))


def depth(path: Path) -> int:
    """The number of images in its chain, as qemu-img walks it."""
    return len(json.loads(run("qemu-img", "info", "-U", "--backing-chain", "--output=json", str(path))))


def checked(path: Path) -> dict[str, int]:
    """Corruptions, leaks and errors, as qemu-img finds them."""
    done = subprocess.run(["qemu-img", "check", "--output=json", str(path)], capture_output=True, check=False)
    said = json.loads(done.stdout)
    return {
        "corruptions": said.get("corruptions", 0), "leaks": said.get("leaks", 0), "errors": said["check-errors"],
    }  # fmt: skip


def content_of(path: Path, copy: Path) -> Path:
    """All that a guest would read from it, in a raw file to compare with later."""
    run("qemu-img", "convert", "-O", "raw", str(path), str(copy))
    return copy


def equal(left: Path, right: Path) -> bool:
    return subprocess.run(["qemu-img", "compare", "-q", str(left), str(right)], check=False).returncode == 0
