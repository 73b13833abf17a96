"""A VM of Proxmox VE in a browser: from its page to a plan and a job, and axe finds nothing on the way."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from storage_admin.guests.models import Guest
from storage_admin.hosts import secrets
from storage_admin.jobs.models import Job
from tests.factories import GuestDiskFactory, GuestFactory, HostFactory, StoragePoolFactory
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import SECRET, TOKEN_ID, lab
from tests.web.browser import axe

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("quiet")]

VOLUME = "store:120/vm-120-disk-0.qcow2"
CONFIG = f"agent: 1\nname: web\nscsi0: {VOLUME},size=8G\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProxmoxServer]:
    """The node of the tests' data with one VM more, which runs."""
    with proxmox(lab(), tmp_path) as running:
        running.world.guests["vm", 120] = world.Guest("vm", 120, CONFIG, running=True, trims=[])
        yield running
    assert running.wrong == []


@pytest.fixture
def web(server: ProxmoxServer) -> Guest:
    endpoint = server.endpoint()
    host = HostFactory.create(
        kind="proxmox", transport="api", address=endpoint.address, port=endpoint.port, node="pve1", token_id=TOKEN_ID,
        tls_fingerprint=endpoint.fingerprint, token_locked=secrets.lock(SECRET), status="ok",
    )  # fmt: skip
    StoragePoolFactory.create(host=host, name="s2", source="proxmox")
    digest = hashlib.sha1(CONFIG.encode()).hexdigest()
    guest = GuestFactory.create(host=host, kind="vm", uid="120", name="web", state="running", digest=digest)
    GuestDiskFactory.create(guest=guest, target="scsi0", volume=VOLUME, cache="", discard="")
    GuestDiskFactory.create(guest=guest, target="ide2", device="cdrom", path="")
    return guest


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.night)])
def test_a_disk_is_moved_by_hand_from_the_guests_page(
    admins_page: Callable[..., Page], server: ProxmoxServer, web: Guest, scheme: str
) -> None:
    page = admins_page(color_scheme=scheme)
    page.goto("/guests/")
    page.get_by_role("link", name="web", exact=True).click()
    assert axe(page) == []
    page.get_by_role("link", name="Move scsi0").click()
    page.get_by_label("Target storage").fill("s2")
    page.get_by_role("button", name="Show plan").click()
    page.get_by_text("qm disk move 120 scsi0 s2").wait_for()
    assert axe(page) == []
    assert not Job.objects.exists()
    # By the API alone nobody sees which lines of the configuration the move would drop.
    page.get_by_role("link", name="Accept for this configuration").click()
    assert axe(page) == []
    page.get_by_role("button", name="Move a disk").click()
    page.wait_for_url("**/jobs/*/")
    job = Job.objects.get()
    assert (job.kind, job.target_id, job.options["storage"]) == ("move_disk", web.pk, "s2")
    assert job.options["accept_hidden_lines"] == web.digest
    page.goto(f"/guests/{web.pk}/trim/")
    page.get_by_text("scsi0 has discard=ignore").wait_for()
    assert axe(page) == []
