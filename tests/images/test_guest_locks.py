"""Guests of Proxmox VE are locked while a file of theirs is exchanged: real images, a server held to the schema."""

from pathlib import Path
from typing import Any

import pytest

from images.kinds.recover import Recover
from images.models import Image
from images.rewrite import guest_locks, refusals, repointing
from storage_admin.agent.protocol import HELD_LOCK
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory, JobFactory, StoragePoolFactory
from tests.harness.patching import do_after, do_before
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer
from tests.images.away import goes_away
from tests.images.linked import LINKED, OWN, backing, by_command, clone, holds, host, server, store
from tests.images.node import scanned
from tests.images.scanned import at_the_exchange
from tests.working import ADMIN, OPERATOR, image_at, reread, run, said, succeeded

__all__ = ["by_command", "clone", "host", "server", "store"]

pytestmark = [
    pytest.mark.django_db, pytest.mark.qemu,
    pytest.mark.usefixtures("quiet", "no_reserve", "on_a_network"),
]  # fmt: skip

by_pvesh = guest_locks._api
SHUT_OUT = "guests_unknown"


@pytest.fixture
def on_a_network(host: Host, server: ProxmoxServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage as one of a network, the node's folder as the agent is to read it, and root's way to the API."""
    server.world.root = True
    monkeypatch.setattr(guest_locks, "_api", lambda host: server.client())
    StoragePool.objects.filter(host=host).update(network=True, all_hosts_registered=True)
    asked = guest_locks.asked

    def with_the_folder(image: Image) -> dict[str, Any]:
        return (told := asked(image)) | ({"etc_pve": str(tmp_path / "root/etc/pve")} if told else {})

    monkeypatch.setattr(guest_locks, "asked", with_the_folder)


def reclaim(path: Path, **options: Any) -> Job:
    return services.submit(OPERATOR, "reclaim", image_at(path).pk, {"method": "compress", **options})


def codes(path: Path, **options: Any) -> list[str]:
    wanted = {"method": "compress", **options}
    return [one.code for one in services.plan(OPERATOR, "reclaim", image_at(path).pk, wanted).refusals]


def text(server: ProxmoxServer, vmid: int = 101) -> str:
    return server.world.guests["vm", vmid].text


def locks_set(server: ProxmoxServer) -> list[tuple[str, str]]:
    """Which locks were set and taken away, in order, by path."""
    puts = [one for one in server.seen if one.verb == "PUT"]
    assert all(one.params.get("digest") for one in puts)
    told = [(one.path.split("/")[4], one.params.get("lock") or one.params.get("delete", "")) for one in puts]
    return [one for one in told if one[1]]


def files(path: Path) -> list[str]:
    return sorted(entry.name.rpartition(".")[2] for entry in path.parent.iterdir())


def test_its_guest_is_locked_while_the_files_are_exchanged_and_not_any_longer(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = text(server), []
    at_the_exchange(monkeypatch, "reclaim", lambda: seen.append((f"lock: {HELD_LOCK}\n" in text(server), files(clone))))
    plan = services.plan(OPERATOR, "reclaim", image_at(clone).pk, {"method": "compress"})
    assert (plan.refusals, any("clone locked" in warning for warning in plan.warnings)) == ((), True)
    job = succeeded(run(reclaim(clone)))
    # Both files are there when all nodes are asked again.
    assert [(locked, len(names)) for locked, names in seen] == [(True, 3)]
    assert (text(server), locks_set(server)) == (before, [("101", HELD_LOCK), ("101", "lock")])
    assert (job.unlock_due, holds(clone)) == (False, True)


def test_every_node_is_asked_before_the_lock_and_after_the_exchange_and_not_in_between(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def note(*_: Any) -> None:
        asked.append([one.path for one in server.seen if one.path in {"/nodes", "/nodes/pve1/qemu"}])
        server.seen.clear()

    def and_note_the_lock(guest: world.Guest) -> None:
        if f"lock: {HELD_LOCK}\n" in guest.text:
            note()

    server.world.after_put = and_note_the_lock
    at_the_exchange(monkeypatch, "reclaim", note)
    assert run(reclaim(clone)).state == "succeeded"
    note()
    whole = ["/nodes", "/nodes/pve1/qemu"]
    before, locked, exchanged = asked
    assert (before[-2:], locked, exchanged) == (whole, whole[1:], whole * 2)  # the last one gives the lock back


# Longer than a heart's beat: that would wait for this test's own transaction.
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("by_command")
def test_root_on_the_node_does_it_by_pvesh(server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_locks, "_api", by_pvesh)
    before = text(server)
    succeeded(run(reclaim(clone)))
    assert (text(server), locks_set(server)) == (before, [("101", HELD_LOCK), ("101", "lock")])


@pytest.mark.parametrize(("where", "name", "words"), [(guest_locks, "_owe", ""), (claims, "log", "is locked")])
def test_a_database_that_goes_away_before_or_after_a_lock_is_waited_for(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, words: str
) -> None:
    before, away = text(server), goes_away(monkeypatch, where, name, words, times=1)
    job = run(reclaim(clone))
    assert (job.state, job.error_code, len(away)) == ("succeeded", "", 1), said(job)
    assert (text(server), locks_set(server)) == (before, [("101", HELD_LOCK), ("101", "lock")])


def test_a_lock_that_another_one_sets_while_the_database_is_away_is_not_taken_over(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = server.world.guests["vm", 101]

    def another(guest: world.Guest) -> None:
        guest.text = guest.text.replace(f"lock: {HELD_LOCK}\n", f"lock: {HELD_LOCK}\nonboot: 1\n")

    server.world.after_put = another
    away = goes_away(monkeypatch, claims, "log", "is locked", times=1)
    job = run(reclaim(clone))
    assert (job.state, job.error_code, len(away)) == ("failed", "guest_locked", 1), said(job)
    assert f"lock: {HELD_LOCK}\nonboot: 1\n" in guest.text


def test_the_undo_of_a_job_of_another_dashboard_locks_its_guest_as_well(
    server: ProxmoxServer, host: Host, clone: Path
) -> None:
    before, inode = text(server), clone.stat().st_ino
    job = run(reclaim(clone))
    Job.objects.all().delete()
    scanned(host)
    StoragePool.objects.filter(host=host).update(network=True, all_hosts_registered=True)
    server.seen.clear()
    options = {"job": job.uid, "action": "restore"}
    undone = succeeded(run(services.submit(ADMIN, "settle_leftover", image_at(clone).pool_id, options)))
    assert (clone.stat().st_ino, locks_set(server)) == (inode, [("101", HELD_LOCK), ("101", "lock")])
    assert (text(server), undone.unlock_due) == (before, False)


def test_an_undo_locks_its_guest_as_well(server: ProxmoxServer, clone: Path) -> None:
    before, inode = text(server), clone.stat().st_ino
    job = run(reclaim(clone))
    server.seen.clear()
    undone = succeeded(run(services.undo(OPERATOR, job)))
    assert (clone.stat().st_ino, locks_set(server)) == (inode, [("101", HELD_LOCK), ("101", "lock")])
    assert (text(server), undone.unlock_due) == (before, False)


def test_a_linked_clone_is_named_anew_before_it_is_locked(server: ProxmoxServer, clone: Path) -> None:
    job = succeeded(run(services.submit(OPERATOR, "flatten", image_at(clone).pk, {})))
    assert (backing(clone), OWN in text(server), "lock:" in text(server)) == ("", True, False)
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert (bool(backing(clone)), LINKED in text(server), "lock:" in text(server)) == (True, True, False)


def test_all_guests_that_stand_on_a_base_are_locked(
    server: ProxmoxServer, clone: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that somebody made by hand: a template's own disk is left as it is.
    monkeypatch.setattr(refusals, "_BASE", "/")
    base = store / "images/100/base-100-disk-0.qcow2"
    succeeded(run(reclaim(base)))
    assert sorted(locks_set(server)) == [("100", HELD_LOCK), ("100", "lock"), ("101", HELD_LOCK), ("101", "lock")]
    assert holds(clone)


@pytest.mark.parametrize("lock", ["backup", "migrate", "snapshot", HELD_LOCK])
def test_a_lock_of_somebody_else_is_named_and_left(server: ProxmoxServer, clone: Path, lock: str) -> None:
    job, inode = reclaim(clone), clone.stat().st_ino

    def and_then_it_is_locked(guest: world.Guest) -> None:
        server.world.before_put = None
        guest.text += f"lock: {lock}\n"

    server.world.before_put = and_then_it_is_locked
    ended = run(job)
    assert ended.state == "failed", said(ended)
    # By its digest, or by its lock: Proxmox VE looks at both.
    assert ended.error_code in {"guest_locked", "stale_plan"}
    assert (clone.stat().st_ino, files(clone), f"lock: {lock}\n" in text(server)) == (inode, ["qcow2"], True)
    again = reclaim(clone)
    run(again)
    assert (reread(again).error_code, f"({lock})" in again.error_detail) == ("guest_locked", True)


def test_a_guest_that_started_before_its_lock_was_held_wins(server: ProxmoxServer, clone: Path) -> None:
    inode = clone.stat().st_ino

    def and_it_starts(guest: world.Guest) -> None:
        guest.running = True

    server.world.after_put = and_it_starts
    job = run(reclaim(clone))
    assert (job.state, job.error_code) == ("failed", "guest_running"), said(job)
    assert (clone.stat().st_ino, files(clone)) == (inode, ["qcow2"])
    assert ("lock:" in text(server), job.unlock_due) == (False, False)


def unlocked(server: ProxmoxServer) -> None:
    guest = server.world.guests["vm", 101]
    guest.text = guest.text.replace(f"lock: {HELD_LOCK}\n", "")


def started(server: ProxmoxServer) -> None:
    server.world.guests["vm", 101].running = True


def silent(server: ProxmoxServer) -> None:
    server.world.nodes = [*server.world.nodes, {"node": "pve2", "status": "offline", "type": "node"}]


@pytest.mark.parametrize("act", [unlocked, started, silent])
def test_where_a_guest_may_have_started_nevertheless_both_files_are_kept(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    inode = clone.stat().st_ino
    at_the_exchange(monkeypatch, "reclaim", lambda: act(server))
    job = run(reclaim(clone))
    assert (job.state, job.error_code, job.needs_recovery) == ("failed", "both_kept", False), said(job)
    assert clone.stat().st_ino != inode
    assert inode in {entry.stat().st_ino for entry in clone.parent.iterdir()}
    assert "lock:" not in text(server)


def test_where_that_goes_for_an_undo_the_new_image_stays_and_so_does_the_original(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = clone.stat().st_ino
    job = run(reclaim(clone))
    made = clone.stat().st_ino
    do_before(monkeypatch, guest_locks, "look_again", lambda _: started(server))
    undo = run(services.undo(OPERATOR, job))
    assert (undo.state, undo.error_code, reread(job).undo_state) == ("failed", "both_kept", "available"), said(undo)
    assert clone.stat().st_ino == made
    assert original in {entry.stat().st_ino for entry in clone.parent.iterdir()}


def test_a_node_that_does_not_answer_refuses_it(server: ProxmoxServer, clone: Path) -> None:
    inode = clone.stat().st_ino
    silent(server)
    job = run(reclaim(clone))
    assert (job.state, job.error_code, "pve2" in job.error_detail) == ("failed", SHUT_OUT, True)
    assert (clone.stat().st_ino, files(clone), locks_set(server)) == (inode, ["qcow2"], [])


def test_a_change_that_waits_is_not_applied_by_a_lock(server: ProxmoxServer, clone: Path) -> None:
    before = text(server) + "\n[PENDING]\nmemory: 4096\n"
    job = reclaim(clone)
    server.world.guests["vm", 101].text = before
    ended = run(job)
    assert (ended.state, ended.error_code, text(server)) == ("failed", "stale_plan", before)


def test_where_no_guest_can_be_locked_the_plan_refuses(host: Host, clone: Path) -> None:
    assert codes(clone) == []
    assert codes(clone, undo_hours=0) == [SHUT_OUT]
    Guest.objects.filter(uid="101").update(kind="container")
    assert codes(clone) == [SHUT_OUT]
    Guest.objects.filter(uid="101").update(kind="vm")
    image = image_at(clone)
    other = HostFactory.create()
    StoragePool.objects.filter(pk=image.pool_id).update(shared_key="nas:/export")
    StoragePoolFactory.create(
        host=other, network=True, shared_key="nas:/export", path=image.pool.path, path_bytes=image.pool.path_bytes
    )
    theirs = GuestFactory.create(host=other, kind="vm", uid="101", name="clone")
    disk = GuestDiskFactory.create(guest=theirs, path=image.path, path_bytes=image.path_bytes, path_key=image.path_key)
    assert codes(clone) == []  # another node of the same cluster knows the same guest
    Guest.objects.filter(pk=theirs.pk).update(name="another")
    assert codes(clone) == [SHUT_OUT]
    disk.delete()
    Host.objects.filter(pk=host.pk).update(kind="proxmox", transport="forced")
    assert codes(clone) == [SHUT_OUT]
    Host.objects.filter(pk=host.pk).update(kind="local", transport="")
    image.uses.all().delete()
    assert codes(clone) == [SHUT_OUT]


def test_an_agent_that_was_told_of_no_lock_or_finds_none_does_nothing(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = clone.stat().st_ino
    monkeypatch.setattr(guest_locks, "take", lambda job, image: None)
    job = run(reclaim(clone))
    assert (job.state, job.error_code, clone.stat().st_ino) == ("failed", SHUT_OUT, inode), said(job)
    assert files(clone) == ["qcow2"]


def test_a_worker_that_dies_with_a_lock_held_leaves_nothing_locked(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def and_then_the_worker_is_gone(job: Job, _: Image) -> None:
        Job.objects.filter(pk=job.pk).update(heartbeat=job.created - claims.LEASE * 2)
        assert reaper.reap() == 1

    with monkeypatch.context() as patch:
        do_after(patch, guest_locks, "take", and_then_the_worker_is_gone)
        job = run(reclaim(clone))
    assert (job.state, job.unlock_due, "lock:" in text(server)) == ("interrupted", True, True)
    repointing.settle()
    assert "lock:" in text(server)  # before it is known how the files stand, nobody may start it
    run(Job.objects.get(kind="recover", state="queued"))
    assert (reread(job).unlock_due, "lock:" in text(server)) == (False, False), said(job)


def test_one_that_dies_before_it_could_lock_owes_nothing_that_is_not_there(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(guest: world.Guest) -> None:
        raise world.ApiDeathError(500, "unable to write: input/output error\n")

    server.world.before_put = fails
    job = run(reclaim(clone))
    assert (job.state, job.unlock_due, "lock:" in text(server)) == ("failed", False, False), said(job)


@pytest.mark.parametrize("other", ["lock: backup\n", f"lock: {HELD_LOCK}\nonboot: 1\n"])
def test_a_lock_that_another_one_has_set_since_is_never_taken_away(
    server: ProxmoxServer, clone: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    def and_it_is_anothers() -> None:
        guest = server.world.guests["vm", 101]
        guest.text = guest.text.replace(f"lock: {HELD_LOCK}\n", other)

    at_the_exchange(monkeypatch, "reclaim", and_it_is_anothers)
    job = run(reclaim(clone))
    assert (other.split()[1] in text(server), job.unlock_due) == (True, False), said(job)
    assert any("which this job did not set" in line for line in said(job))


def test_a_lock_that_cannot_be_taken_away_at_once_is_taken_away_later(server: ProxmoxServer, clone: Path) -> None:
    def fails_to_unlock(guest: world.Guest) -> None:
        if f"lock: {HELD_LOCK}\n" in guest.text:
            raise world.ApiDeathError(500, "unable to write: input/output error\n")

    server.world.before_put = fails_to_unlock
    job = run(reclaim(clone))
    assert (job.state, job.unlock_due, "lock:" in text(server)) == ("succeeded", True, True), said(job)
    repointing.settle()
    server.world.before_put = None
    repointing.settle()
    assert (reread(job).unlock_due, "lock:" in text(server)) == (False, False)
    assert sum("may still be locked" in line for line in said(job)) == 1


def test_a_recovery_gives_locks_back_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(guest_locks, "settle", lambda host_id, **_: asked.append(host_id))
    Recover().ended(JobFactory.create(host=host, kind="recover", state="succeeded"))
    assert asked == [host.pk]
