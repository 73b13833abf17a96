"""Admins attach images to their hosts: plan, roles, typed confirmation, the list, and what is refused meanwhile."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.kinds.attach import Attach
from images.models import Image
from images.rewrite import attached
from storage_admin.accounts.models import AuditEntry, ForbiddenError
from storage_admin.agent.host.nbd import FOLDER
from storage_admin.agent.protocol import HostError
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import kinds, services
from storage_admin.jobs.models import Job, ResourceLock
from tests.factories import GuestFactory, ImageFactory, ImageUseFactory, JobFactory
from tests.working import ADMIN, OPERATOR, client_as, codes, invalid_fields, refused_as, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet", "no_hypervisor")]


@pytest.fixture
def image() -> Image:
    """An overlay, on a host that can attach it."""
    base = ImageFactory.create(name="base.qcow2")
    image = ImageFactory.create(name="vm.qcow2", backing=base, pool=base.pool, chain_depth=2)
    attached.note(image.host_id, {"nbd": "", "attached": []})
    return fetched(image)


def fetched(image: Image) -> Image:
    return Image.objects.select_related("host", "pool").get(pk=image.pk)


def attach(image: Image, **more: Any) -> dict[str, Any]:
    """The image's host has it attached now, as its agent tells."""
    told: dict[str, Any] = {
        "device": "nbd3", "path": f"{FOLDER}/nbd3", "pid": 77, "size": 1 << 30, "read_only": True, "file": image.path,
        "dev": int(image.dev), "inode": int(image.inode), "job": "j1", "by": "ada", "at": 1795783105.5, **more,
    }  # fmt: skip
    attached.note(image.host_id, {"attached": [told]})
    return told


def test_only_admins_attach_and_only_what_is_confirmed_by_name_can_be_written_to(image: Image) -> None:
    for kind in ("attach", "detach"):
        with pytest.raises(ForbiddenError):
            services.submit(OPERATOR, kind, image.pk, {})
    ImageFactory.create(name="alone.qcow2", pool=image.pool)
    for name in ("", "VM.qcow2"):
        assert list(
            invalid_fields(services.submit, ADMIN, "attach", image.pk, {"writable": True, "confirm_name": name})
        ) == ["confirm_name"]
    job = services.submit(ADMIN, "attach", image.pk, {"writable": True, "confirm_name": "vm.qcow2"})
    told = kinds.get("attach").request(job)
    assert (told["writable"], told["by"], len(told["chain"]), "pools" in told) == (True, "ada", 1, True)
    assert AuditEntry.objects.filter(what="attach queued", who="ada").count() == 1
    locks = {(lock.key.partition(":")[0], lock.exclusive) for lock in ResourceLock.objects.filter(job=job)}
    assert locks == {("inode", True), ("image", True), ("inode", False), ("image", False), ("nbd", True)}


def test_a_plan_reads_only_unless_it_is_asked_to_write(image: Image) -> None:
    plan = services.plan(ADMIN, "attach", image.pk, {})
    assert (plan.refusals, "--read-only" in plan.commands[0], len(plan.affected_images)) == ((), True, 2)
    assert "--read-only" not in services.plan(ADMIN, "attach", image.pk, {"writable": True}).commands[0]
    base = image.backing
    assert base is not None
    assert codes("attach", base, ADMIN) == set()
    Image.objects.filter(pk=base.pk).update(overlays_count=1)
    assert codes("attach", base, ADMIN, writable=True) == {"has_overlays"}


@pytest.mark.parametrize(
    ("changes", "read", "written"),
    [
        ({"encrypted": True}, {"encrypted"}, {"encrypted"}),
        ({"in_use": True, "in_use_detail": "-"}, {"image_in_use"}, {"image_in_use"}),
        ({"snapshots": [{"id": "1"}]}, set(), set()),
        ({"header": {"dirty": True}}, set(), {"dirty_or_corrupt"}),
        ({"nlink": 2}, set(), {"hard_linked"}),
        ({"header": {"data_file": "x"}}, {"external_data_file"}, {"external_data_file"}),
        ({"state": "chain_broken"}, {"chain_broken"}, {"chain_broken"}),
    ],
)
def test_what_stands_against_it(image: Image, changes: dict[str, Any], read: set[str], written: set[str]) -> None:
    Image.objects.filter(pk=image.pk).update(**changes)
    assert (codes("attach", image, ADMIN), codes("attach", image, ADMIN, writable=True)) == (read, written)


def test_a_running_guest_and_one_whose_qemu_takes_no_locks_are_in_the_way(image: Image) -> None:
    guest = GuestFactory.create(host=image.host, state="running")
    ImageUseFactory.create(image=image, disk__guest=guest)
    Image.objects.filter(pk=image.pk).update(in_use=True)
    assert codes("attach", image, ADMIN) == {"guest_running"}
    type(guest).objects.update(state="shut off")
    Image.objects.filter(pk=image.pk).update(in_use=False)
    assert codes("attach", image, ADMIN, writable=True) == set()
    image.host.capabilities |= {"proxmox": True}
    image.host.save()
    assert (codes("attach", image, ADMIN), codes("attach", image, ADMIN, writable=True)) == (set(), {"guests_unknown"})


@pytest.mark.parametrize("code", ["nbd_missing", "nbd_partitions"])
def test_a_host_that_cannot_attach_says_so_and_its_page_offers_other_ways(image: Image, code: str) -> None:
    attached.note(image.host_id, {"nbd": code})
    StoragePool.objects.update(look_inside=True)
    assert codes("attach", image, ADMIN) == {code}
    assert refused_as(services.submit, ADMIN, "attach", image.pk, {}) == code
    page = client_as(role="admin").get(f"/images/{image.pk}/attach/").content.decode()
    for way in ("files/", "sparsify/", "content/"):
        assert f"{image.pk}/{way}" in page
    Host.objects.update(capabilities={"tools": {"qemu-nbd": False}})
    assert codes("attach", image, ADMIN) == {"tool_missing"}
    assert f"{image.pk}/files/" not in client_as(role="admin").get(f"/images/{image.pk}/attach/").content.decode()


def test_every_other_job_is_refused_while_an_image_is_attached(image: Image) -> None:
    StoragePool.objects.update(look_inside=True)
    other = ImageFactory.create(pool=image.pool).pk
    attach(image)
    assert codes("detach", image, ADMIN) == set()
    assert codes("attach", image, ADMIN) == {"image_in_use"}
    for kind in ("reclaim", "flatten", "convert", "check", "grow", "shrink", "rebase", "sparsify", "commit"):
        options: dict[str, Any] = {"format": "raw"} if kind == "convert" else {}
        options |= {"size_bytes": 1 << 31} if kind == "grow" else {}
        options |= {"base": other} if kind == "rebase" else {}
        assert "image_in_use" in codes(kind, image, ADMIN, **options), kind
    attached.note(image.host_id, {"attached": []})
    assert (codes("detach", image, ADMIN), codes("reclaim", image, ADMIN)) == ({"stale_plan"}, set())


def test_the_list_tells_what_is_attached_where_since_when_and_by_whom(image: Image) -> None:
    job = JobFactory.create(kind="attach", target=image, state="succeeded")
    told = attach(image, job=job.uid)
    by_hand = told | {"device": "nbd9", "path": "/dev/nbd9", "file": "/srv/other.raw", "read_only": False}
    by_hand |= dict.fromkeys(("dev", "inode", "job", "by", "at"))
    attached.note(image.host_id, {"attached": [told, by_hand]})
    first, second = client_as(role="viewer").get("/api/v1/attached/").json()
    assert first == {
        "host": image.host_id, "host_name": image.host.name, "device": "nbd3", "path": f"{FOLDER}/nbd3",
        "file": image.path, "size_bytes": 1 << 30, "writable": False, "image": image.pk, "by": "ada", "job": job.pk,
        "at": "2026-11-27T12:38:25.500000Z",
    }  # fmt: skip
    assert (second["writable"], second["image"], second["at"], second["by"]) == (True, None, None, "")
    assert client_as(role="admin", hosts=["elsewhere"]).get("/api/v1/attached/").json() == []
    for role, may in (("viewer", False), ("admin", True)):
        page = client_as(role=role).get("/images/attached/").content.decode()
        assert (f"/images/{image.pk}/detach/" in page, "/srv/other.raw" in page) == (may, True)
        page = client_as(role=role).get(f"/images/{image.pk}/").content.decode()
        assert (f"{FOLDER}/nbd3" in page, f"/images/{image.pk}/detach/" in page) == (True, may)


def test_an_admin_detaches_by_the_page_and_what_is_attached_is_written_with_the_result(image: Image) -> None:
    told = attach(image)
    answer = client_as(role="admin").post(f"/images/{image.pk}/detach/", {"key": "k"})
    job = Job.objects.get(kind="detach")
    assert (answer.status_code, answer["Location"]) == (302, f"/jobs/{job.pk}/")
    kind = kinds.get("detach")
    assert kind.request(job) == {"device": "nbd3", "dev": told["dev"], "inode": told["inode"]}
    result = kind.record(job, {"device": "nbd3", "read_only": True, "attached": []})
    assert (result["device"], fetched(image).attached) == ("nbd3", None)
    assert refused_as(kind.request, job) == "stale_plan"


def test_a_writable_device_is_confirmed_on_the_page(image: Image) -> None:
    browser, address = client_as(role="admin"), f"/images/{image.pk}/attach/"
    assert b"confirm_name" not in browser.get(address).content
    assert b"confirm_name" in browser.get(f"{address}?writable=true").content
    assert browser.post(address, {"writable": "true", "confirm_name": "x", "key": "a"}).status_code == 400
    assert Job.objects.count() == 0
    sent = {"writable": "true", "confirm_name": "vm.qcow2", "key": "b"}
    assert browser.post(address, sent).status_code == 302
    assert Job.objects.get().options == {"writable": True, "confirm_name": "vm.qcow2"}


def test_a_look_asks_the_host_and_a_host_that_is_silent_changes_nothing(
    image: Image, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.LOOK_SECONDS = 1.0
    told = attach(image)
    answers: list[Any] = [HostError("away", "host_unreachable"), {"nbd": "", "attached": []}]

    def ask(host: Host, verb: str, *_: Any, **__: Any) -> dict[str, Any]:
        assert (host.pk, verb) == (image.host_id, "attached")
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr(asking, "ask", ask)
    attached.look(image.host)
    assert reread(image.host).capabilities["attached"] == [told]
    attached.look(image.host)
    assert reread(image.host).capabilities["attached"] == []


def test_a_job_that_was_cut_off_claims_nothing_of_the_device() -> None:
    said = Attach.unsuccessful[""]
    assert said.cut_off == said.ended


def test_a_scan_that_began_before_does_not_take_an_attached_image_off_the_list(image: Image) -> None:
    began = timezone.now()
    told = attach(image)
    host = fetched(image).host
    assert attached.as_told_since(host, began)["attached"] == [told]
    assert attached.as_told_since(host, timezone.now() + timedelta(seconds=1)) == {}
