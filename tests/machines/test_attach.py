"""Images attached to a real host by its kernel: what is read and written; LVM, udev and multipath ignore them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.rewrite import attached
from storage_admin.agent.protocol import b64
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Job
from tests.agent.harness import NO_RESERVE
from tests.factories import HostFactory
from tests.harness.processes import wait_until
from tests.machines.host import DEVICE, MIB, POOL, Host, host
from tests.machines.nfs import Pinged
from tests.working import ADMIN, image_at, register, scan, succeeded, work

__all__ = ["host"]

pytestmark = pytest.mark.machines

#: A table of one partition, which begins at 1 MiB and takes 14 MiB (type 83).
TABLE = bytes(446) + bytes((0, 0, 2, 0, 0x83, 0, 0, 0)) + (2048).to_bytes(4, "little")
TABLE += (14 * 2048).to_bytes(4, "little") + bytes(48) + b"\x55\xaa"
#: What an admin's tools say of LVM, with a device file and without, asking udev and looking through /dev.
LVM = "; ".join(
    f"{tool} --config 'devices {{ {how} }}' 2>&1"
    for tool in ("pvs -o +pv_uuid", "vgs -o +vg_uuid", "lvs -a -o +lv_uuid,devices")
    for how in ("obtain_device_list_from_udev=1", "obtain_device_list_from_udev=0", 'scan=["/dev"] use_devicesfile=0')
)
LINKS = "udevadm settle; find /dev/disk -type l ! -path '*/by-diskseq/*' -printf '%p %l\\n' | sort"
NAMES = f"{LINKS}; dmsetup info -c; blkid -c /dev/null; multipath -v2 -ll"


@pytest.fixture
def disk(host: Host) -> Iterator[int]:
    """``vm.qcow2`` on ``base.raw``, with a filesystem in a partition; its size."""
    host.run(f"rm -rf {POOL}/* {POOL}/.sa-*; truncate -s 16M {POOL}/base.raw; mkdir -p /mnt/inside")
    host.run(f"mkfs.ext4 -q -F -b 1024 -E offset={MIB} {POOL}/base.raw 14M; sync")
    host.run(f"dd of={POOL}/base.raw conv=notrunc status=none", TABLE)
    host.run(
        f"mount -o loop,offset={MIB} {POOL}/base.raw /mnt/inside; echo words >/mnt/inside/file; umount /mnt/inside"
    )
    host.run(f"cd {POOL}; qemu-img create -q -f qcow2 -F raw -b base.raw vm.qcow2; cp base.raw /root/whole; sync")
    yield 16 * MIB
    host.run("umount /mnt/inside || true; pkill -x qemu-nbd || true; while pgrep -x qemu-nbd; do sleep 0.1; done")


@pytest.mark.parametrize("name", ["vm.qcow2", "copy.raw", "copy.vmdk"])
def test_an_image_is_read_as_a_whole_and_nothing_can_write_to_it(host: Host, disk: int, name: str) -> None:
    form, below = name.rpartition(".")[2], ["base.raw"] if name == "vm.qcow2" else []
    host.run(f"cd {POOL}; [ -e {name} ] || qemu-img convert -f raw -O {form} base.raw {name}; sha256sum * >/root/sums")
    told = host.attach(name, disk, *below)
    assert (told["size"], told["read_only"]) == (disk, True)
    assert host.run(f"cmp {DEVICE} /root/whole && echo same") == "same\n"
    assert host.run("ls -d /dev/nbd0* /sys/block/nbd0/nbd0p* 2>/dev/null || true") == ""
    assert host.run(f"dd if=/dev/zero of={DEVICE} bs=4k count=1 oflag=direct 2>&1 || echo failed").endswith("failed\n")
    mounts = f"mount -o ro,noload,offset={MIB} {DEVICE} /mnt/inside"
    assert host.run(f"{mounts}; cat /mnt/inside/file; umount /mnt/inside") == "words\n"
    [row] = host.attached()
    assert (row["job"], row["by"], row["read_only"], row["file"]) == ("j1", "ada", True, f"{POOL}/{name}")
    assert host.run("cat /sys/block/nbd0/pid").strip() in host.run(f"ls /proc/{row['pid']}/task").split()
    assert host.detach(name) == {"device": "nbd0", "read_only": True, "attached": []}
    assert host.left() == "/dev/nbd0\n"
    assert host.run(f"cd {POOL}; sha256sum --quiet -c /root/sums && echo same") == "same\n"


def test_a_clone_with_the_hosts_own_volume_group_and_filesystem_is_ignored_by_the_host(host: Host) -> None:
    host.run(
        "truncate -s 64M /root/pv; losetup /dev/loop7 /root/pv; pvcreate -q /dev/loop7; vgcreate -q own /dev/loop7; "
        "lvcreate -q -y -Zn -Wn -L 8M -n root own; mkfs.ext4 -q /dev/own/root; sync; "
        f"rm -f {POOL}/*; qemu-img convert -f raw -O qcow2 /root/pv {POOL}/clone.qcow2; "
        f"qemu-img convert -f raw -O qcow2 /dev/own/root {POOL}/filesystem.qcow2"
    )
    try:
        before = host.run(LVM), host.run(NAMES)
        for name, size in (("clone.qcow2", 64 * MIB), ("filesystem.qcow2", 8 * MIB)):
            host.attach(name, size)
            host.run("udevadm trigger --subsystem-match=block --action=change; udevadm settle; pvscan --cache -aay")
            assert (host.run(LVM), host.run(NAMES)) == before
            assert host.run("udevadm info /sys/block/nbd0 | grep -E 'ID_FS|LVM|MPATH' || true") == ""
            assert host.detach(name)["attached"] == []
            assert (host.run(LVM), host.run(NAMES)) == before
        # Not even where the host's own is away does the clone take its place.
        host.run("vgchange -q -an own; losetup -d /dev/loop7; udevadm settle")
        host.attach("clone.qcow2", 64 * MIB)
        host.run("udevadm trigger --subsystem-match=block --action=change; udevadm settle; vgchange -ay 2>&1")
        assert "own" not in host.run(f"{LVM}; {NAMES}")
        assert host.detach("clone.qcow2")["attached"] == []
        # By hand, in the way that everybody does it, it does.
        host.run(f"qemu-nbd --fork -r -c /dev/nbd1 -f qcow2 {POOL}/clone.qcow2; udevadm settle")
        wait_until(lambda: "own" in host.run(LVM), 30, "LVM finds a device that stands in /dev")
        [row] = host.attached()
        assert (row["device"], row["path"], row["job"], row["at"]) == ("nbd1", "/dev/nbd1", None, None)
    finally:
        host.run("vgchange -q -an own 2>&1 || true; qemu-nbd -d /dev/nbd1; losetup -d /dev/loop7 2>&1 || true")


def test_it_is_attached_each_time_of_fifty(host: Host, disk: int) -> None:
    for _ in range(50):
        host.attach("vm.qcow2", disk, "base.raw")
        assert host.run("ls -A /dev/.storage-admin") == "nbd0\nnbd0.json\n"
        assert host.detach("vm.qcow2")["attached"] == []


def test_a_device_that_is_in_use_is_not_detached(host: Host, disk: int) -> None:
    host.attach("vm.qcow2", disk, "base.raw")
    host.run(f"mount -o ro,noload,offset={MIB} {DEVICE} /mnt/inside")
    refused = [host.detach("vm.qcow2")]
    host.run("umount /mnt/inside; losetup -D")
    host.run(f"sh -c 'exec sleep 600 <{DEVICE}' >/dev/null 2>&1 & echo $! >/root/sleeps; sleep 1")
    refused.append(host.detach("vm.qcow2"))
    host.run("kill $(cat /root/sleeps)")
    host.run(f"echo 0 8 linear {DEVICE} 0 | dmsetup create stands --readonly")
    refused.append(host.detach("vm.qcow2"))
    host.run("dmsetup remove stands")
    assert [one.get("code") for one in refused] == ["device_in_use"] * 3, refused
    whos = ("/mnt/inside", "sleep", "dm-")
    assert [who in one["detail"] or "loop" in one["detail"] for who, one in zip(whos, refused, strict=True)] == [
        True
    ] * 3
    assert host.run(f"cmp {DEVICE} /root/whole && echo same") == "same\n"
    assert host.detach("vm.qcow2")["attached"] == []


def test_no_other_job_and_no_guest_gets_at_an_attached_image_or_its_base(host: Host, disk: int) -> None:
    host.attach("vm.qcow2", disk, "base.raw")
    image, base = host.args("vm.qcow2", disk, "base.raw"), host.link("base.raw", "raw") | {"virtual_size": disk}
    tried: dict[str, dict[str, Any]] = {
        **{f"reclaim {how}": {"method": how} for how in ("compress", "copy", "in_place")},
        "check": {"repair": "all"}, "flatten": {"method": "rebase"}, "grow": {"size": 2 * disk}, "commit": {},
        "attach": {}, "send": {"length": 0, "chain": []},
    }  # fmt: skip
    answers = {}
    for how, own in tried.items():
        answers[how] = host.ask(how.partition(" ")[0], image | {"reserve": NO_RESERVE, "idle_io": False} | own, "j2")
    below = base | {"children_known": True, "reserve": NO_RESERVE, "chain": []}
    answers["reclaim base"] = host.ask("reclaim", below | {"method": "copy", "idle_io": False}, "j2")
    aside = {name: value for name, value in below.items() if name not in {"format", "virtual_size", "reserve", "chain"}}
    answers["set aside"] = host.ask("set_aside", aside | {"pools": []}, "j2")
    assert {how: one.get("code") for how, one in answers.items()} == dict.fromkeys(answers, "image_in_use")
    for path in ("vm.qcow2", "base.raw"):
        form = path.rpartition(".")[2]
        assert host.run(f"qemu-io -f {form} -c 'write 0 512' {POOL}/{path} 2>&1 || echo failed").endswith("failed\n")
    assert host.run(f"ls -A {POOL}").split() == ["base.raw", "vm.qcow2"]
    assert host.run(f"cmp {POOL}/base.raw /root/whole && echo same") == "same\n"
    assert host.detach("vm.qcow2")["attached"] == []


@pytest.mark.parametrize("how", ["die taken", "die connected"])
def test_a_killed_agent_leaves_what_is_found_again(host: Host, disk: int, how: str) -> None:
    with host.agent(how) as agent:
        agent.request("attach", host.args("vm.qcow2", disk, "base.raw", by="ada"), "j7")
        while agent.next() is not None:
            pass
    if how == "die connected":
        [row] = host.attached()
        assert (row["device"], row["job"], row["path"]) == ("nbd0", "j7", DEVICE)
        assert host.run(f"cmp {DEVICE} /root/whole && echo same") == "same\n"
    else:
        assert host.attached() == []
        host.attach("vm.qcow2", disk, "base.raw")
    assert host.detach("vm.qcow2")["attached"] == []
    assert host.left() == "/dev/nbd0\n"


def test_it_outlives_the_service_that_has_attached_it_and_its_own_death_is_seen(host: Host, disk: int) -> None:
    service = "systemd-run --quiet --pipe --collect --unit=dashboard python3 /root/agent.pyz"
    with Pinged(host.machine.command(service)) as agent:
        agent.request("attach", host.args("vm.qcow2", disk, "base.raw", by="ada"))
        assert agent.answer().get("path") == DEVICE
    wait_until(lambda: "inactive" in host.run("systemctl is-active dashboard || true"), 60, "the service has ended")
    [row] = host.attached()
    assert host.run(f"cat /proc/{row['pid']}/cgroup").strip().endswith("/storage-admin-attached")
    assert host.run(f"cmp {DEVICE} /root/whole && echo same") == "same\n"
    host.run(f"kill -9 {row['pid']}; while [ -e /sys/block/nbd0/pid ]; do sleep 0.1; done")
    assert host.attached() == []
    host.attach("vm.qcow2", disk, "base.raw")
    assert host.detach("vm.qcow2")["attached"] == []
    assert host.left() == "/dev/nbd0\n"


def test_what_is_written_to_a_writable_device_is_in_the_image_once_it_is_detached(host: Host, disk: int) -> None:
    pools = [{"path_b64": b64(POOL.encode()), "kind": "dir", "known_b64": ""}]
    answer = host.ask("attach", {**host.link("base.raw", "raw"), "virtual_size": disk, "chain": [], "writable": True}
                      | {"children_known": True, "pools": pools})  # fmt: skip
    assert answer.get("code") == "has_overlays", answer
    told = host.attach("vm.qcow2", disk, "base.raw", writable=True, pools=pools)
    assert told["read_only"] is False
    # Nobody syncs it.
    host.run(f"head -c 300000 /dev/zero | tr '\\0' w | dd of={DEVICE} bs=1000 seek=2000 conv=notrunc status=none")
    host.run("head -c 300000 /dev/zero | tr '\\0' w | dd of=/root/whole bs=1000 seek=2000 conv=notrunc status=none")
    assert host.detach("vm.qcow2") == {"device": "nbd0", "read_only": False, "attached": []}
    assert host.run(f"qemu-img check -q -f qcow2 {POOL}/vm.qcow2 && echo sound") == "sound\n"
    assert host.run(f"qemu-img compare -q -f raw -F qcow2 /root/whole {POOL}/vm.qcow2 && echo same") == "same\n"


def test_a_module_that_makes_partitions_and_encrypted_images_are_refused(host: Host, disk: int) -> None:
    args = host.args("vm.qcow2", disk, "base.raw", by="ada")
    host.run("rmmod nbd 2>/dev/null || true; modprobe nbd max_part=16")
    try:
        assert host.ask("attach", args).get("code") == "nbd_partitions"
        assert host.ask("attached", {})["nbd"] == "nbd_partitions"
    finally:
        host.run("rmmod nbd")
    assert host.ask("attached", {})["nbd"] == "", "it can be loaded"
    secret = "--object secret,id=s,data=x -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"
    host.run(f"qemu-img create -q -f qcow2 {secret} {POOL}/luks.qcow2 1M")
    assert host.ask("attach", host.args("luks.qcow2", MIB, by="ada")).get("code") == "encrypted"
    host.attach("vm.qcow2", disk, "base.raw")
    assert host.run("cat /sys/module/nbd/parameters/max_part") == "0\n"
    assert host.detach("vm.qcow2")["attached"] == []


@pytest.mark.parametrize("writable", [False, True])
def test_a_kernel_without_landlock_attaches_as_well(host: Host, disk: int, writable: bool) -> None:
    args = host.args("vm.qcow2", disk, "base.raw", by="ada", writable=writable)
    assert host.ask("attach", args, how="no landlock").get("path") == DEVICE
    assert host.run(f"cmp {DEVICE} /root/whole && echo same") == "same\n"
    [row] = host.attached()
    # It sees nothing but what it was given.
    assert host.run(f"ls -A /proc/{row['pid']}/root/dev").split() == [".storage-admin", "null", "urandom"]
    assert host.detach("vm.qcow2")["attached"] == []
    assert host.left() == "/dev/nbd0\n"


@pytest.fixture
def as_host(host: Host, disk: int, monkeypatch: pytest.MonkeyPatch) -> StoragePool:
    """The pool of the machine, as a host of the dashboard."""
    command = host.machine.command("python3 /root/agent.pyz")
    for module in (runner, asking):
        monkeypatch.setattr(module, "agent_command", lambda *_: contextlib.nullcontext(command))
    row = HostFactory.create(slug="far", kind="ssh", transport="forced", last_seen=None, capabilities={})
    return register(row, Path(POOL))


@pytest.mark.django_db
@pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")
def test_jobs_attach_and_detach_and_each_scan_finds_what_is_attached(as_host: StoragePool, host: Host) -> None:
    scan(as_host.host)
    image = image_at(Path(f"{POOL}/vm.qcow2"))
    job = succeeded(work("attach", image.pk, ADMIN))
    assert host.run(f"cmp {DEVICE} /root/whole && echo same") == "same\n"
    # Whatever the database knew is found again.
    Row.objects.update(capabilities={})
    scan(as_host.host)
    [row] = attached.listed(ADMIN)
    assert (row.image, row.by, row.job, row.path, row.writable) == (image, ADMIN.name, job, DEVICE, False)
    codes = {one.code for one in services.plan(ADMIN, "reclaim", image.pk, {}).refusals}
    assert codes == {"image_in_use"}
    assert image_at(Path(f"{POOL}/base.raw")).in_use
    host.run(f"mount -o ro,noload,offset={MIB} {DEVICE} /mnt/inside")
    job = work("detach", image.pk, ADMIN)
    assert (job.state, job.error_code) == (Job.State.FAILED, "device_in_use")
    host.run("umount /mnt/inside; losetup -D")
    assert work("detach", image.pk, ADMIN).state == Job.State.SUCCEEDED
    assert attached.listed(ADMIN) == []
    assert host.left() == "/dev/nbd0\n"
