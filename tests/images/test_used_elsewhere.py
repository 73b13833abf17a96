"""Another registered host shares the storage: its agent is asked who has the image open there."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from images.rewrite import in_use
from storage_admin.agent import main
from storage_admin.agent.bundle import Bundle
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import asking, transport
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import claims, kinds, runner, services
from storage_admin.jobs.models import Job
from storage_admin.web.pages.jobs import status_of
from tests.agent import on_a_network
from tests.factories import HostFactory
from tests.harness.filesystems import mounted
from tests.harness.patching import raising
from tests.images.away import goes_away
from tests.images.scanned import at_the_exchange
from tests.images.test_silent_storage import opened
from tests.working import ADMIN, OPERATOR, create, image_at, refused_as, register, reread, run, said, scan, succeeded

pytestmark = [pytest.mark.qemu, pytest.mark.django_db]
pytestmark.append(pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve"))
AWAY = HostError("It does not answer.", "host_unreachable")


@pytest.fixture
def other(quiet: None, no_hypervisor: None, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host that has the same export mounted, under another path; its agent runs on this machine."""

    @contextlib.contextmanager
    def command(host: Host, word: str) -> Iterator[list[str]]:
        yield transport.local_command()

    monkeypatch.setattr(asking, "agent_command", command)
    there = path.parent.parent / "mounted"
    there.mkdir()
    with mounted(path.parent, there):
        host = HostFactory.create(slug="other")
        register(host, there)
        share()
        yield host


def share() -> None:
    """The pools as a scan finds them on such hosts."""
    StoragePool.objects.update(network=True, shared_key="nfs:server:/export", all_hosts_registered=True)


def _refused(image: Image) -> str:
    with pytest.raises(RefusedError) as refused:
        in_use.refuse_used_elsewhere(image)
    assert "other" not in refused.value.detail.replace("nother", "")
    return refused.value.code


def test_an_image_that_is_open_on_another_host_is_left_alone_and_looked_at_before_the_work_and_the_swap(
    path: Path, other: Host
) -> None:
    image = image_at(path)
    in_use.refuse_used_elsewhere(image)
    with opened(path):
        assert _refused(image) == "image_in_use"
        for kind in ("reclaim", "flatten", "convert", "set_aside"):
            with pytest.raises(RefusedError, match="open on another host"):
                kinds.get(kind).prepare(Job(kind=kind, host=image.host, target_id=image.pk))
    in_use.refuse_used_elsewhere(image)


def test_a_host_that_cannot_be_asked_refuses_the_work(path: Path, other: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_at(path)
    with monkeypatch.context() as patch:
        patch.setattr(asking, "ask", raising(AWAY))
        assert _refused(image) == "guests_unknown"
    Host.objects.filter(pk=other.pk).update(kind=Host.Kind.PROXMOX, transport=Host.Transport.API)
    assert _refused(image) == "guests_unknown"


def test_another_file_there_is_refused_and_hosts_of_other_storages_are_not_asked(path: Path, other: Host) -> None:
    image = image_at(path)
    image.inode = "1"
    assert _refused(image) == "stale_plan"
    other.pools.update(shared_key="nfs:server:/another")
    in_use.refuse_used_elsewhere(image)


@pytest.mark.parametrize(
    ("kind", "options", "on"),
    [
        ("set_aside", {}, "base"),
        ("convert", {"format": "raw", "replace": True}, "base"),
        ("commit", {}, "base"),
        ("commit", {}, "overlay"),
        ("reclaim", {"method": "copy"}, ""),
    ],
)
def test_what_another_host_has_made_on_an_image_since_its_scan_refuses_whoever_takes_that_away(
    path: Path, other: Host, kind: str, options: dict[str, Any], on: str
) -> None:
    """In a folder that only that host has."""
    overlay = create(path.parent / "overlay.qcow2", base=path.name) if kind == "commit" else path
    scan(image_at(path).host)
    share()
    local = path.parent.parent / "of the other alone"
    local.mkdir()
    register(other, local)
    target = image_at(overlay)
    job = services.submit(ADMIN, kind, target.pk, options)
    kinds.get(kind).request(job)
    on_what = overlay if on == "overlay" else path
    create(local / "clone.qcow2", base=str(path.parent.parent / "mounted" / on_what.name))
    if on:
        assert refused_as(kinds.get(kind).request, job) == "has_overlays"
    else:
        kinds.get(kind).request(job)


# After the exchange


@pytest.fixture
def alone(other: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host sees nothing of what is done on the other one."""
    for module, where in ((runner, "here"), (asking, "there")):
        command = [sys.executable, "-m", on_a_network.__name__, where]
        monkeypatch.setattr(module, "agent_command", lambda *_, command=command: contextlib.nullcontext(command))
        monkeypatch.setattr(module, "agent_bundle", lambda: Bundle(Path(), main.own_hash()))


def named(folder: Path, inode: int) -> Path:
    """The path of a file of that inode."""
    return next(entry for entry in folder.iterdir() if entry.stat().st_ino == inode)


def reclaim(path: Path, **options: Any) -> Job:
    job = run(services.submit(OPERATOR, "reclaim", image_at(path).pk, {"method": "copy", "undo_hours": 0, **options}))
    assert "ready" in job.kept, (job.error_code, job.error_detail, said(job))
    return job


@pytest.mark.parametrize("wanted", ["-c", "r+b"])
@pytest.mark.usefixtures("alone")
def test_who_finds_the_original_on_another_host_in_the_moment_of_the_swap_finds_it_under_its_name_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    inode = path.stat().st_ino
    with contextlib.ExitStack() as stack:

        def act() -> None:
            original = named(path.parent, inode)
            assert original != path
            if wanted == "r+b":  # and is gone again when that host is asked
                with original.open(wanted) as file:
                    file.seek(0, os.SEEK_END)
                    file.write(b"written without locks")
            else:
                stack.enter_context(opened(original))

        at_the_exchange(monkeypatch, "reclaim", act)
        job = reclaim(path)
    assert (job.state, job.error_code) == ("failed", "image_in_use"), (job.error_detail, said(job))
    assert ([entry.name for entry in path.parent.iterdir()], path.stat().st_ino) == ([path.name], inode)
    assert path.read_bytes().endswith(b"written without locks") == (wanted == "r+b")


@pytest.mark.usefixtures("alone")
def test_one_that_uses_the_new_image_already_keeps_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = path.stat().st_ino
    with contextlib.ExitStack() as stack:
        at_the_exchange(monkeypatch, "reclaim", lambda: stack.enter_context(opened(path)))
        job = reclaim(path)
    assert (job.state, job.error_code) == ("succeeded", ""), (job.error_detail, said(job))
    assert path.stat().st_ino != inode
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("where", [in_use, claims], ids=["asked", "told"])
@pytest.mark.usefixtures("alone")
def test_a_database_that_is_away_then_does_not_decide_which_file_gets_the_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    inode = path.stat().st_ino
    with contextlib.ExitStack() as stack:

        def act() -> None:
            if not gone:  # it is asked again
                stack.enter_context(opened(named(path.parent, inode)))
                gone.append(goes_away(monkeypatch, where, "look_again_elsewhere" if where is in_use else "log"))

        gone: list[list[int]] = []
        at_the_exchange(monkeypatch, "reclaim", act)
        job = reclaim(path)
    assert (job.state, job.error_code) == ("failed", "image_in_use"), (job.error_detail, said(job))
    assert ([entry.name for entry in path.parent.iterdir()], path.stat().st_ino) == ([path.name], inode)


@pytest.mark.parametrize("which", ["both are used", "nobody tells"])
@pytest.mark.usefixtures("alone")
def test_where_that_is_not_known_both_files_are_kept_also_without_a_window(
    path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    inode = path.stat().st_ino
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:

        def act() -> None:
            if which == "nobody tells":
                patch.setattr(asking, "ask", raising(AWAY))
            else:
                for one in (path, named(path.parent, inode)):
                    stack.enter_context(opened(one))

        at_the_exchange(patch, "reclaim", act)
        job = reclaim(path)
    assert (job.state, job.error_code, job.needs_recovery) == ("failed", "both_kept", False), said(job)
    assert f".sa-{job.uid}.orig" in status_of(job)["stands"]
    assert path.stat().st_ino == job.kept["ready"]["made_inode"]
    assert named(path.parent, inode).name == f".sa-{job.uid}.orig"
    scan(image_at(path).host)  # which recovers what jobs have left
    assert named(path.parent, inode).name == f".sa-{job.uid}.orig"


@pytest.mark.usefixtures("alone")
def test_an_undo_asks_likewise(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = succeeded(reclaim(path, undo_hours=24))
    made = path.stat().st_ino
    with contextlib.ExitStack() as stack:
        at_the_exchange(monkeypatch, "undo", lambda: stack.enter_context(opened(named(path.parent, made))))
        undo = run(services.undo(ADMIN, job))
    assert (undo.state, undo.error_code) == ("failed", "image_in_use"), (undo.error_detail, said(undo))
    assert (path.stat().st_ino, reread(job).undo_state) == (made, "available")


def test_what_is_set_aside_is_asked_for_by_its_inode_before_it_is_deleted(path: Path, other: Host) -> None:
    image = image_at(path)
    aside = path.rename(path.with_name(".sa-0123456789abcdef.aside"))
    job = Job(kind="delete_aside", host=image.host, target_id=image.pk)
    with opened(aside):
        assert refused_as(kinds.get("delete_aside").prepare, job) == "image_in_use"
    kinds.get("delete_aside").prepare(job)


@pytest.mark.usefixtures("alone")
def test_an_undo_keeps_both_files_where_the_original_was_written_to_already(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = path.stat().st_ino
    job = reclaim(path, undo_hours=24)
    made = path.stat().st_ino
    with contextlib.ExitStack() as stack:

        def act() -> None:
            stack.enter_context(opened(named(path.parent, made)))
            with path.open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(b"written without locks")

        at_the_exchange(monkeypatch, "undo", act)
        undo = run(services.undo(ADMIN, job))
    assert (undo.state, undo.error_code) == ("failed", "both_kept"), (undo.error_detail, said(undo))
    assert (path.stat().st_ino, named(path.parent, original).name) == (made, f".sa-{job.uid}.orig")


@pytest.mark.usefixtures("alone")
def test_a_file_that_somebody_gives_the_name_meanwhile_is_told_from_both(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = path.stat().st_ino
    with contextlib.ExitStack() as stack:

        def act() -> None:
            stack.enter_context(opened(named(path.parent, original)))
            (path.parent.parent / "mine").write_text("mine")
            (path.parent.parent / "mine").replace(path)

        at_the_exchange(monkeypatch, "reclaim", act)
        job = reclaim(path)
    assert (job.state, job.error_code, path.read_text()) == ("failed", "strangers_kept", "mine"), said(job)
    assert named(path.parent, original).name.startswith(".sa-")


@pytest.mark.usefixtures("alone")
def test_the_copy_of_another_dashboard_is_put_back_like_any_undo(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = path.stat().st_ino
    options = {"job": reclaim(path, undo_hours=24).uid, "action": "restore"}
    Job.objects.all().delete()
    scan(image_at(path).host)
    share()
    made = path.stat().st_ino

    def restore(**more: Any) -> Job:
        return run(services.submit(ADMIN, "settle_leftover", image_at(path).pool_id, options | more))

    with opened(path):
        before = restore()
    assert (before.state, before.error_code, before.kept) == ("failed", "image_in_use", {}), said(before)
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        at_the_exchange(patch, "settle_leftover", lambda: stack.enter_context(opened(named(path.parent, made))))
        meanwhile = restore()
    assert (meanwhile.state, meanwhile.error_code) == ("failed", "image_in_use"), said(meanwhile)
    assert (path.stat().st_ino, meanwhile.kept["ready"]["made_inode"]) == (made, original)
    after = restore(force=True)  # its names went to and fro, which moves its ctime
    assert (after.state, path.stat().st_ino) == ("succeeded", original), said(after)
