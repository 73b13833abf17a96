"""Snapshots of running libvirt guests: created with the agent's help, listed, deleted while the guest writes."""

import dataclasses
import hashlib
import json
import re
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import libvirt
import pytest
from django.utils import timezone

from storage_admin.errors import InvalidError
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import snapshots
from storage_admin.jobs import kinds, services
from storage_admin.jobs.kinds import BEGUN
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.harness.guests import Disk, Domains, Starts, write_pattern
from tests.live.chains import PATTERNS, chain_of, definition_of, done
from tests.live.conftest import filesystem_image, scanned, seen
from tests.live.writer import acknowledged, check, wait_for_writes, writing
from tests.working import ON_LIBVIRT, OPERATOR, against, client_as, create, image_at, refused_as, reread, run, scan

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]


def plan_of(kind: str, row: Guest, **options: object) -> Plan:
    return services.plan(OPERATOR, kind, row.pk, options)


def submit(kind: str, row: Guest, **options: object) -> Job:
    return services.submit(OPERATOR, kind, row.pk, options)


def test_a_snapshot_is_quiesced_listed_and_deleted_from_the_guests_page(
    agent_guest: Starts, shared_folder: Path
) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.qcow2")))
    host, row = scanned(shared_folder, guest)
    assert plan_of("snapshot", row, name="before").refusals == ()
    done(submit("snapshot", row, name="before"))
    assert chain_of(guest) == ["disk.before", "disk.qcow2"]
    assert definition_of(guest) == "disk.before"
    (found,) = snapshots.of(row.host, row.uid).found
    assert (found.name, found.current, found.is_external) == ("before", True, True)
    assert found.created is not None
    assert timezone.now() - found.created < timedelta(minutes=5)
    page = client_as(role="operator").get(f"/guests/{row.pk}/snapshots/").content.decode()
    assert "before" in page
    assert "disk.before" in page
    told = client_as(role="viewer").get(f"/api/v1/guests/{row.pk}/snapshots/").json()
    overlay = {"target": "vda", "how": "external", "path": str(shared_folder / "disk.before")}
    assert [(one["name"], one["disks"]) for one in told["snapshots"]] == [("before", [overlay])]
    assert against("snapshot", row, name="before") == ["target_exists"]
    guest.console.run("echo written > /mnt/since; sync")
    assert against("delete_snapshot", row, name="before") == ["outside_pool"], "nobody has scanned the overlay"
    scan(host)
    [kept] = reread(row).snapshots
    assert (kept["name"], kept["external"], kept["created"]) == ("before", True, int(found.created.timestamp()))
    assert kept["files"] == [str(shared_folder / "disk.before")]
    (listed,) = client_as(role="viewer").get("/api/v1/snapshots/").json()["results"]
    assert (listed["name"], listed["kind"]) == ("before", "external")
    assert listed["files_bytes"] == (shared_folder / "disk.before").stat().st_blocks * 512
    done(submit("delete_snapshot", row, name="before"))
    assert chain_of(guest) == ["disk.qcow2"]
    assert not (shared_folder / "disk.before").exists()
    assert guest.console.run("cat /mnt/since") == "written"
    assert against("delete_snapshot", row, name="before") == ["stale_plan"]


def test_what_is_written_while_a_snapshot_is_made_and_deleted_is_there(tcg_guest: Starts, shared_folder: Path) -> None:
    image = create(shared_folder / "disk.qcow2", "96M")
    guest = tcg_guest(Disk(image))
    host, row = scanned(shared_folder, guest)
    with writing(guest):
        done(submit("snapshot", row, name="one", quiesce=False))
        wait_for_writes(guest, 3)
        done(submit("snapshot", row, name="two", quiesce=False))
        wait_for_writes(guest, 3)
        scan(host)
        done(submit("delete_snapshot", row, name="one"))
        wait_for_writes(guest, 3)
        done(submit("delete_snapshot", row, name="two"))
        wait_for_writes(guest, 3)
    assert chain_of(guest) == ["disk.qcow2"]
    last = acknowledged(guest)
    guest.stop()
    check(image, last)


def test_without_an_agent_nothing_is_quiesced_and_the_plan_says_so(tcg_guest: Starts, shared_folder: Path) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2")))
    __, row = scanned(shared_folder, guest)
    assert against("snapshot", row, name="now") == ["tool_missing"]
    assert against("snapshot", row, name="now", quiesce=False) == []
    assert against("snapshot", row, name="now", quiesce=False, disks=["vdz"]) == ["invalid"]
    guest.stop()
    assert against("snapshot", row, name="now") == [], "its image holds it"


def test_a_snapshot_is_not_merged_into_a_base_that_others_use(tcg_guest: Starts, shared_folder: Path) -> None:
    image = create(shared_folder / "disk.qcow2")
    guest = tcg_guest(Disk(image))
    host, row = scanned(shared_folder, guest)
    done(submit("snapshot", row, name="golden", quiesce=False))
    create(shared_folder / "clone.qcow2", base="disk.qcow2")
    scan(host)
    assert against("delete_snapshot", row, name="golden") == ["shared_base"]
    (shared_folder / "clone.qcow2").unlink()
    scan(host)
    assert against("delete_snapshot", row, name="golden") == []
    made_since = create(shared_folder / "clone.qcow2", base="disk.qcow2")
    assert run(submit("delete_snapshot", row, name="golden")).error_code == "has_overlays"
    made_since.unlink()
    done(submit("delete_snapshot", row, name="golden"))


@pytest.mark.parametrize("name", ["", "-x", "a/b", "..", "a b", "x" * 61])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(InvalidError):
        kinds.get("snapshot").clean({"name": name})


def test_a_guest_that_is_off_goes_back_to_a_snapshot_in_its_image(tcg_guest: Starts, shared_folder: Path) -> None:
    image = create(shared_folder / "disk.qcow2", "96M")
    write_pattern(image, "qcow2", (0, 8, 0x5A))
    guest = tcg_guest(Disk(image))
    __, row = scanned(shared_folder, guest)
    guest.stop()
    assert against("revert_snapshot", row, name="before") == ["stale_plan"]
    scan(row.host)
    assert "--disk-only" not in plan_of("snapshot", row, name="before").commands[0]
    done(submit("snapshot", row, name="before"))
    assert snapshots_in(image) == ["before"]
    (found,) = snapshots.of(row.host, row.uid).found
    assert (found.is_external, found.state) == (False, "shutoff")
    write_pattern(image, "qcow2", (0, 8, 0x11))
    grown = image.stat().st_blocks * 512
    scan(row.host)
    assert plan_of("revert_snapshot", row, name="before").refusals == ()
    job = done(submit("revert_snapshot", row, name="before"))
    assert (job.before_bytes, job.after_bytes) == (grown, image.stat().st_blocks * 512)
    assert digest_of(image) == PATTERNS[0]
    job = submit("delete_snapshot", row, name="before")
    job.kept = {BEGUN: {"name": "before", "created": 1}}  # what was begun with another one of that name
    job.save(update_fields=["kept"])
    done(job)
    assert snapshots_in(image) == ["before"]
    job = submit("delete_snapshot", row, name="before")
    job.kept = {BEGUN: {"name": "before"}}  # by a version that kept no sizes
    job.save(update_fields=["kept"])
    assert done(job).before_bytes is None
    done(submit("snapshot", row, name="before"))
    job = done(submit("delete_snapshot", row, name="before"))
    assert snapshots_in(image) == []
    assert job.after_bytes == image.stat().st_blocks * 512
    assert digest_of(image) == PATTERNS[0]


def test_a_later_snapshot_of_the_same_name_is_another_one(tcg_guest: Starts, shared_folder: Path) -> None:
    image = create(shared_folder / "disk.qcow2", "96M")
    guest = tcg_guest(Disk(image))
    __, row = scanned(shared_folder, guest)
    guest.stop()
    scan(row.host)
    domain = guest.domain
    for number, kind in enumerate(("delete_snapshot", "revert_snapshot")):
        domain.snapshotCreateXML("<domainsnapshot><name>nightly</name></domainsnapshot>")
        job = submit(kind, row, name="nightly")
        domain.snapshotLookupByName("nightly").delete()
        time.sleep(1.1)  # libvirt counts in seconds
        write_pattern(image, "qcow2", (0, 8, 0x11 + number))
        domain.snapshotCreateXML("<domainsnapshot><name>nightly</name></domainsnapshot>")
        write_pattern(image, "qcow2", (8, 8, 0x22 + number))
        now = digest_of(image)
        ended = run(job)
        assert (ended.state, ended.error_code) == ("failed", "stale_plan")
        assert refused_as(snapshots.revert, row.host, row.uid, "nightly", 1) == "stale_plan"
        snapshots.delete(row.host, row.uid, "nightly", 1, lambda: None)
        assert (snapshots_in(image), digest_of(image)) == (["nightly"], now)
        domain.snapshotLookupByName("nightly").delete()


def test_nobody_goes_back_under_a_running_or_a_saved_guest_or_under_overlays_of_others(
    tcg_guest: Starts, shared_folder: Path
) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2")))
    host, row = scanned(shared_folder, guest)
    guest.stop()
    done(submit("snapshot", row, name="before"))
    guest.domain.create()
    assert against("revert_snapshot", row, name="before") == ["image_in_use"]
    guest.domain.managedSave(0)
    assert against("revert_snapshot", row, name="before") == ["image_in_use"], "its memory would not fit"
    guest.domain.managedSaveRemove()
    assert against("revert_snapshot", row, name="before") == []
    create(shared_folder / "overlay.qcow2", base="disk.qcow2")
    scan(host)
    assert against("revert_snapshot", row, name="before") == ["shared_base"]


def test_snapshots_with_files_of_their_own_are_gone_back_to_from_libvirt_9_9_on_alone(
    tcg_guest: Starts, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2")))
    host, row = scanned(shared_folder, guest)
    done(submit("snapshot", row, name="before", quiesce=False))
    guest.stop()
    scan(host)
    known = snapshots.of(row.host, row.uid)
    for version, refused in ((9_008_000, True), (9_009_000, False)):
        told = dataclasses.replace(known, version=version)
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "of", lambda *_, told=told: told)
            assert ("tool_missing" in against("revert_snapshot", row, name="before")) is refused
    job = done(submit("delete_snapshot", row, name="before"))
    assert not (shared_folder / "disk.before").exists()
    assert job.freed_bytes is not None
    assert definition_of(guest) == "disk.qcow2"


def test_of_a_guest_that_is_off_overlays_are_merged_and_their_content_stays(
    tcg_guest: Starts, shared_folder: Path
) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2", "96M")))
    host, row = scanned(shared_folder, guest)
    for number, name in enumerate(("one", "two")):
        guest.write(number, 2, 0x10 + number)
        done(submit("snapshot", row, name=name, quiesce=False))
    guest.write(3, 2, 0x30)
    guest.stop()
    scan(host)
    wanted = digest_of(shared_folder / "disk.two")
    before = sum(path.stat().st_blocks * 512 for path in shared_folder.glob("disk.[qot]*"))
    freed = [done(submit("delete_snapshot", row, name=name)).freed_bytes for name in ("one", "two")]
    assert sorted(path.name for path in shared_folder.glob("disk.[qot]*")) == ["disk.qcow2"]
    image = shared_folder / "disk.qcow2"
    assert sum(one or 0 for one in freed) == before - image.stat().st_blocks * 512
    assert digest_of(image) == wanted


def refused_reverts(row: Guest, *names: str) -> list[list[str]]:
    """The codes for each, but for libvirt's age."""
    return [[code for code in against("revert_snapshot", row, name=name) if code != "tool_missing"] for name in names]


def test_only_the_newest_is_gone_back_to_where_snapshots_have_files(tcg_guest: Starts, shared_folder: Path) -> None:
    """An internal one below overlays would be written over under them; of external ones libvirt 11 loses files."""
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2")), Disk(create(shared_folder / "second.qcow2")))
    host, row = scanned(shared_folder, guest)
    guest.stop()
    done(submit("snapshot", row, name="inside"))
    guest.domain.create()
    done(submit("snapshot", row, name="one", quiesce=False))
    done(submit("snapshot", row, name="two", quiesce=False))
    guest.domain.destroy()
    scan(host)
    assert refused_reverts(row, "inside", "one", "two") == [["in_snapshot_chain"], ["in_snapshot_chain"], []]
    guest.domain.create()
    done(submit("snapshot", row, name="part", quiesce=False, disks=["vda"]))
    guest.domain.destroy()
    scan(host)
    assert refused_reverts(row, "two", "part") == [["in_snapshot_chain"], ["in_snapshot_chain"]]


def test_an_internal_one_below_an_overlay_is_not_gone_back_to(domains: Domains, shared_folder: Path) -> None:
    domain = domains.define([Disk(create(shared_folder / "disk.qcow2"))])
    domain.snapshotCreateXML("<domainsnapshot><name>inside</name></domainsnapshot>", 0)
    row = seen(shared_folder, domain)
    assert refused_reverts(row, "inside") == [[]]
    create(shared_folder / "overlay.qcow2", base="disk.qcow2")
    domain.connect().defineXML(domain.XMLDesc().replace("disk.qcow2", "overlay.qcow2"))
    scan(row.host)
    assert refused_reverts(row, "inside") == [["in_snapshot_chain"]]


def test_every_file_that_a_snapshot_names_is_known_as_its_guests(tcg_guest: Starts, shared_folder: Path) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.qcow2")))
    host, row = scanned(shared_folder, guest)
    done(submit("snapshot", row, name="one", quiesce=False))
    guest.stop()
    # As libvirt leaves it when it has gone back to an older one: the guest writes to another file.
    other = create(shared_folder / "other.qcow2", base="disk.qcow2")
    xml = guest.domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE).replace("disk.one", other.name)
    guest.domain.connect().defineXML(re.sub(r"<backingStore.*?</backingStore>", "", xml, flags=re.DOTALL))
    scan(host)
    for name in ("disk.one", "disk.qcow2", "other.qcow2"):
        assert image_at(shared_folder / name).uses.exists(), name


def test_only_qcow2_images_of_a_guest_that_is_off_hold_snapshots(tcg_guest: Starts, shared_folder: Path) -> None:
    guest = tcg_guest(Disk(create(shared_folder / "disk.raw", form="raw"), "raw"))
    __, row = scanned(shared_folder, guest)
    guest.stop()
    assert against("snapshot", row, name="now") == ["unsupported_subformat"]


def snapshots_in(image: Path) -> list[str]:
    told = subprocess.run(["qemu-img", "info", "--output=json", image], capture_output=True, check=True).stdout
    return [one["name"] for one in json.loads(told).get("snapshots", [])]


def digest_of(image: Path) -> str:
    """Of its first 8 MiB."""
    raw = image.with_suffix(".check")
    subprocess.run(["qemu-img", "convert", "-O", "raw", image, raw], check=True)
    content = raw.read_bytes()[: 8 << 20]
    raw.unlink()
    return hashlib.sha256(content).hexdigest()
