"""Volumes of ZFS that nobody needs, of a real host: set aside, restored, deleted, and cut off in between."""

import contextlib
from collections.abc import Iterator

import pytest

from images.models import Image
from storage_admin.hosts import asking
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host as Row
from storage_admin.jobs import runner, services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, StoragePoolFactory
from tests.machines.host import MIB, Host, host
from tests.machines.inside import FIRST_PORT
from tests.machines.test_volume_orphans import OPTIONS, aside, volume
from tests.working import ADMIN, run, scan, succeeded, work

__all__ = ["host"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

THICK, THIN, FILES = "vm-900-disk-0", "vm-901-disk-0", "subvol-902-disk-0"
DD = "udevadm settle; dd if=/dev/urandom of=/dev/zvol/tank/data/{0} bs=1M oflag=direct status=none count="
MADE = {
    THICK: f"zfs create -V 16M tank/data/{{0}}; {DD}6; zpool sync",
    THIN: f"zfs create -s -V 16M tank/data/{{0}}; {DD}4; zpool sync",
    FILES: "zfs create -o refquota=32M tank/data/{0}; head -c 5M /dev/urandom >/vms/{0}/file; zpool sync",
}
WHERE = {THICK: "/dev/zvol/tank/data", THIN: "/dev/zvol/tank/data", FILES: "/vms"}
#: All that a job may change of the datasets.
STATE = (
    "udevadm settle; zfs get -Hp -t filesystem,volume -o name,property,value,source "
    "guid,volmode,canmount,mounted,storage-admin:aside; ls /dev/zvol/tank/data; ls /vms"
)


@pytest.fixture(scope="module")
def tank(host: Host) -> Iterator[Host]:
    """A ZFS pool with a dataset of Proxmox VE's."""
    host.run("modprobe zfs; truncate -s 512M /root/zd1; mkdir -p /mnt/volume")
    host.run("zpool create -o ashift=12 -m /tank tank /root/zd1; zfs create -o mountpoint=/vms tank/data")
    yield host
    host.run("zpool destroy -f tank; rm /root/zd1")


@pytest.fixture
def row(host: Host, monkeypatch: pytest.MonkeyPatch) -> Row:
    """The machine as a host of the dashboard, with a storage of Proxmox VE's; its agents are loaded already."""
    command = host.machine.connection(FIRST_PORT)
    for module in (runner, asking):
        monkeypatch.setattr(module, "agent_command", lambda *_: contextlib.nullcontext(command))
    monkeypatch.setattr(reader, "read", lambda host: LibvirtFacts())
    row = HostFactory.create(slug="far", kind="ssh", transport="forced", last_seen=None, capabilities={})
    StoragePoolFactory.create(volumes=True, host=row, name="local-zfs", kind="zfs", path="/vms")
    return row


@pytest.fixture
def site(tank: Host, row: Row, name: str) -> Iterator[Host]:
    """In that storage a volume of a guest that is gone: a thick one, one that had no device, or a container's."""
    tank.run(MADE[name].format(name))
    scan(row)
    if name == THIN:
        tank.run(f"udevadm settle; zfs set volmode=none tank/data/{name}")
    yield tank
    tank.run(
        "umount /mnt/volume 2>/dev/null; kill $(cat /root/sleeper) 2>/dev/null; rm -f /root/sleeper; udevadm settle"
    )
    each = "for one in $(zfs list -Ho name | tail -n +3 | grep -v /.*/.*/); do"
    tank.run(f"{each} for try in 1 2 3 4 5 6 7 8 9; do zfs destroy -R $one && break; sleep 1; done; done")


def digest(site: Host, name: str) -> str:
    """Of the content of a volume that may be used."""
    if name == THIN:
        site.run(f"zfs set volmode=dev tank/data/{name}; udevadm settle")
    try:
        return site.run(f"udevadm settle; sha256sum < {WHERE[name]}/{name}{'/file' if name == FILES else ''}")
    finally:
        if name == THIN:
            site.run(f"udevadm settle; zfs set volmode=none tank/data/{name}")


@pytest.mark.parametrize("name", [FILES])
def test_only_what_proxmox_ve_has_named_and_no_guest_needs_is_an_orphan(site: Host, row: Row, name: str) -> None:
    site.run("zfs create -s -V 16M tank/data/base-101-disk-0; zfs snapshot tank/data/base-101-disk-0@__base__")
    site.run("zfs clone tank/data/base-101-disk-0@__base__ tank/data/vm-102-disk-0; zfs create -s -V 16M tank/root")
    site.run("zfs create -p -s -V 16M tank/data/more/vm-103-disk-0; udevadm settle")
    scan(row)
    assert {one.name: one.orphan for one in Image.objects.all()} == {
        name: True, "vm-102-disk-0": True, "base-101-disk-0": False, "vm-103-disk-0": False, "root": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", [THICK, THIN, FILES])
def test_a_volume_is_set_aside_and_comes_back_as_it_was(site: Host, row: Row, name: str) -> None:
    content, before = digest(site, name), site.run(STATE)
    job = succeeded(aside(name))
    other = f"tank/data/.sa-{job.uid}.aside"
    shown = site.run(STATE)
    assert (f"{other}\tguid" in shown, f"tank/data/{name}\t" in shown) == (True, False)
    assert f"{other}\t{'canmount	off' if name == FILES else 'volmode	none'}\tlocal" in shown
    assert site.run(f"ls /vms /dev/zvol/tank/data | grep -cF -e {name} -e {job.uid} || true").strip() == "0"
    assert (scan(row)["vanished"], volume(name).state) == (0, "set_aside")
    assert work("restore_aside", volume(name).pk, ADMIN).state == "succeeded"
    assert site.run(STATE) == before
    assert digest(site, name) == content
    scan(row)
    assert volume(name).state == "ok"


@pytest.mark.parametrize("name", [THICK, THIN, FILES])
def test_a_deleted_volume_frees_what_was_said(site: Host, row: Row, name: str) -> None:
    expected = volume(name).deletion_frees
    assert expected is not None
    assert expected >= {THICK: 6, THIN: 4, FILES: 5}[name] * MIB
    aside(name)
    Image.every.filter(name=name).update(aside_until=None)
    used, available = (int(one) for one in site.run("zpool sync; zfs list -Hpo used,available tank").split())
    job = succeeded(work("delete_aside", volume(name).pk, ADMIN, confirm_name=name))
    freed = (job.result or {})["freed_bytes"]
    assert abs(freed - expected) < 256 << 10
    after, more = (int(one) for one in site.run("zpool sync; zfs list -Hpo used,available tank").split())
    assert abs((used - after) - (more - available)) < 256 << 10
    assert site.run("zpool get -Hpo value freeing tank").strip() == "0"
    assert name not in site.run("zfs list -Ho name")
    assert scan(row)["vanished"] == 0


#: Of a command in the background, which stays; Z is ZFS's tool, D the dataset, and what it is below /dev/zvol and /vms.
STAYED = "echo $! >/root/sleeper; sleep 3"
STAYS = f"exec sleep 1000 >/dev/null 2>&1) & {STAYED}"
UNSHARED = f'(exec unshare -m --propagation private sh -c "cd /vms/$N; exec sleep 1000" >/dev/null 2>&1) & {STAYED}'
SHORT = "Z=$(ls /usr/sbin/zfs.real 2>/dev/null || echo zfs); N={0}; D=tank/data/$N; "
END = "kill $(cat /root/sleeper) 2>/dev/null; sleep 1"


@pytest.mark.parametrize(
    ("name", "does", "ends", "code"),
    [
        (THICK, "mkfs.ext4 -q /dev/zvol/$D; mount /dev/zvol/$D /mnt/volume", "umount /mnt/volume", "image_in_use"),
        (FILES, "mount --bind /vms/$N /mnt/volume", "umount /mnt/volume", "image_in_use"),
        (FILES, f"(cd /vms/$N; {STAYS}", END, "image_in_use"),
        (FILES, "zfs set sharenfs=on $D", "zfs inherit sharenfs $D", "image_in_use"),
        (THICK, "zfs snapshot $D@__replicate_900-0_1__", "zfs destroy $D@__replicate_900-0_1__", "has_overlays"),
        (FILES, "zfs create -o canmount=off $D/below", "zfs destroy $D/below", "unsupported_pool"),
        (THICK, "zpool set multihost=on tank", "zpool set multihost=off tank", "shared_pool"),
        (THICK, "zfs rename $D tank/o; zfs create -s -V 16M $D", "zfs destroy $D; zfs rename tank/o $D", "stale_plan"),
    ],
)
def test_a_volume_that_somebody_uses_or_has_changed_stays(
    site: Host, row: Row, name: str, does: str, ends: str, code: str
) -> None:
    before = site.run(STATE)
    site.run(SHORT.format(name) + does)
    try:
        job = aside(name)
    finally:
        site.run(f"udevadm settle; {SHORT.format(name)}{ends}")
    assert (job.state, job.error_code) == ("failed", code), job.error_detail
    assert site.run(STATE) == before
    assert aside(name).state == "succeeded"


#: ZFS's tool, which does something more right before, or right after, one of its commands.
WRAPPED = r"""
mv /usr/sbin/zfs /usr/sbin/zfs.real
cat >/usr/sbin/zfs <<'END'
#!/bin/sh
{more}
case "$*" in
{command}) {before}
    /usr/sbin/zfs.real "$@" || exit
    {after} ;;
*) exec /usr/sbin/zfs.real "$@" ;;
esac
END
chmod +x /usr/sbin/zfs
"""
UNWRAP = "mv /usr/sbin/zfs.real /usr/sbin/zfs"


@pytest.mark.parametrize(
    ("name", "command", "before", "after"),
    [
        (THICK, "rename*", "$Z snapshot $D@a; $Z clone $D@a tank/new", ""),
        (THICK, "rename*", "", f"$Z set volmode=dev $3; udevadm settle; (exec <>/dev/zvol/$3; {STAYS}"),
        (THICK, "'set volmode=none'*", f"(exec <>/dev/zvol/$D; {STAYS}", ""),
        (FILES, "'set canmount=off'*", UNSHARED, ""),
    ],
)
def test_who_comes_in_the_last_moment_keeps_the_volume_under_its_name(
    site: Host, row: Row, name: str, command: str, before: str, after: str
) -> None:
    content, known = digest(site, name), site.run(STATE)
    once = "[ -e /root/once ] || {{ touch /root/once; {0}; }}"
    does = {"before": before and once.format(before), "after": after and once.format(after)}
    site.run(WRAPPED.format(command=command, more=SHORT.format(name), **does))
    try:
        job = aside(name)
    finally:
        site.run(f"{UNWRAP}; rm /root/once")
    assert (job.state, job.error_code) in {("failed", "image_in_use"), ("failed", "has_overlays")}, job.error_detail
    site.run(f"{END}; udevadm settle; zfs destroy -R tank/data/{name}@a || true")
    assert (site.run(STATE), digest(site, name)) == (known, content)


KILL = "kill -KILL $PPID; sleep 1"
STEPS = [
    ("set_aside", "'set storage-admin'*"), ("set_aside", "'set {mode}'*"), ("set_aside", "rename*"),
    ("restore_aside", "rename*"), ("restore_aside", "'inherit -S'*"), ("restore_aside", "'inherit storage-admin'*"),
    ("delete_aside", "destroy*"),
]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "kind", "command"),
    [
        *((name, *step) for name in (THICK, FILES) for step in STEPS),
        (THICK, "restore_aside", "'set {mode}'*"),
        (FILES, "restore_aside", "mount*"),
    ],
)
def test_a_death_at_any_step_leaves_the_volume_whole_and_the_row_true(
    site: Host, row: Row, name: str, kind: str, command: str, when: str
) -> None:
    content, known, image = digest(site, name), site.run(STATE), volume(name)
    options = OPTIONS[kind] | ({"confirm_name": name} if kind == "delete_aside" else {})
    if kind != "set_aside":
        aside(name)
        Image.every.filter(pk=image.pk).update(aside_until=None)
    at = command.format(mode="canmount" if name == FILES else "volmode")
    site.run(WRAPPED.format(command=at, **{"before": "", "after": "", "more": "", when: KILL}))
    try:
        job = run(services.submit(ADMIN, kind, image.pk, options))
    finally:
        site.run(UNWRAP)
    assert job.state == "interrupted", (job.error_code, job.error_detail)
    # The last command of the agent that was killed goes on, and holds its lock: until then nothing is recovered.
    site.run("while pgrep -f 'sh /usr/sbin/[z]fs' >/dev/null; do sleep 0.2; done")
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    work("recover", row.pk)
    scan(row)
    state, names = Image.every.get(pk=image.pk).state, site.run("zfs list -Ho name").split()
    mine = [one.rpartition("/")[2] for one in names if one.endswith(name) or ".sa-" in one]
    if state == "deleted":
        assert (kind, mine) == ("delete_aside", [])
        return
    if state == "set_aside":
        assert [one[:4] for one in mine] == [".sa-"]
        Image.every.filter(pk=image.pk).update(aside_until=None)
        assert work("restore_aside", image.pk, ADMIN).state == "succeeded"
    else:
        assert (state, mine) == ("ok", [name])
    assert (site.run(STATE), digest(site, name)) == (known, content)
