"""Estimates by the real agent: what is sampled, and that an estimate never outlives its content."""

from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images import tasks
from images.filters import ImageFilters
from images.kinds.analyze import Sample
from images.kinds.reclaim import Reclaim
from images.models import Image
from images.rewrite import space
from images.scan.bulk_write import resolve_host
from images.selectors import images_for, overview
from images.serializers import ImageSerializer
from storage_admin.accounts.models import SYSTEM
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.agent.harness import make_image, write
from tests.factories import HostFactory, ImageFactory, JobFactory, StoragePoolFactory
from tests.harness.patching import do_after, do_before
from tests.working import OPERATOR, image_at, reread, run, scan, scanned_machine, succeeded, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor")]


def test_what_changed_is_sampled_after_a_scan_and_not_again(tmp_path: Path) -> None:
    make_image(tmp_path / "a.qcow2")
    make_image(tmp_path / "b.qcow2")
    host = scanned_machine(tmp_path)
    assert image_at(tmp_path / "a.qcow2").reclaimable_bytes is None
    succeeded(run(Job.objects.get(kind="sample")))
    image = image_at(tmp_path / "a.qcow2")
    assert image.reclaimable_bytes
    assert image.reclaimable_low is not None
    assert image.reclaimable_high is not None
    assert image.reclaimable_low <= image.reclaimable_bytes <= image.reclaimable_high <= image.occupied_bytes
    other = image_at(tmp_path / "b.qcow2")
    assert image.pool.reclaimable_bytes == image.reclaimable_bytes + (other.reclaimable_bytes or 0)
    assert not space.due_for_estimates(host.pk).exists()
    write(tmp_path / "a.qcow2", 0x33, "4M", "1M")
    scan(host)
    assert [image.name for image in space.due_for_estimates(host.pk)] == ["a.qcow2"]
    assert image_at(tmp_path / "a.qcow2").reclaimable_bytes is None


def test_images_that_are_sampled_or_scanned_are_counted_and_never_called_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.qcow2", "b.qcow2"):
        make_image(tmp_path / name)
    told: list[tuple[Any, ...]] = []

    def keep(recorder: Recorder, _: dict[str, Any]) -> None:
        recorder.flush()
        job = Job.objects.filter(state="running").get()
        told.append(
            (job.kind, job.stage, job.progress, job.message, job.done_bytes, job.total_bytes, job.bytes_per_sec)
        )

    do_after(monkeypatch, Recorder, "progress", keep)
    scan(this_machine(tmp_path))
    run(Job.objects.get(kind="sample"))
    assert {row[4:] for row in told} == {(None, None, None)}
    assert ("scan", "checking which images are in use", 100.0, "", None, None, None) in told
    sampled = [row[2:4] for row in told if row[:2] == ("sample", "sampling")]
    assert sampled[0] == (0.0, "image 1 of 2")
    # The agent tells some of them only: both are small.
    assert all(said.startswith(f"image {1 + (share == 50)} of 2") for share, said in sampled), sampled


def test_an_image_that_changed_while_it_was_sampled_is_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.qcow2"
    make_image(path)
    host = scanned_machine(tmp_path)

    def meanwhile(*_: Any) -> None:
        write(path, 0x33, "4M", "1M")
        scan(host)

    do_before(monkeypatch, Sample, "on_event", meanwhile)
    run(Job.objects.get(kind="sample"))
    assert image_at(path).reclaimable_bytes is None
    assert space.due_for_estimates(host.pk).exists()


def test_one_image_is_analyzed_on_request(tmp_path: Path) -> None:
    make_image(tmp_path / "a.qcow2")
    scan(this_machine(tmp_path))
    job = succeeded(work("analyze", image_at(tmp_path / "a.qcow2").pk, OPERATOR))
    assert image_at(tmp_path / "a.qcow2").reclaimable_bytes == (job.result or {})["reclaimable_bytes"]


def test_a_full_analysis_says_what_each_method_would_win_with_a_bound(tmp_path: Path) -> None:
    make_image(tmp_path / "a.qcow2")
    scan(this_machine(tmp_path))
    image = image_at(tmp_path / "a.qcow2")
    assert not space.is_bound(image)
    assert space.predicted(image, "compress") == (None, None, None)
    job = succeeded(work("analyze", image.pk, OPERATOR, mode="full"))
    assert job.plan["method"] == "full"
    image = image_at(tmp_path / "a.qcow2")
    assert space.is_bound(image)
    wins = {}
    for method in space.METHODS:
        after, low, high = space.predicted(image, method)
        assert after is not None
        assert low is not None
        assert high is not None
        assert low <= after <= high
        wins[method] = max(image.occupied_bytes - after, 0)
    assert image.reclaimable_bytes == wins[image.reclaimable_method] >= 0.98 * max(wins.values())
    usual = space.predicted(image, "compress")
    for compression in ("zlib", "zstd"):
        one = space.predicted(image, "compress", compression)
        assert (usual.low or 0) <= (one.low or 0) <= (one.high or 0) <= (usual.high or 0)


def test_the_space_check_of_a_named_compression_rests_on_what_was_measured_of_it(tmp_path: Path) -> None:
    make_image(tmp_path / "a.qcow2")
    scan(this_machine(tmp_path))
    for compression, other in (("zlib", "zstd"), ("zstd", "zlib")):
        work("analyze", image_at(tmp_path / "a.qcow2").pk, OPERATOR, mode="full", compression=compression)
        image = image_at(tmp_path / "a.qcow2")
        measured, sampled = (space.predicted(image, "compress", name).high or 0 for name in (compression, other))
        assert measured < sampled, "a sample is no bound: at worst nothing becomes smaller"
        for asked, bound in ((compression, measured), (other, sampled), ("auto", max(measured, sampled))):
            job = JobFactory.build(options={"method": "compress", "compression": asked}, plan={})
            assert Reclaim().asked(image, [], job)["predicted_high"] == bound


def test_a_raw_image_has_no_number_for_what_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes(b"x" * (1 << 20) + bytes(1 << 20))
    scan(this_machine(tmp_path))
    Image.objects.update(declared_format="raw")
    image = image_at(tmp_path / "a.raw")
    work("analyze", image.pk, OPERATOR)
    image = image_at(tmp_path / "a.raw")
    assert image.reclaimable_method == "in_place"
    assert image.reclaimable_bytes == 1 << 20
    assert space.predicted(image, "compress") == (None, None, None)
    assert space.predicted(image, "copy").after is not None


def test_a_method_that_is_not_offered_for_a_format_is_a_fact_and_no_offer() -> None:
    image = ImageFactory.create(declared_format="vhdx", reclaimable_bytes=None)
    numbers = dict.fromkeys(("reclaimable_bytes", "reclaimable_low", "reclaimable_high"), 5)
    after = {"predicted_after_bytes": 7, "predicted_low": 6, "predicted_high": 8}
    space.record_estimate(image, bytes(image.fingerprint), {"methods": {"copy": numbers | after}}, timezone.now())
    assert (reread(image).reclaimable_bytes, image.reclaimable_method) == (None, "")
    assert space.predicted(image, "copy") == (7, 6, 8)


def test_holes_in_place_are_no_offer_on_a_network_also_where_a_row_has_offered_them() -> None:
    numbers: dict[str, Any] = {
        method: dict.fromkeys(("reclaimable_bytes", "reclaimable_low", "reclaimable_high"), won)
        for method, won in (("in_place", 5), ("copy", 3))
    }
    image = ImageFactory.create(name="disk.raw", admin_format="raw", declared_format="raw", format="raw")
    space.record_estimate(image, bytes(image.fingerprint), {"methods": numbers}, timezone.now())
    assert (image.reclaimable_bytes, image.reclaimable_method) == (5, "in_place")
    image.pool.network = True
    image.pool.save()
    resolve_host(image.host)
    assert (reread(image).reclaimable_bytes, image.reclaimable_method) == (3, "copy")


@pytest.mark.parametrize(
    ("about", "network", "offer"),
    [
        ({}, False, (8, "compress")),
        ({"nlink": 2}, False, (1, "in_place")),
        ({"nlink": 2}, True, (None, "")),
        ({"header": {"immutable": True}}, False, (None, "")),
        ({"header": {"data_file": "vm.raw"}}, False, (None, "")),
        ({"name": "base-100-disk-0.qcow2"}, False, (None, "")),
    ],
)
def test_no_method_is_offered_that_the_plan_of_a_job_would_refuse(
    about: dict[str, Any], network: bool, offer: tuple[int | None, str]
) -> None:
    numbers = {
        method: dict.fromkeys(("reclaimable_bytes", "reclaimable_low", "reclaimable_high"), won)
        for method, won in (("in_place", 1), ("compress", 8))
    }
    pool = StoragePoolFactory.create(network=network, source="proxmox")
    image = ImageFactory.create(pool=pool, **about)
    space.record_estimate(image, bytes(image.fingerprint), {"methods": numbers}, timezone.now())
    assert (image.reclaimable_bytes, image.reclaimable_method) == offer


def test_an_estimate_from_before_there_were_methods_says_nothing_of_them() -> None:
    image = ImageFactory.create(estimate={"method": "compress", "predicted_after_bytes": 5})
    assert space.predicted(image, "compress") == (None, None, None)


def test_every_host_is_scanned_and_none_twice() -> None:
    hosts = [HostFactory.create() for _ in range(3)]
    tasks.scan_hosts()
    tasks.scan_hosts()
    assert set(Job.objects.filter(kind="scan").values_list("host_id", flat=True)) == {host.pk for host in hosts}
    assert Job.objects.count() == 3


def test_a_broken_chain_offers_nothing_in_no_list_and_no_sum_until_it_is_whole_again(tmp_path: Path) -> None:
    away = tmp_path.parent / "away.qcow2"
    base, top, other = (tmp_path / f"{name}.qcow2" for name in ("base", "top", "other"))
    for path, below in ((base, None), (top, base.name), (other, None)):
        make_image(path, base=below)
    host = scanned_machine(tmp_path)
    run(Job.objects.get(kind="sample"))
    offer = [getattr(image_at(top), name) for name in space.OFFER]
    assert offer[0] > 0

    def offered(*paths: Path) -> list[int]:
        return [image_at(path).reclaimable_bytes or 0 for path in paths]

    def sums() -> tuple[int | None, int | None, int]:
        listed = ImageFilters({"min_reclaimable": 1}, images_for(SYSTEM)).qs
        rows = ImageSerializer(listed, many=True).data
        (pool,) = host.pools.all()
        total = overview(SYSTEM).totals.reclaimable_bytes
        return pool.reclaimable_bytes, total, sum(row["reclaimable_bytes"] for row in rows)

    assert sums() == ((image_at(base).reclaimable_bytes or 0) + sum(offered(top, other)),) * 3
    base.rename(away)
    scan(host)
    assert image_at(top).state == "chain_broken"
    assert [getattr(image_at(top), name) for name in space.OFFER] == [None, None, None, ""]
    assert sums() == (sum(offered(other)),) * 3
    plan = services.plan(SYSTEM, "reclaim", image_at(top).pk, {})
    assert (plan.predicted_after_bytes, plan.won_bytes, plan.refusals[0].code) == (None, None, "chain_broken")
    space.record_estimate(image_at(top), bytes(image_at(top).fingerprint), image_at(top).estimate or {}, timezone.now())
    assert image_at(top).reclaimable_bytes is None
    away.rename(base)
    scan(host)
    # The base's times are new, so that it has to be sampled again; nobody has to look at the overlay.
    assert [getattr(image_at(top), name) for name in space.OFFER] == offer
    assert sums() == (sum(offered(top, other)),) * 3
