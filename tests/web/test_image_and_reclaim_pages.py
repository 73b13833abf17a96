"""One image, and the steps to reclaim it."""

import re

import pytest
from django.test import Client

from images.models import Image
from images.selectors import chain_of
from storage_admin.jobs.models import Job
from storage_admin.web.pages.chain_tree import tree_of
from storage_admin.web.pages.rewrite import growth_of
from tests.factories import GIB, ImageFactory
from tests.web.confirming import confirm, planned
from tests.web.conftest import Filled
from tests.web.html import tags_of, text_of

HTMX = {"HX-Request": "true"}


def test_shows_exact_bytes_and_what_reclaiming_would_win(viewer: Client, filled: Filled) -> None:
    text = text_of(viewer.get(f"/images/{filled.image.pk}/"))
    assert "Virtual size 10 GiB 10,737,418,240" in text
    assert "Physical 4 GiB 4,294,967,296" in text
    assert "Reclaimable 2 GiB 2,147,483,648 1 GiB to 3 GiB" in text


def test_the_chain_runs_from_base_to_leaf(viewer: Client, filled: Filled) -> None:
    sibling = ImageFactory.create(backing=filled.base, name="a-sibling.qcow2")
    tree = tree_of(chain_of(filled.image), filled.image.pk)
    lines = [(line.node.name, line.twigs, line.here) for line in tree.lines]
    assert lines == [
        ("base.qcow2", (), False),
        ("middle.qcow2", ("tee",), False),
        (filled.image.name, ("pipe", "corner"), True),
        (sibling.name, ("corner",), False),
    ]
    assert tree.lines[0].needed == "used by 2 overlays"


def test_a_chain_that_runs_in_a_circle_is_shown_once(viewer: Client) -> None:
    first = ImageFactory.create(name="first.qcow2", state="chain_cycle")
    second = ImageFactory.create(backing=first, name="second.qcow2", state="chain_cycle")
    Image.objects.filter(pk=first.pk).update(backing=second)
    first.refresh_from_db()
    assert [line.node.id for line in tree_of(chain_of(first), first.pk).lines] == [first.pk, second.pk]
    assert viewer.get(f"/images/{first.pk}/").status_code == 200


def test_a_deep_chain_is_walked_without_running_out_of_stack(db: None) -> None:
    images = [ImageFactory.create(name="0.qcow2")]
    for number in range(1, 200):
        images.append(ImageFactory.create(backing=images[-1], name=f"{number}.qcow2"))
    tree = tree_of(chain_of(images[-1]), images[-1].pk)
    assert [line.node.id for line in tree.lines] == [image.pk for image in images]


def test_says_why_not_and_what_to_do(operator: Client) -> None:
    image = ImageFactory.create(declared_format="", name="x.img")
    text = text_of(operator.get(f"/images/{image.pk}/"))
    assert "format_undeclared" in text
    assert "Declare it first." in text


def test_a_plan_says_in_numbers_what_would_happen(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(
        pool=filled.pool, name="alone.qcow2", reclaimable_bytes=3 * GIB, reclaimable_low=2 * GIB,
        reclaimable_high=3 * GIB, reclaimable_method="compress",
        estimate={"methods": {"compress": {
            "predicted_after_bytes": GIB, "predicted_low": GIB, "predicted_high": 2 * GIB,
            "reclaimable_bytes": 3 * GIB, "reclaimable_low": 2 * GIB, "reclaimable_high": 3 * GIB,
        }}},
    )  # fmt: skip
    text = text_of(operator.get(f"/images/{image.pk}/reclaim/"))
    assert "4 GiB → about 1 GiB 1 GiB to 2 GiB saves about 3 GiB" in text
    assert "alone.qcow2 : 4 GiB → about 1 GiB, needs 2 GiB of scratch space and keeps an undo copy until" in text
    assert "Compress alone.qcow2" in text
    assert "qemu-img convert" in text


def test_options_change_the_plan_alone(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(pool=filled.pool)
    options = {"compression": "zlib", "undo_hours": "0", "bandwidth_mib": "50", "idle_io": "false"}
    fragment = operator.get(f"/images/{image.pk}/reclaim/", options, headers=HTMX).content.decode()
    assert "<html" not in fragment
    assert "compressed with zlib" in fragment
    assert "without an undo copy" in text_of(fragment)
    assert f"-r {50 * 1024**2}" in fragment
    assert operator.post(f"/images/{image.pk}/reclaim/", options | {"show": "1"}).status_code == 200
    assert not Job.objects.filter(target_id=image.pk).exists()


@pytest.mark.parametrize(
    "options", [{"undo_hours": "many"}, {"undo_hours": "-1"}, {"compression": "rar"}, {"bandwidth_mib": "nan"},
                {"bandwidth_mib": "1e999"}, {"undo_hours": "inf"}, {"method": "magic"}, {"bandwidth_mib": "0.001"}],
)  # fmt: skip
def test_a_bad_option_gets_a_sentence_and_no_plan(operator: Client, filled: Filled, options: dict[str, str]) -> None:
    image = ImageFactory.create(pool=filled.pool)
    page = text_of(operator.get(f"/images/{image.pk}/reclaim/", options, headers=HTMX))
    assert "No plan." in page
    answer = operator.post(f"/images/{image.pk}/reclaim/", options)
    assert answer.status_code == 409
    assert "Nothing was changed." in text_of(answer)
    assert not Job.objects.filter(target_kind="image", target_id=image.pk).exists()


def test_confirming_starts_the_job_that_the_plan_showed_once(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(pool=filled.pool, name="alone.qcow2")
    address = f"/images/{image.pk}/reclaim/"
    form = {"compression": "zlib", "undo_hours": "48", "idle_io": "false"}
    form |= planned(operator.get(address, form))
    first, second = operator.post(address, form), operator.post(address, form)
    job = Job.objects.get(kind="reclaim", target_id=image.pk)
    assert first["Location"] == second["Location"] == f"/jobs/{job.pk}/"
    assert job.options["compression"] == "zlib"
    assert job.options["undo_hours"] == 48
    assert job.options["idle_io"] is False


def test_replacing_without_an_undo_copy_wants_its_own_confirmation(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(pool=filled.pool, name="alone.qcow2")
    address = f"/images/{image.pk}/reclaim/"
    answer = confirm(operator, address, {"undo_hours": "0"})
    assert "Confirm that alone.qcow2 is replaced without an undo copy." in text_of(answer)
    assert not Job.objects.filter(target_id=image.pk, kind="reclaim").exists()
    confirm(operator, address, {"undo_hours": "0", "without_undo": "on"})
    assert Job.objects.get(target_id=image.pk, kind="reclaim").options["undo_hours"] == 0


def test_what_is_refused_has_no_button_and_starts_nothing(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(pool=filled.pool)
    seen = planned(operator.get(f"/images/{image.pk}/reclaim/"))
    Image.objects.filter(pk=image.pk).update(in_use=True, in_use_detail="mounted at /mnt")
    page = operator.get(f"/images/{image.pk}/reclaim/").content.decode()
    assert 'data-code="image_in_use"' in page
    assert not re.search(r"<b>[^<]*image_in_use", page), "a code is no headline"
    assert planned(page) == {}
    answer = operator.post(f"/images/{image.pk}/reclaim/", seen)
    assert answer.status_code == 409
    assert 'data-code="image_in_use"' in answer.content.decode()
    assert not re.search(r"<b>[^<]*image_in_use", answer.content.decode())
    assert not Job.objects.filter(target_id=image.pk, kind="reclaim").exists()


@pytest.mark.parametrize(
    ("virtual", "available", "fits"),
    [(10 * GIB, 40 * GIB, True), (60 * GIB, 40 * GIB, False), (None, 40 * GIB, None), (10 * GIB, None, None)],
)
def test_zero_filling_is_warned_of_with_the_room_that_there_is(
    filled: Filled, virtual: int | None, available: int | None, fits: bool | None
) -> None:
    filled.pool.available_bytes = available
    filled.pool.save()
    growth = growth_of(ImageFactory.create(pool=filled.pool, virtual_size=virtual))
    assert growth.fits is fits
    assert growth.up_to_bytes == virtual


@pytest.mark.parametrize("state", ["chain_broken", "chain_cycle"])
def test_a_broken_chain_offers_no_amount_and_no_button_but_the_way_to_repair_it(
    operator: Client, filled: Filled, state: str
) -> None:
    image = ImageFactory.create(
        pool=filled.pool, name="lost it.qcow2", state=state, backing_file="gone.qcow2", backing_path="/srv/gone.qcow2",
        backing_format="qcow2", reclaimable_bytes=3 * GIB, reclaimable_method="compress",
    )  # fmt: skip
    page = operator.get(f"/images/{image.pk}/").content.decode()
    main = page[page.index("<main") :]
    assert [found.get("href") for tag, found in tags_of(main) if (found.get("href") or "").endswith("/reclaim/")] == []
    assert "3 GiB" not in text_of(main)
    assert f"-F qcow2 -b NEW_PATH '{image.path}'" in text_of(main)
    assert (f"/hosts/{filled.host.pk}/scan/" in main, "/srv/gone.qcow2" in main) == (True, state == "chain_broken")
    for address in ("/images/?search=lost", f"/images/{image.pk}/reclaim/", f"/pools/{filled.pool.pk}/"):
        assert "reclaimable 3 GiB" not in operator.get(address).content.decode(), address


def test_a_plan_in_place_does_not_promise_that_the_original_stays(operator: Client, filled: Filled) -> None:
    image = ImageFactory.create(pool=filled.pool, name="disk.raw", format="raw", declared_format="raw")
    address = f"/images/{image.pk}/reclaim/"
    said = {method: text_of(operator.get(address, {"method": method}))
            for method in ("in_place", "copy")}  # fmt: skip
    assert "The original stays" not in said["in_place"]
    assert "The original is replaced only after the new image is complete" in said["copy"]
