"""Images that nobody needs, of a real cluster of Ceph: set aside, restored, deleted, and cut off in between."""

from collections.abc import Iterator

import pytest

from images.models import Image
from storage_admin.hosts.models import Host as Row
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import StoragePoolFactory
from tests.harness.debian_trees import Booted
from tests.machines.test_rbd import MIB, cluster, row
from tests.machines.test_volume_orphans import OPTIONS, aside, volume
from tests.working import ADMIN, run, scan, succeeded, work

__all__ = ["cluster", "row"]

pytestmark = [pytest.mark.services, pytest.mark.night, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

GONE = "vm-900-disk-0"
#: Each image with its id and metadata, and each object that is a name.
STATE = (
    "for one in $(rbd ls vms | grep -v bad); do rbd info -p vms --image=$one --format=json | "
    'sed \'s/.*"id":"\\([^"]*\\).*/\\1/\'; echo $one; rbd image-meta list -p vms --image=$one 2>/dev/null; done; '
    "rados -p vms ls | grep -a rbd_id | grep -av bad | sort"
)
NAMES = f"rbd ls vms | grep -F -e {GONE} -e .sa- || true"
DIGEST = f"rbd export --no-progress vms/{GONE} - | sha256sum"
CLEAR = """
kill -9 $(cat /root/sleeper 2>/dev/null) 2>/dev/null || true
rm -f /root/sleeper /etc/libvirt/no
for one in $(rbd ls vms | grep -F -e vm-900 -e .sa- -e new-); do
    rbd snap purge --no-progress vms/$one 2>/dev/null || true
    until rbd rm --no-progress vms/$one >/dev/null 2>&1; do sleep 2; done
done
"""


@pytest.fixture
def site(cluster: Booted, row: Row) -> Iterator[Booted]:
    """A storage of Proxmox VE whose hosts are all known, with an image of a guest that is gone."""
    cluster.run(f"rbd create --size 64M vms/{GONE}; qemu-io -f raw -c 'write -P 7 0 12M' rbd:vms/{GONE} >/dev/null")
    StoragePoolFactory.create(
        volumes=True, host=row, name="ceph", kind="rbd", path="rbd vms", network=True, all_hosts_registered=True
    )
    scan(row)
    yield cluster
    cluster.run(CLEAR)


def test_only_what_proxmox_ve_has_named_and_no_guest_needs_is_an_orphan(site: Booted, row: Row) -> None:
    found = dict(Image.objects.values_list("name", "orphan"))
    assert {name for name, orphan in found.items() if orphan} == {GONE, "vm-102-disk-0"}
    assert [found[name] for name in ("vm-100-disk-0", "base-101-disk-0", "slow", "vm-104-disk-0")] == [
        False, False, None, None,
    ]  # fmt: skip


def test_an_image_is_set_aside_and_comes_back_as_it_was(site: Booted, row: Row) -> None:
    before, content = site.run(STATE), site.run(DIGEST)
    job = succeeded(aside(GONE))
    assert site.run(NAMES).split() == [f".sa-{job.uid}.aside"]
    assert (job.result or {})["held_bytes"] == 12 * MIB
    assert (scan(row)["vanished"], volume(GONE).state) == (0, "set_aside")
    assert work("restore_aside", volume(GONE).pk, ADMIN).state == "succeeded"
    assert (site.run(STATE), site.run(DIGEST)) == (before, content)
    scan(row)
    assert volume(GONE).state == "ok"


def test_a_deleted_image_frees_what_was_said(site: Booted, row: Row) -> None:
    expected, objects = volume(GONE).deletion_frees, "rados -p vms ls | grep -ac rbd_data"
    assert aside(GONE).state == "succeeded"
    Image.every.filter(name=GONE).update(aside_until=None)
    before = int(site.run(objects))
    job = succeeded(work("delete_aside", volume(GONE).pk, ADMIN, confirm_name=GONE))
    assert expected == 12 * MIB == (before - int(site.run(objects))) * 4 * MIB
    # The pool counts a few bytes of the image's own objects as well.
    assert 0 <= (job.result or {})["freed_bytes"] - expected < 4096
    assert site.run(NAMES) == ""
    assert scan(row)["vanished"] == 0


OPENS = "(qemu-io -f raw -c 'sleep 600000' rbd:vms/{0} >/dev/null 2>&1 & echo $! >/root/sleeper)"
OPENED = f"{OPENS}; until rbd status vms/{{0}} | grep -q watcher=; do sleep 0.2; done"
CLOSED = "kill -9 $(cat /root/sleeper)"
UNLOCK = "rbd lock rm vms/{0} x $(rbd lock ls vms/{0} | awk '/client/ {{print $1}}')"


@pytest.mark.parametrize(
    ("does", "ends", "code"),
    [
        (OPENED, CLOSED, "image_in_use"),
        ("rbd lock add vms/{0} x", UNLOCK, "image_in_use"),
        ("rbd snap create --no-progress vms/{0}@s1", "rbd snap rm --no-progress vms/{0}@s1", "has_overlays"),
        ("rbd group create vms/g; rbd group image add vms/g vms/{0}", "rbd group rm vms/g", "unsupported_pool"),
        ("rbd rename vms/{0} vms/new-1; rbd create --size 8M vms/{0}", "true", "stale_plan"),
    ],
)
def test_an_image_that_somebody_uses_or_has_changed_stays(
    site: Booted, row: Row, does: str, ends: str, code: str
) -> None:
    site.run(does.format(GONE))
    before = site.run(STATE)
    job = aside(GONE)
    assert (job.state, job.error_code) == ("failed", code), job.error_detail
    assert site.run(STATE) == before
    site.run(ends.format(GONE))


#: The tool, which does something more right before, or right after, one of its commands.
WRAPPED = r"""
mv /usr/bin/rbd /usr/bin/rbd.real
cat >/usr/bin/rbd <<'END'
#!/bin/sh
case "$*" in
*' {command} '*) {before}
    rbd.real "$@" || exit
    {after} ;;
*) exec rbd.real "$@" ;;
esac
END
chmod +x /usr/bin/rbd
"""
UNWRAP = "mv /usr/bin/rbd.real /usr/bin/rbd"
V2 = "--rbd-default-clone-format=2"
REALLY_OPENED = OPENED.format(GONE).replace("rbd status", "rbd.real status")
CLONED = f"rbd.real snap create vms/{GONE}@s1 --no-progress; rbd.real clone vms/{GONE}@s1 vms/new-1 {V2}"


@pytest.mark.parametrize(
    ("before", "code"),
    [
        (REALLY_OPENED, "image_in_use"),
        (CLONED, "has_overlays"),
    ],
)  # fmt: skip
def test_who_comes_in_the_last_moment_keeps_the_image_under_its_name(
    site: Booted, row: Row, before: str, code: str
) -> None:
    content = site.run(DIGEST)
    site.run(
        WRAPPED.format(
            command="rename", before=f"if [ ! -e /root/once ]; then touch /root/once; {before}; fi", after=""
        )
    )
    try:
        job = aside(GONE)
    finally:
        site.run(f"{UNWRAP}; rm /root/once")
    assert (job.state, job.error_code) == ("failed", code), job.error_detail
    assert site.run(NAMES).split() == [GONE]
    assert site.run(f"rbd image-meta list vms/{GONE} 2>/dev/null | grep -c storage-admin || true").strip() == "0"
    assert site.run(DIGEST) == content


KILL = "kill -KILL $PPID; sleep 1"
#: Half of a rename: the image has a name that the pool's directory does not have; or one is left that it had.
_COPY = (
    "O=$(echo \"$*\" | sed 's/.*--image=\\([^ ]*\\).*/\\1/'); N=$(echo \"$*\" | sed 's/.*--dest=\\([^ ]*\\).*/\\1/'); "
    "rados -p vms get rbd_id.$O /root/id"
)
HALF = f"{_COPY}; rados -p vms put rbd_id.$N /root/id; {KILL}; exit 1"
LEFT = f"rados -p vms put rbd_id.$O /root/id; {KILL}"
_DATA = "rbd.real info -p vms --image=$(rbd.real ls vms | grep .sa-) | sed -n 's/.*block_name_prefix: //p'"
HALF_GONE = f"rados -p vms rm $({_DATA}).0000000000000000; {KILL}; exit 1"
CASES = [
    *((kind, command, *way)
      for kind, command in (("set_aside", "image-meta set"), ("set_aside", "rename"), ("restore_aside", "rename"),
                            ("restore_aside", "image-meta remove"), ("delete_aside", "image-meta set"),
                            ("delete_aside", "rm"))
      for way in ((KILL, ""), ("", KILL))),
    *((kind, "rename", *way) for kind in ("set_aside", "restore_aside") for way in ((HALF, ""), (_COPY, LEFT))),
    ("delete_aside", "rm", HALF_GONE, ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "command", "before", "after"), CASES, ids=map(str, range(len(CASES))))
def test_a_death_at_any_step_leaves_the_image_whole_and_the_row_true(
    site: Booted, row: Row, kind: str, command: str, before: str, after: str
) -> None:
    known, content, image = site.run(STATE), site.run(DIGEST), volume(GONE)
    options = OPTIONS[kind] | ({"confirm_name": GONE} if kind == "delete_aside" else {})
    if kind != "set_aside":
        aside(GONE)
        Image.every.filter(pk=image.pk).update(aside_until=None)
    site.run(WRAPPED.format(command=command, before=before, after=after))
    try:
        job = run(services.submit(ADMIN, kind, image.pk, options))
    finally:
        site.run(UNWRAP)
    assert job.state == "interrupted", (job.error_code, job.error_detail)
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    site.wait_until(f"! rbd status vms/{GONE} 2>/dev/null | grep -q watcher=")
    recovery = work("recover", row.pk)
    assert recovery.state == "succeeded", (recovery.error_code, recovery.error_detail)
    scan(row)
    state, mine = Image.every.get(pk=image.pk).state, site.run(NAMES).split()
    if state == "deleted":
        assert (kind, mine) == ("delete_aside", [])
        assert site.run(f"rados -p vms ls | grep -a rbd_id | grep -c -e {GONE} -e .sa- || true").strip() == "0"
        return
    if state == "set_aside":
        assert [name[:4] for name in mine] == [".sa-"]
        assert work("restore_aside", image.pk, ADMIN).state == "succeeded"
    else:
        assert (state, mine) == ("ok", [GONE])
    assert (site.run(STATE), site.run(DIGEST)) == (known, content)


#: What it is a clone of, in a pool that can be deleted.
CLONE = f"""
ceph config set mon mon_allow_pool_delete true
ceph auth caps client.vm mon 'profile rbd' osd 'profile rbd pool=vms, profile rbd-read-only pool=parents'
ceph osd pool create parents 8
rbd pool init parents
rbd create --size 64M parents/p
rbd snap create --no-progress parents/p@s
rbd snap protect parents/p@s
rbd rm --no-progress vms/{GONE}
rbd clone parents/p@s vms/{GONE}
qemu-io -f raw -c 'write -P 7 0 12M' rbd:vms/{GONE} >/dev/null
"""
#: All that the image consists of.
OBJECTS = "rados -p vms ls | grep -a -e rbd_data.{0} -e rbd_header.{0} -e rbd_object_map.{0} | sort"


@pytest.mark.parametrize("kind", ["set_aside", "delete_aside"])
def test_a_clone_whose_parent_is_gone_is_not_taken_for_one_whose_removal_was_cut_off(
    site: Booted, row: Row, kind: str
) -> None:
    site.run(CLONE)
    scan(row)
    image = volume(GONE)
    number = site.run(f"rbd info vms/{GONE} | sed -n 's/.*id: //p'").strip()
    succeeded(aside(GONE))
    before = site.run(OBJECTS.format(number))
    try:
        if kind == "delete_aside":
            Image.every.filter(pk=image.pk).update(aside_until=None)
            site.run(WRAPPED.format(command="image-meta set", before=f"{KILL}; exit 1", after=""))
            job = run(services.submit(ADMIN, kind, image.pk, {"confirm_name": GONE}))
            site.run(UNWRAP)
            assert job.state == "interrupted"
            Job.objects.filter(pk=job.pk).update(needs_recovery=True)
        site.run("ceph osd pool delete parents parents --yes-i-really-really-mean-it")
        assert work("recover", row.pk).state == "succeeded"
        scan(row)
        assert (Image.every.get(pk=image.pk).state, site.run(OBJECTS.format(number))) == ("set_aside", before)
    finally:
        site.run(f"{OBJECTS.format(number)} | while read -r one; do rados -p vms rm $one; done")
