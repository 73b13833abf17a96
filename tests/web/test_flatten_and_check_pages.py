"""The steps to flatten a chain, to convert an image, and to check it."""

import pytest
from django.test import Client

from storage_admin.jobs.models import Job
from tests.factories import GIB, ImageFactory
from tests.web.confirming import planned
from tests.web.conftest import Filled
from tests.web.html import tags_of, text_of
from tests.web.test_image_and_reclaim_pages import HTMX


def chosen(page: str, name: str) -> list[str]:
    """The values that a select element offers."""
    inside, values = False, []
    for tag, found in tags_of(page):
        if tag == "select":
            inside = found.get("name") == name
        elif tag == "option" and inside:
            values.append(found.get("value") or "")
    return values


@pytest.fixture
def chain(filled: Filled) -> list[int]:
    """Ids of base, middle and top."""
    base = ImageFactory.create(pool=filled.pool, name="lowest.qcow2", allocated_size=2 * GIB)
    middle = ImageFactory.create(pool=filled.pool, name="mid.qcow2", backing=base, chain_depth=2, allocated_size=GIB)
    top = ImageFactory.create(pool=filled.pool, name="highest.qcow2", backing=middle, chain_depth=3, allocated_size=GIB)
    return [base.pk, middle.pk, top.pk]


def test_the_page_of_an_overlay_offers_to_flatten_it_and_that_of_a_base_does_not(
    operator: Client, chain: list[int]
) -> None:
    assert f"/images/{chain[2]}/flatten/" in operator.get(f"/images/{chain[2]}/").content.decode()
    assert f"/images/{chain[0]}/flatten/" not in operator.get(f"/images/{chain[0]}/").content.decode()


def test_a_plan_to_flatten_says_what_moves_and_who_needs_it(operator: Client, chain: list[int]) -> None:
    page = operator.get(f"/images/{chain[2]}/flatten/").content.decode()
    text = text_of(page)
    assert "A new copy of highest.qcow2 takes in the data of 2 images further down the chain." in text
    assert "It will have no backing file. The chain depth changes from 3 to 1." in text
    assert "mid.qcow2 its data is copied" in text
    assert "qemu-img rebase" in text
    assert chosen(page, "down_to") == ["", str(chain[0])]
    assert "zero" not in {found.get("id") for _, found in tags_of(page)}


def test_an_id_that_is_no_whole_number_is_refused_at_its_field(operator: Client, chain: list[int]) -> None:
    page = operator.get(f"/images/{chain[2]}/flatten/", {"down_to": f"{chain[0]}.0"})
    assert (page.context["plan"], list(page.context["error"].fields)) == (None, ["down_to"])


def test_flattening_down_to_an_image_is_confirmed_and_queued(operator: Client, chain: list[int]) -> None:
    address = f"/images/{chain[2]}/flatten/"
    fragment = operator.get(address, {"down_to": str(chain[0])}, headers=HTMX).content.decode()
    assert "Its backing file will be lowest.qcow2. The chain depth changes from 3 to 2." in text_of(fragment)
    operator.post(address, {"down_to": str(chain[0])} | planned(fragment))
    job = Job.objects.get(kind="flatten", target_id=chain[2])
    assert job.options["down_to"] == chain[0]


def test_a_check_writes_nothing_and_asks_for_no_confirmation_of_a_loss(operator: Client, chain: list[int]) -> None:
    address = f"/images/{chain[2]}/check/"
    page = operator.get(address).content.decode()
    assert "highest.qcow2 is only read." in text_of(page)
    operator.post(address, planned(page))
    assert Job.objects.get(kind="check").options["repair"] == "none"


def test_a_repair_of_all_is_for_admins(operator: Client, chain: list[int]) -> None:
    address = f"/images/{chain[2]}/check/"
    assert operator.get(address, {"repair": "all"}).status_code == 403
    assert operator.post(address, {"repair": "all"}).status_code == 403
    assert not Job.objects.filter(kind="check").exists()


def test_digging_in_place_asks_for_no_undo_copy(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(pool=filled.pool, name="disk.raw", format="raw", declared_format="raw")
    asked = {"method": "in_place", "undo_hours": "0"}
    page = operator.get(f"/images/{image.pk}/reclaim/", asked).content.decode()
    assert "not needed: the image's content stays the same" in text_of(page)
    operator.post(f"/images/{image.pk}/reclaim/", asked | planned(page))
    assert Job.objects.get(kind="reclaim", target_id=image.pk).plan["method"] == "in_place"


def test_a_conversion_is_planned_and_queued_with_its_options(operator: Client, chain: list[int]) -> None:
    address = f"/images/{chain[2]}/convert/"
    asked = {"format": "vmdk", "format_options": "subformat=streamOptimized", "target_name": "export.vmdk"}
    fragment = operator.get(address, asked, headers=HTMX).content.decode()
    assert "The image is unchanged" in text_of(fragment)
    assert "not needed: the image is not changed" in text_of(fragment)
    operator.post(address, asked | planned(fragment))
    job = Job.objects.get(kind="convert", target_id=chain[2])
    assert job.options["format_options"] == {"subformat": "streamOptimized"}
    assert job.options["target_name"] == "export.vmdk"


@pytest.mark.parametrize(
    "asked",
    [
        {"format": "exe"},
        {"format_options": "backing_file=/etc/passwd"},
        {"format_options": "=,=,"},
        {"target_name": "a/b"},
    ],
)
def test_a_conversion_that_makes_no_sense_gets_a_sentence(
    operator: Client, chain: list[int], asked: dict[str, str]
) -> None:
    page = text_of(operator.get(f"/images/{chain[2]}/convert/", asked, headers=HTMX))
    assert "No plan." in page
