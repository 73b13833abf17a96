"""Block jobs of running guests beside virsh: pull, active commit and copy of 1 GiB, and how long the guest waits."""

import os
import shutil
import statistics
import subprocess
from pathlib import Path

from storage_admin.accounts.models import SYSTEM
from storage_admin.guests.models import Guest
from storage_admin.hosts.services import ensure_local_host, register_folder
from tests.harness.guests import Disk, Domains, LibvirtGuest
from tests.harness.libvirtd import libvirtd
from tests.performance.jobs import run_job
from tests.performance.report import Row, seconds
from tests.performance.site import timed

NOTES = (
    (
        "Running guests: a TCG guest on a real libvirt, whose disk has 1 GiB of noise in it, and which writes a block "
        "of 4 KiB with fsync all the time. Beside each other, in turn, each on files of its own: `virsh blockpull`, "
        "`blockcommit --active --pivot` and `blockcopy --transient-job --pivot`, all with `--wait`, and the job as a "
        "worker does it, from its submission to its end. Each is first every second time, and begins with nothing left "
        "to be written to the disk. Medians; virsh looks twice a second how far it is. The longest gap is between "
        "two acknowledged writes by the guest's own clock, in steps of 10 ms, over the whole of it, the pivot included."
    ),
)
ROUNDS = 10
SIZE_MIB = 1024
#: The job's kind, virsh's words, and whether the data lies in the image below.
WAYS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "pull": ("live_flatten", ("blockpull", "--wait"), True),
    "active commit": ("live_merge", ("blockcommit", "--active", "--pivot", "--wait"), False),
    "copy": ("live_copy", ("blockcopy", "--transient-job", "--pivot", "--wait"), False),
}
_WRITES = (
    "touch /writes; ( while [ -e /writes ]; do dd if=/dev/zero of=/dev/vda bs=4096 count=1 seek=327680 "
    "conv=notrunc,fsync 2>/dev/null; cut -d' ' -f1 /proc/uptime >> /times; done; touch /ended ) > /dev/null 2>&1 &"
)


def measure(folder: Path, rounds: int = ROUNDS) -> list[Row]:
    """Times of each way, and the longest gaps."""
    pool = folder / "live"
    pool.mkdir()
    pool.chmod(0o755)  # libvirt's user goes in
    host = ensure_local_host()
    registered = register_folder(SYSTEM, host, str(pool))
    full = folder / "full.qcow2"
    _make_full(folder, full)
    rows = []
    try:
        with libvirtd() as uri:
            for way, (kind, words, below) in WAYS.items():
                took: dict[str, list[float]] = {"virsh": [], "job": []}
                gaps: dict[str, list[float]] = {"virsh": [], "job": []}
                for number in range(rounds):
                    # In turn, each first: neither alone writes while the disk is busy with what the other has written.
                    for who in list(took)[:: 1 if number % 2 else -1]:
                        with Domains(uri, pool) as domains:
                            top = _chain(pool, full, below=below)
                            guest = domains.run([Disk(top)])
                            run_job("scan", host.pk)
                            _begin(guest)
                            os.sync()
                            took[who].append(_done(guest, top, kind, words, by_job=who == "job"))
                            gaps[who].append(_longest_gap(guest))
                        _empty(pool)
                rows += _rows(way, words[0], took, gaps)
    finally:
        registered.delete()
        shutil.rmtree(pool)
        full.unlink()
    return rows


def _rows(way: str, command: str, took: dict[str, list[float]], gaps: dict[str, list[float]]) -> list[Row]:
    job, virsh = (statistics.median(took[who]) for who in ("job", "virsh"))
    gap, other = (statistics.median(gaps[who]) for who in ("job", "virsh"))
    return [
        Row(
            f"{way} of 1 GiB under a guest that writes", seconds(job), f"virsh {command}: {seconds(virsh)}",
            f"{job / virsh:.2f} times the time", "at most 1.1 times", job <= 1.1 * virsh,
        ),
        Row(
            "the guest's longest wait for a write meanwhile", seconds(gap), f"virsh: {seconds(other)}",
            f"{gap - other:+.2f} s", "no longer (by 0.05 s)", gap <= other + 0.05,
        ),
    ]  # fmt: skip


def _make_full(folder: Path, full: Path) -> None:
    raw = folder / "full.raw"
    subprocess.run(
        ["dd", "if=/dev/urandom", f"of={raw}", "bs=1M", f"count={SIZE_MIB}"], check=True, stderr=subprocess.DEVNULL
    )
    subprocess.run(["truncate", "-s", "2G", raw], check=True)
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", raw, full], check=True)
    raw.unlink()


def _chain(pool: Path, full: Path, *, below: bool) -> Path:
    """An overlay, and the image below it; the data is in the lower one, or in the overlay."""
    base, top = pool / "base.qcow2", pool / "top.qcow2"
    if below:
        shutil.copyfile(full, base)
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", top], check=True)
    else:
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", base, "2G"], check=True)
        shutil.copyfile(full, top)
        subprocess.run(["qemu-img", "rebase", "-u", "-b", "base.qcow2", "-F", "qcow2", top], check=True)
    for path in (base, top):
        path.chmod(0o644)  # libvirt's user looks at them before it owns them
    return top


def _begin(guest: LibvirtGuest) -> None:
    guest.console.run(_WRITES)
    guest.console.run("until [ -s /times ]; do sleep 0.1; done; sleep 2")


def _done(guest: LibvirtGuest, top: Path, kind: str, words: tuple[str, ...], *, by_job: bool) -> float:
    if by_job:
        row = Guest.objects.get(uid=guest.domain.UUIDString())
        return run_job(kind, row.pk, {"disk": "vda"})[1]
    command, *options = words
    if command == "blockcopy":
        options += ["--dest", str(top.with_name("top-copy.qcow2")), "--format", "qcow2"]
    return timed("virsh", command, guest.name, "vda", *options)


def _longest_gap(guest: LibvirtGuest) -> float:
    gap = "awk 'NR > 1 && $1 - p > m { m = $1 - p } { p = $1 } END { print m }' /times"
    return float(guest.console.run(f"rm -f /writes; until [ -e /ended ]; do sleep 0.1; done; {gap}"))


def _empty(pool: Path) -> None:
    for path in pool.glob("*.qcow2"):
        path.unlink()
