import subprocess
from collections.abc import Callable
from pathlib import Path

import libvirt
import pytest
import requests

from storage_admin.accounts.roles import SYSTEM
from storage_admin.hosts.services import ensure_local_host
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit
from tests.harness.guests import Disk, Domains, Guest, LibvirtGuest, write_pattern
from tests.harness.services import Dashboard, LiveWorker, RedisServer

MIB = 1024**2


def image(folder: Path, name: str = "disk.qcow2", base: str = "") -> Path:
    backing = ["-b", base, "-F", "qcow2"] if base else []
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *backing, str(folder / name), "64M"], check=True)
    return folder / name


def content(path: Path, offset: int, length: int) -> set[int]:
    """Which bytes stand in a part of an image."""
    raw = path.with_suffix(".check")
    subprocess.run(["qemu-img", "convert", "-U", "-O", "raw", str(path), str(raw)], check=True)
    with raw.open("rb") as file:
        file.seek(offset)
        return set(file.read(length))


@pytest.mark.guest
def test_a_domain_writes_what_it_is_told_and_reads_it_back(
    tcg_guest: Callable[..., LibvirtGuest], shared_folder: Path
) -> None:
    disk = image(shared_folder)
    guest = tcg_guest(Disk(disk))
    empty = guest.digest(3, 2)
    guest.write(3, 2, 0xA5)
    assert guest.digest(3, 2) != empty
    guest.stop()
    assert content(disk, 3 * MIB, 2 * MIB) == {0xA5}
    assert content(disk, 5 * MIB, MIB) == {0}


@pytest.mark.guest
def test_a_running_domain_keeps_others_from_writing_to_its_image(
    tcg_guest: Callable[..., LibvirtGuest], shared_folder: Path
) -> None:
    disk = image(shared_folder)
    guest = tcg_guest(Disk(disk))
    with pytest.raises(subprocess.CalledProcessError):
        write_pattern(disk, "qcow2", (0, 1, 1))
    guest.stop()
    write_pattern(disk, "qcow2", (0, 1, 1))


@pytest.mark.guest
def test_a_guest_without_libvirt_uses_a_chain(plain_guest: Callable[..., Guest], shared_folder: Path) -> None:
    base = image(shared_folder, "base.qcow2")
    write_pattern(base, "qcow2", (0, 1, 7))
    top = image(shared_folder, "top.qcow2", "base.qcow2")
    guest = plain_guest(Disk(top))
    assert guest.console.run("dd if=/dev/vda bs=1 count=3 2>/dev/null | od -An -tu1").split() == ["7", "7", "7"]
    guest.write(0, 1, 9)
    assert content(top, 0, MIB) == {9}
    assert content(base, 0, MIB) == {7}


@pytest.mark.guest
def test_no_domain_of_a_test_stays(libvirtd: str, shared_folder: Path) -> None:
    with Domains(libvirtd, shared_folder) as made:
        name = made.define([Disk(image(shared_folder))]).name()
    with pytest.raises(libvirt.libvirtError, match="not found"):
        libvirt.open(libvirtd).lookupByName(name)


@pytest.mark.services
def test_a_small_filesystem_gets_full(small_filesystem: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_filesystem / "large").write_bytes(b"x" * 80 * MIB)


@pytest.mark.services
def test_redis_answers_at_the_address_of_the_settings(redis_server: RedisServer) -> None:
    assert redis_server.answers()


@pytest.mark.services
def test_a_worker_does_a_job_of_the_test(live_worker: LiveWorker) -> None:
    job = submit(SYSTEM, "scan", ensure_local_host().pk, {})
    live_worker.wait_for(lambda: not Job.objects.get(pk=job.pk).active, 60, "the scan ends")
    job.refresh_from_db()
    assert (job.state, job.error_detail) == ("succeeded", "")


@pytest.mark.services
def test_the_dashboard_is_healthy_and_lets_its_first_admin_in(running_dashboard_session: Dashboard) -> None:
    dashboard = running_dashboard_session
    assert dashboard.password
    token = dashboard.manage("create_token", "harness", "--role", "viewer").strip()
    answer = requests.get(f"{dashboard.url}/api/v1/hosts/", headers={"Authorization": f"Bearer {token}"}, timeout=10)
    assert [host["slug"] for host in answer.json()["results"]] == ["local"]
