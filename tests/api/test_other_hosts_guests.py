"""What a refused job and an orphan's evidence say of guests elsewhere, which may not exist for who reads them."""

from collections.abc import Callable

import pytest
from rest_framework.test import APIClient

from images.live.copying import LiveCopy
from images.live.disks import Layers, pool_of
from images.live.merging import needed_by_others
from images.models import Image
from images.orphans import ask_hypervisors, host_facts
from images.scan import hypervisors
from images.scan.hypervisors import Told
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.guests import ProxmoxGuest
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import (
    GuestDiskFactory,
    GuestFactory,
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    StoragePoolFactory,
)
from tests.working import OPERATOR

pytestmark = pytest.mark.sql


#: What is of the other host, and must be in no sentence.
SECRETS = ("payroll", "beta", "virtio-secret", "migrate", "secretnode")
NAME = "vm-104-disk-0.raw"


@pytest.fixture
def image(db: None) -> Image:
    """On a share that the host beta has mounted elsewhere."""
    same = {"network": True, "shared_key": "nfs:nas:/export/vms"}
    alpha, beta = (
        HostFactory.create(slug=slug, name=slug, capabilities={"libvirt": "present"}) for slug in ("alpha", "beta")
    )
    here = StoragePoolFactory.create(host=alpha, path="/mnt/a", path_bytes=b"/mnt/a", **same)
    StoragePoolFactory.create(host=beta, path="/srv/b", path_bytes=b"/srv/b", **same)
    return ImageFactory.create(pool=here, name=NAME, path=f"/mnt/a/{NAME}", path_bytes=f"/mnt/a/{NAME}".encode())


def told_of(text: str) -> list[str]:
    """What of the other host stands there."""
    return [word for word in SECRETS if word in text]


def refusal(image: Image) -> tuple[str, str]:
    with pytest.raises(RefusedError) as refused:
        ask_hypervisors.refuse_named(image)
    return refused.value.code, refused.value.detail


def guest(*, names: str = "", unread: str = "", lock: str = "", kind: str = "domain") -> GuestFacts:
    disks = (DiskFacts("vda", "disk", names),) if names else ()
    return GuestFacts(kind, "104", "payroll", "running", disks, lock=lock, unread=(unread,) if unread else ())


def by_libvirt(monkeypatch: pytest.MonkeyPatch, slug: str, tell: Callable[[], LibvirtFacts]) -> None:
    """Only the host of that slug has any guests."""
    monkeypatch.setattr(reader, "read", lambda host: tell() if host.slug == slug else LibvirtFacts())


CASES = [
    ({"names": "{}"}, "not_orphan"), ({"unread": "args: virtio-secret"}, "guests_unknown"),
    ({"lock": "migrate"}, "guest_locked"),
]  # fmt: skip


@pytest.mark.parametrize(("about", "expected"), CASES)
def test_a_refusal_for_a_guest_of_another_host_does_not_name_it(
    image: Image, monkeypatch: pytest.MonkeyPatch, about: dict[str, str], expected: str
) -> None:
    there = guest(**{name: text.format(f"/srv/b/{NAME}") for name, text in about.items()})
    by_libvirt(monkeypatch, "beta", lambda: LibvirtFacts(domains=(there,)))
    code, detail = refusal(image)
    assert (code, "another host" in detail, told_of(detail)) == (expected, True, [])


@pytest.mark.parametrize(("about", "expected"), CASES)
def test_a_refusal_for_a_guest_of_the_same_host_names_it(
    image: Image, monkeypatch: pytest.MonkeyPatch, about: dict[str, str], expected: str
) -> None:
    here = guest(**{name: text.format(f"/mnt/a/{NAME}") for name, text in about.items()})
    by_libvirt(monkeypatch, "alpha", lambda: LibvirtFacts(domains=(here,)))
    code, detail = refusal(image)
    assert (code, "payroll" in detail) == (expected, True)


def test_why_another_hosts_guests_are_not_known_is_not_told(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> LibvirtFacts:
        raise HostError("beta does not answer: payroll is at work.")

    by_libvirt(monkeypatch, "beta", away)
    code, detail = refusal(image)
    assert (code, "Another host" in detail) == ("guests_unknown", True)
    assert told_of(detail) == []
    by_libvirt(monkeypatch, "alpha", away)
    assert "payroll is at work" in refusal(image)[1]

    def tells(host: Host) -> list[Told]:
        return [Told(("vm",), unknown="The guests of beta are not known.")] if host.slug == "beta" else []

    by_libvirt(monkeypatch, "", away)
    monkeypatch.setattr(hypervisors, "ask", tells)
    code, detail = refusal(image)
    assert (code, "Another host" in detail) == ("guests_unknown", True)
    assert "beta" not in detail


@pytest.mark.parametrize("twice", [False, True])
def test_a_refusal_for_a_guest_of_another_node_does_not_name_it(
    image: Image, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    facts = guest(names=f"/mnt/a/{NAME}", kind="vm")
    node = ProxmoxFacts("alpha", guests=(ProxmoxGuest(facts, "secretnode", 104),))
    told = Told(("vm",), (facts,) if twice else (), proxmox=node)
    by_libvirt(monkeypatch, "", LibvirtFacts)
    monkeypatch.setattr(hypervisors, "ask", lambda host: [told] if host.slug == "alpha" else [])
    code, detail = refusal(image)
    assert code == "not_orphan"
    assert told_of(detail) == []


def test_evidence_of_a_guest_on_another_node_has_its_number_alone() -> None:
    facts = ProxmoxFacts("alpha", guests=(ProxmoxGuest(guest(kind="vm"), "secretnode", 104),))
    (told,) = host_facts.claims_of_cluster(facts)
    assert (told.key, "guest 104" in told.why) == ("104", True)
    assert told_of(told.why) == []


def test_what_stands_against_a_copy_or_a_merge_names_no_guest_of_another_host(image: Image) -> None:
    own = GuestDiskFactory.create(guest__host=image.host, target="vda").guest
    overlay = ImageFactory.create(backing=image, name="top.qcow2", path="/mnt/a/top.qcow2", format="qcow2")
    for used in (image, overlay):
        elsewhere = GuestFactory.create(host=Host.objects.get(slug="beta"), name="payroll", state="running")
        ImageUseFactory.create(image=used, disk=GuestDiskFactory.create(guest=elsewhere))
    rows = {0: overlay, 1: image}
    layers = Layers(own.pk, "vda", [one.path for one in rows.values()], rows, "qcow2", None, ())
    options = {"disk": "vda", "target_pool": None, "format": None, "target_name": ""}
    found = [*needed_by_others(layers, 0, 1), *LiveCopy().choose(own, layers, options).refusals]
    told = [(one.code, one.detail) for one in found if one.code in {"shared_base", "image_in_use"}]
    assert [code for code, __ in told] == ["shared_base", "shared_base", "image_in_use"]
    assert not [word for word in SECRETS if any(word in detail for __, detail in told)]


@pytest.mark.parametrize("is_here", [True, False])
def test_the_pool_of_a_guest_whose_images_another_node_lists_is_that_of_its_own_node(db: None, is_here: bool) -> None:
    alpha, beta = (HostFactory.create(slug=slug, kind="proxmox", cluster="c") for slug in ("alpha", "beta"))
    same = {"name": "nas", "source": "proxmox", "network": True, "path": "/mnt/pve/nas", "path_key": "nas"}
    there = StoragePoolFactory.create(host=beta, **same)
    here = StoragePoolFactory.create(host=alpha, **same) if is_here else None
    disk = GuestDiskFactory.create(guest__host=alpha, guest__kind="vm", target="scsi0")
    ImageUseFactory.create(image=ImageFactory.create(pool=there), disk=disk)
    assert pool_of(disk.guest) == here


@pytest.mark.usefixtures("quiet")
def test_a_job_of_another_host_that_holds_the_image_is_not_named(client_of: Callable[..., APIClient]) -> None:
    alpha, beta = HostFactory.create(slug="alpha"), HostFactory.create(slug="beta")
    template = ImageFactory.create(pool=StoragePoolFactory.create(host=beta), name="payroll.qcow2")
    clone = ImageFactory.create(pool=StoragePoolFactory.create(host=alpha), backing=template)
    holder = services.submit(OPERATOR, "reclaim", template.pk, {})
    body = {"kind": "reclaim", "image": clone.pk}
    refused = client_of("operator", hosts=["alpha"]).post("/api/v1/jobs/", body, format="json")
    assert (refused.status_code, refused.json()["code"]) == (409, "busy"), refused.json()
    assert refused.json()["detail"].startswith("A job on another host needs the same image")
    services.cancel(OPERATOR, holder)
    assert services.submit(OPERATOR, "reclaim", clone.pk, {}).state == Job.State.QUEUED
