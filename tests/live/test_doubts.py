"""Images of which nobody knows whether a guest's last writes are in them alone: from rows, and by the follower."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.utils import timezone

from images.live import delete_snapshots, follow
from images.live import snapshots as kinds_of_snapshots
from images.live.copying import LiveCopy
from images.live.follow import GUEST_ENDED, Follower
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking, transport
from storage_admin.hosts.libvirt import relay, running, snapshots, uri
from storage_admin.hosts.libvirt.block_jobs import LostError, Program, Wanted
from storage_admin.hosts.libvirt.process import GoneError
from storage_admin.hosts.libvirt.snapshots import Snapshots
from storage_admin.hosts.live_facts import DiskNow, GuestNow, Part, Snapshot
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.kinds import BEGUN, in_doubt
from storage_admin.jobs.models import Job
from tests.factories import GuestFactory, HostFactory, JobFactory, StoragePoolFactory
from tests.harness.patching import raising
from tests.working import OPERATOR, code_of, refused_as

COPY = Wanted("uid", "vda", "copy", ["/a/disk", "/a/base"], 0, None, 0, {"path": "/a/copy", "format": "raw"})
OVER = [["/a/disk", "/a/copy"], ["/a/second", "/a/other"]]


def doubted(guest: Guest, **more: Any) -> Job:
    fields = {"kind": "live_copy", "state": "failed", "error_code": "interrupted", "finished": timezone.now()}
    return JobFactory.create(target=guest, kept={BEGUN: {"over": OVER}}, **fields | more)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("paths", "is_open"),
    [
        (["/a/disk", "/a/base"], True),
        (["/a/above", "/a/second", "/a/base"], True),
        (["/a/copy", "/a/disk"], False),
        (["/a/base"], False),
        ([], False),
    ],
    ids=["it has the image before", "of another disk", "it stands on the other one", "another image", "no disk"],
)
def test_a_guest_is_doubted_unless_it_stands_on_the_image_that_it_may_have_gone_on_in(
    paths: list[str], is_open: bool
) -> None:
    guest = GuestFactory.create()
    doubted(guest)
    assert [one.code for one in follow.doubts([guest.pk], paths)] == [GUEST_ENDED] * is_open


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("more", "is_open"),
    [
        ({}, True),
        ({"state": "cancelled"}, True),
        ({"state": "interrupted"}, True),
        ({"state": "succeeded"}, False),
        ({"finished": timezone.now() - timedelta(days=31)}, False),
        ({"kept": {BEGUN: {"over": []}}}, False),
        ({"kept": {}}, False),
    ],
    ids=["failed", "cancelled", "interrupted", "succeeded", "long ago", "known by now", "never begun"],
)
def test_however_a_job_ended_its_images_are_doubted_as_long_as_nobody_knows(
    more: dict[str, Any], is_open: bool
) -> None:
    guest = GuestFactory.create()
    fields = {"kept": {BEGUN: {"over": OVER}}} | more
    job = doubted(guest)
    Job.objects.filter(pk=job.pk).update(**fields)
    assert bool(follow.doubts([guest.pk], ["/a/disk"])) is is_open
    assert set(follow.doubted(guest.host)) == ({path for pair in OVER for path in pair} if is_open else set())


@pytest.mark.django_db
def test_the_same_file_is_doubted_where_another_host_has_it_and_that_host_is_not_named() -> None:
    here, there = (StoragePoolFactory.create(network=True, path=path) for path in ("/a", "/mnt/b"))
    for pool in (here, there):
        pool.shared_key = "nfs:server:/export"
        pool.save()
    guest = GuestFactory.create(host=here.host)
    job = doubted(guest)
    told = follow.doubted(there.host)
    assert set(told) == {"/mnt/b/disk", "/mnt/b/copy", "/mnt/b/second", "/mnt/b/other"}
    assert not [one for one in told.values() if str(job.pk) in one or guest.name in one]


@pytest.mark.django_db
def test_a_job_is_not_repeated_by_one_click_as_long_as_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = mock.Mock()
    monkeypatch.setattr(services, "submit", submitted)
    job = doubted(GuestFactory.create())
    services.retry(OPERATOR, job)
    assert submitted.call_args.kwargs == {"by_hand": False}
    follow.settle(job)
    services.retry(OPERATOR, job)
    assert submitted.call_args.kwargs == {"by_hand": True}


def test_what_a_version_before_kept_is_one_pair() -> None:
    job = Job(kept={BEGUN: {"over": OVER[0], "run": 1, "cpu_ns": 1}})
    assert in_doubt(job) == [OVER[0]]
    with pytest.raises(HostError) as caught:
        delete_snapshots._refuse_unseen(Guest(name="web"), GuestNow("shut off"), job.kept[BEGUN])
    assert caught.value.code == GUEST_ENDED


def follower(*, cancelled: bool = False, program: Any = None) -> tuple[Follower, Job]:
    job = mock.Mock(spec=Job, kept={}, target_label="web")
    follow.keep(job, "ready", COPY, None)
    recorder = mock.Mock(cancel_requested=cancelled)
    against = {"against": lambda: "", "watch": lambda: ""}
    return Follower(job, recorder, program or mock.Mock(), COPY, **against), job


def test_a_switch_is_written_down_before_it_is_ordered_and_not_taken_back_by_what_was_said_before() -> None:
    follows, job = follower()
    assert (in_doubt(job), follows._order("ready")) == ([], "pivot")
    over = [["/a/disk", "/a/copy"]]
    assert (job.kept[BEGUN]["stage"], in_doubt(job)) == ("pivoting", over)
    follows._told({"stage": "ready"})
    assert (job.kept[BEGUN]["stage"], in_doubt(job)) == ("pivoting", over)
    follows._told({"stage": "ready", "against": "libvirt says no"})
    assert (job.kept[BEGUN]["stage"], in_doubt(job)) == ("ready", [])


def test_a_cancel_while_libvirt_is_away_leaves_it_open_where_a_guest_goes_on() -> None:
    program = mock.Mock()
    program.follow.side_effect = LostError("away")
    follows, job = follower(cancelled=True, program=program)
    follow.keep(job, "pivoting", COPY, None)
    with pytest.raises(StoppedError):
        follows.run(taken_over=True)
    assert in_doubt(job) == [["/a/disk", "/a/copy"]]


@pytest.fixture
def deletes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """``deletes(answers, needed)``: a deletion that is taken over; what libvirt says each time, and an agent first; how
    often each was asked.
    """
    monkeypatch.setattr(delete_snapshots, "_AGAIN", 0.0)
    monkeypatch.setattr(follow, "LOOKS", 0.0)
    here, gone = Snapshot("one", None, "", "", "", current=True, disks=()), Snapshots((), 9_000_000)

    def taken_over(answers: list[Exception], needed: list[Exception]) -> tuple[int, int]:
        guest, begun = GuestFactory.create(), {"name": "one", "run": 1, "cpu_ns": 1, "over": [["/disk.one", "/disk"]]}
        job = JobFactory.create(kind="delete_snapshot", target=guest, state="running")
        look = mock.Mock(side_effect=[*needed, *[None] * 9])
        monkeypatch.setattr(delete_snapshots, "_refuse_needed", look)
        libvirt = mock.Mock(side_effect=[*answers, gone])
        monkeypatch.setattr(snapshots, "delete", libvirt)
        asked = (GuestNow("running", run=1, cpu_ns=2), Snapshots((here,), 9_000_000))
        monkeypatch.setattr(delete_snapshots, "asked", lambda *_: asked)
        delete_snapshots.DeleteSnapshot()._delete(job, guest, begun, mock.Mock(), lambda: None, taken_over=True)
        return libvirt.call_count, look.call_count

    return taken_over


@pytest.mark.django_db
@pytest.mark.parametrize(
    "needed",
    [[], [HostError("away", "host_unreachable")] * 3, [RefusedError("stale_plan", "it has just gone")]],
    ids=["nobody needs it", "an agent is away", "it was looked at while libvirt removed it"],
)
def test_a_deletion_that_is_taken_over_waits_for_who_is_away(
    deletes: Callable[..., tuple[int, int]], needed: list[Exception]
) -> None:
    assert deletes([HostError("cannot acquire state change lock")], needed) == (2, len(needed) + 1)


@pytest.mark.django_db
def test_what_somebody_needs_by_then_ends_it(deletes: Callable[..., tuple[int, int]]) -> None:
    assert refused_as(deletes, [], [RefusedError("has_overlays", "one stands on it")] * 2) == "has_overlays"


@pytest.mark.django_db
def test_a_libvirt_that_hangs_is_not_taken_for_one_that_is_busy(deletes: Callable[..., tuple[int, int]]) -> None:
    with pytest.raises(HostError) as caught:
        deletes([HostError("libvirt still waits for its block job.", GUEST_ENDED)], [])
    assert caught.value.code == GUEST_ENDED


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("files", "code", "is_open"),
    [([None], "host_unreachable", False), ([{"bytes": 1}], GUEST_ENDED, True), (None, "host_unreachable", True)],
    ids=["no overlay is there", "one is there", "nobody tells"],
)
def test_a_snapshot_that_was_surely_not_made_leaves_no_doubt(
    monkeypatch: pytest.MonkeyPatch, files: list[Any] | None, code: str, is_open: bool
) -> None:
    guest = GuestFactory.create()
    options = {"name": "one", "disks": None, "quiesce": False}
    job = JobFactory.create(kind="snapshot", target=guest, options=options, state="running")
    now = GuestNow("running", run=1, disks=(DiskNow("vda", chain=("/disk.qcow2",)),))
    kind = kinds_of_snapshots.CreateSnapshot()
    monkeypatch.setattr(kind, "check", lambda *_: now)
    away = GoneError("away", "host_unreachable")
    monkeypatch.setattr(snapshots, "create", mock.Mock(side_effect=away))
    told = {"side_effect": HostError("away")} if files is None else {"return_value": files}
    monkeypatch.setattr(kinds_of_snapshots, "files_told", mock.Mock(**told))
    assert (code_of(HostError, kind.by_libvirt, job, mock.Mock()), bool(in_doubt(job))) == (code, is_open)


@pytest.mark.django_db
@pytest.mark.parametrize("has", [True, False, None], ids=["it has the copy", "it has none", "it does not answer"])
def test_a_guest_is_switched_over_to_a_copy_that_its_host_is_known_to_have(
    monkeypatch: pytest.MonkeyPatch, has: bool | None
) -> None:
    guest = GuestFactory.create()

    def answers(*_: object, **__: object) -> dict[str, Any]:
        if has is None:
            raise HostError("The disk hangs.", "host_unreachable")
        return {"files": [{"bytes": 1} if has else None]}

    monkeypatch.setattr(asking, "ask", answers)
    why = LiveCopy().against_switching(guest, COPY)
    assert (bool(why), "The disk hangs." in why) == (not has, has is None)


@pytest.mark.django_db
def test_a_host_that_is_away_for_a_while_is_asked_again_as_a_libvirt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostFactory.create(kind=Host.Kind.SSH)
    monkeypatch.setattr(transport, "by_ssh", lambda _: True)
    monkeypatch.setattr(relay, "why_read_only", lambda _: "")
    monkeypatch.setattr(uri, "_checked", raising(HostError("No route to host.", "host_unreachable")))
    for ask in (lambda: running.look(host, "uid"), lambda: snapshots.of(host, "uid")):
        assert code_of(GoneError, ask) == "host_unreachable"
    with pytest.raises(LostError), Program(host) as program:
        program.follow(COPY, start=False, told=mock.Mock(), order=mock.Mock())


def test_of_a_snapshot_of_several_disks_each_one_is_doubted() -> None:
    disks = tuple(
        DiskNow(target=name, kind="file", format="qcow2", chain=(f"/{name}.one", f"/{name}"), allocated_bytes=None)
        for name in ("vda", "vdb")
    )
    parts = tuple(Part(disk.target, "external", disk.chain[0]) for disk in disks)
    chosen = Snapshot("one", None, "", "", "", current=True, disks=parts)
    begun = delete_snapshots._begun(GuestNow("running", run=1, cpu_ns=1, disks=disks), chosen)
    assert begun["over"] == [["/vda.one", "/vda"], ["/vdb.one", "/vdb"]]
    with pytest.raises(HostError) as caught:
        delete_snapshots._refuse_unseen(Guest(name="web"), GuestNow("shut off"), begun)
    assert caught.value.code == GUEST_ENDED
    assert all(path in caught.value.detail for path in ("/vda.one", "/vdb.one"))


@pytest.mark.django_db
def test_a_deletion_for_which_nothing_is_left_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = GuestFactory.create()
    job = JobFactory.create(kind="delete_old_snapshots", target=guest, options={"older_than_days": 30}, state="running")
    young = Snapshot("b", timezone.now() - timedelta(days=29), "", "", "", current=True, disks=())
    now = GuestNow("running", run=1)
    monkeypatch.setattr(delete_snapshots, "asked", lambda *_: (now, Snapshots((young,), 9_000_000)))
    kind = delete_snapshots.DeleteOldSnapshots()
    monkeypatch.setattr(kind, "check", lambda *_: now)
    assert refused_as(kind.by_libvirt, job, mock.Mock(cancel_requested=False)) == "stale_plan"
