"""A guest whose definition names its image's chain itself: the chain is not changed under it."""

from pathlib import Path

import pytest

from images.models import Image
from storage_admin.guests.models import GuestDisk
from storage_admin.jobs import services
from tests.harness.guests import Disk, Domains
from tests.working import OPERATOR, create, image_at, scanned_machine

pytestmark = [pytest.mark.guest, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_chain_that_a_definition_names_is_not_flattened(
    domains: Domains, shared_folder: Path, recorded: bool
) -> None:
    base = create(shared_folder / "base.qcow2")
    top = create(shared_folder / "top.qcow2", base="base.qcow2")
    domains.define([Disk(top, backing=base if recorded else None)])
    scanned_machine(shared_folder)
    assert GuestDisk.objects.get(path=str(top)).records_chain is recorded
    codes = [refusal.code for refusal in services.plan(OPERATOR, "flatten", image_at(top).pk, {}).refusals]
    assert codes == (["guest_records_chain"] if recorded else [])
    # What keeps the chain as it is may be done.
    assert services.plan(OPERATOR, "reclaim", Image.objects.get(pk=image_at(top).pk).pk, {}).refusals == ()
