"""A fact that may have passed is looked at again on the spot before anybody is refused, or let through, for it."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import current_app

from images import tasks
from images.models import Image
from images.policies import runs
from images.policies import services as policies
from images.scan import look
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import asking
from storage_admin.hosts import services as hosts
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from tests.factories import ImageFactory, ImageUseFactory, PolicyFactory, StoragePoolFactory, WorkerFactory
from tests.harness.patching import do_before
from tests.images.readers import read_by_a_process, scanned_while_read
from tests.working import ADMIN, OPERATOR, create, image_at, refused_as, reread, run, scan, this_machine, work

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.qemu,
    pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve", "patient_looks"),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("reclaim", {}),
        ("reclaim", {"when_running": "wait"}),
        ("check", {}),
        ("convert", {"format": "raw"}),
        ("flatten", {}),
    ],
)
def test_a_job_is_accepted_whose_image_was_open_during_the_last_scan(
    pool: Path, kind: str, options: dict[str, str]
) -> None:
    create(pool / "base.qcow2")
    path = create(pool / "over.qcow2", base="base.qcow2")
    scan(this_machine(pool))
    with scanned_while_read(path):
        assert services.plan(OPERATOR, kind, image_at(path).pk, options).refusals != ()
        job = services.submit(OPERATOR, kind, image_at(path).pk, options)
    assert job.state == "queued"
    assert (image_at(path).in_use, image_at(path).in_use_detail) == (False, "")


def test_an_orphan_is_set_aside_that_was_open_during_the_last_scan(path: Path) -> None:
    with scanned_while_read(path):
        assert image_at(path).orphan is False
        assert work("set_aside", image_at(path).pk, ADMIN).state == "succeeded"


def test_a_job_is_undone_whose_image_was_open_during_the_last_scan(path: Path) -> None:
    done = work("reclaim", image_at(path).pk, OPERATOR)
    scan(image_at(path).host)
    with scanned_while_read(path):
        assert run(services.undo(OPERATOR, done)).state == "succeeded"


def test_an_image_that_was_free_at_the_last_scan_is_refused_while_it_is_open_and_names_who_has_it(path: Path) -> None:
    image = image_at(path)
    assert image.in_use is False
    with read_by_a_process(path) as pid, pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "reclaim", image.pk, {})
    assert refused.value.code == "image_in_use"
    assert f"process {pid} (sleep)" in refused.value.detail


@pytest.mark.parametrize(("silent", "status"), [(False, "ok"), (True, "degraded")])
def test_a_job_is_accepted_whose_host_did_not_answer_last_and_does_now(path: Path, silent: bool, status: str) -> None:
    image = image_at(path)
    if silent:
        StoragePoolFactory.create(host=image.host, state=StoragePool.SILENT)
    hosts.host_failed(image.host, "No route to host.")
    job = run(services.submit(OPERATOR, "reclaim", image.pk, {}))
    host = Host.objects.get(pk=image.host_id)
    assert (job.state, host.status, "No route" in host.status_detail) == ("succeeded", status, False), job.error_detail


def test_a_host_that_still_does_not_answer_refuses_as_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(host: Host, verb: str, *args: Any, **options: Any) -> Any:
        asked.append(verb)
        raise HostError("It did not answer.", "host_unreachable")

    monkeypatch.setattr(asking, "ask", ask)
    image = image_at(path)
    hosts.host_failed(image.host, "No route to host.")
    assert refused_as(services.submit, OPERATOR, "reclaim", image.pk, {}) == "host_unreachable"
    assert (asked, Host.objects.get().status) == (["look"], "unreachable")


def test_a_queued_job_begins_although_a_scan_meanwhile_saw_its_image_open(path: Path) -> None:
    job = services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    with scanned_while_read(path):
        pass
    assert run(job).state == "succeeded", job.error_detail


def test_a_job_that_begins_at_once_is_not_looked_at_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a scan, which may have seen something else, came in between, or some time."""
    looks: list[str] = []
    do_before(monkeypatch, asking, "ask", lambda _host, verb, *_, **__: looks.append(verb))
    monkeypatch.setattr(look, "FRESH", 600.0)  # a loaded machine may take its time
    counts = []
    for between in (lambda: None, lambda: scan(image_at(path).host), lambda: monkeypatch.setattr(look, "FRESH", 0.0)):
        looks.clear()
        job = services.submit(OPERATOR, "check", image_at(path).pk, {})
        between()
        assert run(job).state == "succeeded"
        counts.append(looks.count("look"))
    assert counts == [1, 2, 2]


def test_a_file_that_is_gone_is_refused_and_one_that_is_back_is_not(path: Path) -> None:
    away = path.parent.parent / "away"
    path.rename(away)
    assert refused_as(services.submit, OPERATOR, "check", image_at(path).pk, {}) == "stale_plan"
    assert image_at(path).state == "missing"
    away.rename(path)
    assert services.submit(OPERATOR, "check", image_at(path).pk, {}).state == "queued"
    assert (image_at(path).state, image_at(path).missing_since) == ("ok", None)


def test_a_base_that_is_gone_or_back_is_seen_from_what_stands_on_it(pool: Path) -> None:
    base, path = create(pool / "base.qcow2"), create(pool / "over.qcow2", base="base.qcow2")
    scan(this_machine(pool))
    base.rename(pool.parent / "away")
    look.at([image_at(path)])
    assert image_at(path).state == "chain_broken"
    (pool.parent / "away").rename(base)
    look.at([image_at(path)])
    assert (image_at(path).state, image_at(base).state) == ("ok", "ok")


def test_an_image_that_was_changed_is_planned_as_it_is_now(path: Path) -> None:
    subprocess.run(["qemu-img", "resize", "-q", "-f", "qcow2", path, "+64M"], check=True)
    image = image_at(path)
    assert work("reclaim", image.pk, OPERATOR, undo_hours=0).state == "succeeded"
    assert image_at(path).virtual_size == (image.virtual_size or 0) + (64 << 20)


def test_a_look_is_as_good_as_a_scan(pool: Path) -> None:
    """Whatever was done to the files, a scan right after a look of all of them changes no row."""
    base = create(pool / "base.qcow2")
    paths = [create(pool / f"{name}.qcow2", base="base.qcow2") for name in ("a", "b", "c")]
    host = this_machine(pool)
    scan(host)
    subprocess.run(["qemu-img", "resize", "-q", "-f", "qcow2", paths[0], "+64M"], check=True)
    paths[1].unlink()
    subprocess.run(["qemu-io", "-c", "write 0 1M", "-f", "qcow2", base], check=True, stdout=subprocess.DEVNULL)
    with read_by_a_process(paths[2]):
        assert look.at(list(Image.objects.select_related("host"))) == {host.pk}
        looked = _rows()
        scan(host)
        assert _rows() == looked
    assert [row["state"] for row in looked] == ["ok", "missing", "ok", "ok"]
    assert [row["in_use"] for row in looked] == [False, None, False, True]


def _rows() -> list[dict[str, object]]:
    rows = Image.every.order_by("name").values()
    return [
        {key: value for key, value in row.items() if key not in {"seen", "changed_scan", "missing_since"}}
        for row in rows
    ]


def test_a_write_while_no_guest_ran_counts_for_the_undo_copy_also_where_a_look_saw_it_first(path: Path) -> None:
    done = work("reclaim", image_at(path).pk, OPERATOR)
    scan(image_at(path).host)
    subprocess.run(["qemu-io", "-c", "write 0 64k", "-f", "qcow2", path], check=True, stdout=subprocess.DEVNULL)
    status = path.stat()
    look.at([image_at(path)])
    scan(image_at(path).host)
    assert [status.st_ino, status.st_mtime_ns, status.st_ctime_ns] in reread(done).undo_seen


def test_the_free_space_of_the_pool_is_that_of_the_look(path: Path) -> None:
    pool = image_at(path).pool
    pool.available_bytes = 1
    pool.save()
    services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    assert (reread(pool).available_bytes or 0) > 1 << 20


def test_a_guest_that_was_shut_down_since_the_scan_stands_in_nobodys_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_at(path)
    Host.objects.filter(pk=image.host_id).update(capabilities=image.host.capabilities | {"libvirt": "present"})
    guest = ImageUseFactory.create(image=image, disk__guest__state="running").disk.guest
    Image.objects.filter(pk=image.pk).update(in_use=True, in_use_detail=f"guest {guest.name} is running")
    states = {guest.uid: "running"}
    monkeypatch.setattr(control, "states", lambda host: states)
    assert refused_as(services.submit, OPERATOR, "reclaim", image.pk, {}) == "guest_running"
    states[guest.uid] = "shut off"
    assert services.submit(OPERATOR, "reclaim", image.pk, {}).state == "queued"


def test_a_policy_takes_an_image_that_was_open_during_the_last_scan_and_leaves_out_one_that_is_open_now(
    pool: Path,
) -> None:
    was, now = create(pool / "was.qcow2"), create(pool / "now.qcow2")
    scan(this_machine(pool))
    with scanned_while_read(was), read_by_a_process(now) as pid:
        policy = PolicyFactory.create(kind="check", options={})
        run_now = policies.run_now(OPERATOR, policy)
        runs.work(run_now.started)
    picks = {pick.label: pick for pick in run_now.picks.all()}
    assert (picks["was.qcow2"].state, picks["now.qcow2"].code) == ("submitted", "guest_running")
    assert f"process {pid} (sleep)" in picks["now.qcow2"].reason


def test_a_host_that_only_its_own_worker_reaches_is_looked_at_by_that_worker(
    path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    rung = []

    def send(task: str, args: tuple[int, list[int]], *, queue: str, **how: object) -> None:
        rung.append((task, queue))
        settings.LOCAL_MACHINE = True
        tasks.look_at_images(*args)
        settings.LOCAL_MACHINE = False

    monkeypatch.setattr(current_app, "send_task", send)
    WorkerFactory.create(host="local", general=False)
    with scanned_while_read(path):
        settings.LOCAL_MACHINE = False
        services.submit(OPERATOR, "check", image_at(path).pk, {})
    assert rung == [("images.tasks.look_at_images", "host.local")]
    assert image_at(path).in_use is False


def test_a_host_that_does_not_answer_keeps_its_facts_and_their_time_and_holds_up_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Nobody waits for the end of the silence: a look comes back while the other host is asked still."""
    here = image_at(path)
    far = StoragePoolFactory.create(host__capabilities={"qemu_img": "7.2"}).host
    away = ImageFactory.create(host=far, pool=far.pools.get(), in_use=True, in_use_detail="open in process 7 (cp)")
    seen, before = Image.objects.get(pk=away.pk).seen, here.seen
    said: list[dict[str, Any]] = []
    silence, asked = threading.Event(), asking.ask
    asked(here.host, "look", look._arguments([here]), take=said.append)

    def ask(host: Host, *args: object, take: Callable[[dict[str, Any]], None], **kwargs: object) -> None:
        if host.pk == here.host_id:
            for event in said:
                take(event)
            return
        silence.wait()
        raise HostError("It did not answer.", "host_unreachable")

    monkeypatch.setattr(asking, "ask", ask)
    settings.LOOK_SECONDS = 3.0
    try:
        assert look.at([away, here]) == {here.host_id}
    finally:
        silence.set()
    assert (reread(away).in_use, away.seen) == (True, seen)
    assert image_at(path).seen > before
