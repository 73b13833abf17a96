"""Running guests of a real libvirt with filesystems of their own, and Debian's guest agent in them."""

import subprocess
import time
from pathlib import Path

import libvirt
import libvirt_qemu
import pytest

from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from tests.harness.guests import Disk, Domains, LibvirtGuest, Starts
from tests.live.chains import make_chain
from tests.working import scanned_machine

MIB = 1 << 20
OnChain = tuple[LibvirtGuest, Guest, Path]


def filesystem_image(path: Path, form: str = "qcow2", size: str = "256M", *options: str) -> Path:
    """An image with an ext4 on it."""
    raw = path.with_suffix(".ext4")
    subprocess.run(["truncate", "-s", size, raw], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", raw], check=True)
    subprocess.run(["qemu-img", "convert", "-O", form, *options, raw, path], check=True)
    raw.unlink()
    return path


def wait_for_agent(guest: LibvirtGuest) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            libvirt_qemu.qemuAgentCommand(guest.domain, '{"execute":"guest-ping"}', 5, 0)
        except libvirt.libvirtError:
            assert time.monotonic() < deadline, "the guest's agent does not answer"
            time.sleep(0.2)
        else:
            return


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def agent_guest(domains: Domains) -> Starts:
    """``agent_guest(Disk(path), …)``: a guest whose agent answers, the filesystem of its first disk at /mnt."""

    def started(*disks: Disk, **how: str) -> LibvirtGuest:
        guest = domains.run(disks, agent=True, **how)
        guest.console.run("mount -t ext4 /dev/vda /mnt")
        wait_for_agent(guest)
        return guest

    return started


@pytest.fixture
def chain(shared_folder: Path) -> list[Path]:
    """The chain of :func:`make_chain`, in a folder that libvirt's user may enter."""
    return make_chain(shared_folder)


@pytest.fixture
def on_chain(tcg_guest: Starts, chain: list[Path]) -> OnChain:
    """A guest that runs on the chain, its row as a scan has made it, and the folder of its images."""
    guest, folder = tcg_guest(Disk(chain[0])), chain[0].parent
    return guest, scanned(folder, guest)[1], folder


def deletes(guest: LibvirtGuest, mib: int) -> None:
    """The guest writes so many MiB of noise into a file and deletes that."""
    guest.console.run(f"dd if=/dev/urandom of=/mnt/noise bs=1M count={mib} 2>/dev/null; sync")
    guest.console.run("rm /mnt/noise; sync")


def scanned(folder: Path, guest: LibvirtGuest) -> tuple[Host, Guest]:
    """This machine with that folder as a pool, and the guest as the scan has found it."""
    row = seen(folder, guest.domain)
    return row.host, row


def seen(folder: Path, domain: "libvirt.virDomain") -> Guest:
    """A domain as a scan of this machine, with that folder as a pool, has found it."""
    scanned_machine(folder)
    return Guest.objects.select_related("host").get(uid=domain.UUIDString())
