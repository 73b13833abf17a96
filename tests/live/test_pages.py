"""Pages for what is done to running guests: plans with causes, a name that is typed, and the job that follows."""

import re
from pathlib import Path

import pytest

from storage_admin.jobs.models import Job
from tests.harness.guests import Disk, Starts
from tests.live.chains import chain_of
from tests.live.conftest import filesystem_image, scanned
from tests.working import ON_LIBVIRT, client_as, run

pytestmark = [pytest.mark.guest, pytest.mark.django_db, *ON_LIBVIRT]


def hidden(page: str, name: str) -> str:
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found is not None
    return found[1]


def test_a_chain_is_flattened_from_the_guests_page_once_its_name_is_typed(tcg_guest: Starts, chain: list[Path]) -> None:
    guest, operator_page = tcg_guest(Disk(chain[0])), client_as(role="operator")
    __, row = scanned(chain[0].parent, guest)
    address = f"/guests/{row.pk}/live-flatten/"
    assert f"{address}?disk=vda" in operator_page.get(f"/guests/{row.pk}/").content.decode()
    page = operator_page.get(address, {"disk": "vda"}).content.decode()
    assert f"virsh blockpull {guest.name} vda" in page
    assert str(chain[2]) in page
    sent = {"disk": "vda", "planned": hidden(page, "planned"), "key": hidden(page, "key")}
    refused = operator_page.post(address, sent | {"confirm_name": "another"})
    assert (refused.status_code, Job.objects.filter(kind="live_flatten").exists()) == (200, False)
    other = operator_page.post(address, sent | {"confirm_name": guest.name, "bandwidth_mib": "5"})
    assert Job.objects.filter(kind="live_flatten").exists() is False, "another plan than the one that was shown"
    assert b"virsh blockpull" in other.content
    operator_page.post(address, sent | {"confirm_name": guest.name})
    job = run(Job.objects.get(kind="live_flatten"))
    assert (job.state, chain_of(guest)) == ("succeeded", ["top.qcow2"])
    assert operator_page.get(f"/jobs/{job.pk}/").status_code == 200


def test_the_page_of_a_trim_names_the_causes(agent_guest: Starts, shared_folder: Path) -> None:
    guest = agent_guest(Disk(filesystem_image(shared_folder / "disk.qcow2"), discard="ignore"))
    operator_page = client_as(role="operator")
    __, row = scanned(shared_folder, guest)
    assert f"/guests/{row.pk}/trim/" in operator_page.get(f"/guests/{row.pk}/").content.decode()
    page = operator_page.get(f"/guests/{row.pk}/trim/").content.decode()
    for code in ("discard_ignored", "zeroes_kept", "nothing_to_free"):
        assert code in page


def test_a_guest_that_is_off_has_no_links_to_live_jobs(tcg_guest: Starts, chain: list[Path]) -> None:
    guest, operator_page = tcg_guest(Disk(chain[0])), client_as(role="operator")
    guest.stop()
    __, row = scanned(chain[0].parent, guest)
    assert "live-flatten" not in operator_page.get(f"/guests/{row.pk}/").content.decode()
    page = operator_page.get(f"/guests/{row.pk}/live-merge/", {"disk": "vda"}).content.decode()
    assert "guest_off" in page
    assert 'name="confirm_name"' not in page
