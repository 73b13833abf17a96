"""A fact that may have passed is looked at again on the spot before anybody is refused, or let through, for it."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from django.test import Client
from django.urls import reverse

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
from storage_admin.jobs.models import Job
from tests.factories import (
    GuestDiskFactory,
    GuestFactory,
    ImageFactory,
    ImageUseFactory,
    PolicyFactory,
    StoragePoolFactory,
    UserFactory,
    WorkerFactory,
)
from tests.web.confirming import confirm, hidden, planned
from tests.web.html import tags_of
from tests.working import ADMIN, OPERATOR, create, image_at, run, scan, this_machine, work

PRIMARY = "btn btn-primary"
pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture(autouse=True)
def patient(settings: Any) -> None:
    """A loaded machine may take longer than a second for what is tested here."""
    settings.LOOK_SECONDS = 60.0


@contextmanager
def read_by_a_process(path: Path) -> Iterator[int]:
    """A process that is no child of this one, as a backup is, and has the image open; its id."""
    script = 'setsid sleep 600 < "$1" > /dev/null 2>&1 & echo $!'
    started = subprocess.run(["sh", "-c", script, "sh", path], capture_output=True, text=True, check=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def scanned_while_read(path: Path) -> Iterator[None]:
    """What a scan leaves that ran while something had the image open, which it has not any more."""
    with read_by_a_process(path):
        scan(image_at(path).host)
        assert image_at(path).in_use is True
    yield


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
        job = run(services.submit(ADMIN, "set_aside", image_at(path).pk, {}))
    assert job.state == "succeeded", job.error_detail


def test_a_job_is_undone_whose_image_was_open_during_the_last_scan(path: Path) -> None:
    done = work("reclaim", image_at(path).pk, OPERATOR)
    scan(image_at(path).host)
    with scanned_while_read(path):
        undo = run(services.undo(OPERATOR, done))
    assert undo.state == "succeeded", undo.error_detail


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
    with pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "reclaim", image.pk, {})
    assert (refused.value.code, asked, Host.objects.get().status) == ("host_unreachable", ["look"], "unreachable")


def test_a_queued_job_begins_although_a_scan_meanwhile_saw_its_image_open(path: Path) -> None:
    job = services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    with scanned_while_read(path):
        pass
    assert run(job).state == "succeeded", job.error_detail


def test_a_job_that_begins_at_once_is_not_looked_at_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a scan, which may have seen something else, came in between, or some time."""
    looks: list[str] = []
    real = asking.ask

    def ask(host: Host, verb: str, *args: Any, **options: Any) -> Any:
        looks.append(verb)
        return real(host, verb, *args, **options)

    monkeypatch.setattr(asking, "ask", ask)
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
    with pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "check", image_at(path).pk, {})
    assert (refused.value.code, image_at(path).state) == ("stale_plan", "missing")
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
    job = run(services.submit(OPERATOR, "reclaim", image.pk, {"undo_hours": 0}))
    assert job.state == "succeeded", job.error_detail
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
    done.refresh_from_db()
    assert [status.st_ino, status.st_mtime_ns, status.st_ctime_ns] in done.undo_seen


def test_the_free_space_of_the_pool_is_that_of_the_look(path: Path) -> None:
    pool = image_at(path).pool
    pool.available_bytes = 1
    pool.save()
    services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    pool.refresh_from_db()
    assert (pool.available_bytes or 0) > 1 << 20


def test_a_guest_that_was_shut_down_since_the_scan_stands_in_nobodys_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_at(path)
    Host.objects.filter(pk=image.host_id).update(capabilities=image.host.capabilities | {"libvirt": "present"})
    guest = GuestFactory.create(host=image.host, state="running")
    disk = GuestDiskFactory.create(guest=guest, path=str(path), path_bytes=bytes(path), format="qcow2")
    ImageUseFactory.create(image=image, disk=disk)
    Image.objects.filter(pk=image.pk).update(in_use=True, in_use_detail=f"guest {guest.name} is running")
    states = {guest.uid: "running"}
    monkeypatch.setattr(control, "states", lambda host: states)
    with pytest.raises(RefusedError) as refused:
        services.submit(OPERATOR, "reclaim", image.pk, {})
    assert refused.value.code == "guest_running"
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


def test_the_plan_page_shows_the_old_fact_at_once_and_then_the_new_one(path: Path, client: Client) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    address = reverse("check", args=[image_at(path).pk])
    with scanned_while_read(path):
        page = client.get(address).content.decode()
        assert ("image_in_use" in page, f'hx-get="{address}?look=1"' in page) == (True, True)
        looked = client.get(f"{address}?look=1", headers={"HX-Request": "true"})
        assert ("image_in_use" in looked.content.decode(), "HX-Reswap" in looked) == (False, False)
    shown = {"shown": hidden(looked.content.decode())["shown"]}
    again = client.get(address, {"look": "1", **shown}, headers={"HX-Request": "true"})
    assert (again["HX-Reswap"], 'id="facts-age" hx-swap-oob="true"' in again.content.decode()) == ("none", True)


@pytest.mark.parametrize("was", ["in use", "missing"])
def test_an_images_page_is_fetched_anew_where_a_look_tells_something_else(path: Path, client: Client, was: str) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    if was == "missing":
        away = path.rename(path.with_name("away"))
        scan(image_at(path).host)
        away.rename(path)
    else:
        with scanned_while_read(path):
            pass
    address = reverse("image", args=[image_at(path).pk])
    check = f'href="{reverse("check", args=[image_at(path).pk])}"'

    def shown() -> tuple[str, bool, bool, Any]:
        page = client.get(address)
        text = page.content.decode()
        look_at = next(one["hx-get"] or "" for _, one in tags_of(text) if "shown=" in (one.get("hx-get") or ""))
        return look_at, f'<span class="chip warn">{was}</span>' in text, check in text, page.context["image"].seen

    look_at, told, offered, seen = shown()
    assert (told, offered) == (True, was == "in use")
    looked = client.get(look_at, headers={"HX-Request": "true"})
    assert (looked.status_code, looked["HX-Trigger"]) == (204, "facts-changed")
    look_at, told, offered, now = shown()
    assert (told, offered, now > seen) == (False, True, True)
    again = client.get(look_at, headers={"HX-Request": "true"})
    assert ("HX-Trigger" in again, 'id="facts-age" hx-swap-oob="true"' in again.content.decode()) == (False, True)


def test_an_orphans_page_shows_the_old_fact_at_once_and_then_the_new_one(path: Path, client: Client) -> None:
    client.force_login(UserFactory.create(role="admin"), "django.contrib.auth.backends.ModelBackend")
    address = reverse("set_aside", args=[image_at(path).pk])

    def plan_in(page: str) -> tuple[bool, bool, bool]:
        button = next(found for tag, found in tags_of(page) if tag == "button" and found.get("class", "") == PRIMARY)
        return "image_in_use" in page, "disabled" in button, "is in use" in page

    with scanned_while_read(path):
        page = client.get(address).content.decode()
        assert (plan_in(page)[:2], f'hx-get="{address}"' in page) == ((True, True), True)
        looked = client.get(address, {"shown": hidden(page)["shown"]}, headers={"HX-Request": "true"})
        assert plan_in(looked.content.decode()) == (False, False, False)
    shown = {"shown": hidden(looked.content.decode())["shown"]}
    again = client.get(address, shown, headers={"HX-Request": "true"})
    assert (again["HX-Reswap"], 'id="facts-age" hx-swap-oob="true"' in again.content.decode()) == ("none", True)
    assert client.post(address, {"grace_days": "7"}).status_code == 302


def test_a_job_without_an_undo_copy_is_confirmed_also_where_the_last_scan_stood_against_it(
    path: Path, client: Client
) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    form, address = {"undo_hours": "0", "method": "copy"}, reverse("reclaim", args=[image_at(path).pk])
    shown = planned(client.get(address, form).content.decode())
    with scanned_while_read(path):
        assert client.post(address, form | shown).status_code == 409
    assert not Job.objects.filter(kind="reclaim").exists()


def test_many_images_are_planned_and_queued_together_as_they_are_now(path: Path, client: Client) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    image = image_at(path)
    with scanned_while_read(path):
        form = {"image": str(image.pk), "method": "copy", "undo_hours": "1", "confirmed": "1"}
        confirm(client, reverse("images_reclaim"), form)
    assert Job.objects.filter(kind="reclaim", target_id=image.pk, state="queued").count() == 1


def test_a_plan_by_rest_is_of_the_image_as_it_is_now(path: Path, client: Client) -> None:
    client.force_login(UserFactory.create(role="operator"), "django.contrib.auth.backends.ModelBackend")
    body = {"kind": "check", "image": image_at(path).pk, "dry_run": True}
    with scanned_while_read(path):
        answer = client.post("/api/v1/jobs/", body, content_type="application/json")
    assert (answer.status_code, answer.json()["refusals"]) == (200, [])


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
    away.refresh_from_db()
    assert (away.in_use, away.seen) == (True, seen)
    assert image_at(path).seen > before
