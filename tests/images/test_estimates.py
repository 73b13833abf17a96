"""Estimates by the real agent: what is sampled, and that an estimate never outlives its content."""

from pathlib import Path
from typing import Any

import pytest

from images import estimates, tasks
from images.kinds.analyze import Sample
from storage_admin.jobs.models import Job
from tests.agent.harness import make_image, write
from tests.factories import HostFactory
from tests.working import OPERATOR, image_at, run, said, scan, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor")]


def test_what_changed_is_sampled_after_a_scan_and_not_again(tmp_path: Path) -> None:
    make_image(tmp_path / "a.qcow2")
    make_image(tmp_path / "b.qcow2")
    host = this_machine(tmp_path)
    scan(host)
    assert image_at(tmp_path / "a.qcow2").reclaimable_bytes is None
    job = run(Job.objects.get(kind="sample"))
    assert job.state == "succeeded", (job.error_detail, said(job))
    image = image_at(tmp_path / "a.qcow2")
    assert image.reclaimable_bytes
    assert image.reclaimable_low is not None
    assert image.reclaimable_high is not None
    assert image.reclaimable_low <= image.reclaimable_bytes <= image.reclaimable_high <= image.allocated_size
    assert image.pool.reclaimable_bytes == 2 * image.reclaimable_bytes
    assert not estimates.due(host.pk).exists()
    write(tmp_path / "a.qcow2", 0x33, "4M", "1M")
    scan(host)
    assert [image.name for image in estimates.due(host.pk)] == ["a.qcow2"]
    assert image_at(tmp_path / "a.qcow2").reclaimable_bytes is None


def test_an_image_that_changed_while_it_was_sampled_is_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.qcow2"
    make_image(path)
    host = this_machine(tmp_path)
    scan(host)
    on_event = Sample.on_event

    def meanwhile(kind: Sample, job: Job, event: dict[str, Any]) -> None:
        write(path, 0x33, "4M", "1M")
        scan(host)
        on_event(kind, job, event)

    monkeypatch.setattr(Sample, "on_event", meanwhile)
    run(Job.objects.get(kind="sample"))
    assert image_at(path).reclaimable_bytes is None
    assert estimates.due(host.pk).exists()


def test_one_image_is_analyzed_on_request(tmp_path: Path) -> None:
    make_image(tmp_path / "a.qcow2")
    scan(this_machine(tmp_path))
    job = work("analyze", image_at(tmp_path / "a.qcow2").pk, OPERATOR)
    assert job.state == "succeeded", job.error_detail
    assert image_at(tmp_path / "a.qcow2").reclaimable_bytes == (job.result or {})["reclaimable_bytes"]


def test_every_host_is_scanned_and_none_twice() -> None:
    hosts = [HostFactory.create() for _ in range(3)]
    tasks.scan_hosts()
    tasks.scan_hosts()
    assert set(Job.objects.filter(kind="scan").values_list("host_id", flat=True)) == {host.pk for host in hosts}
    assert Job.objects.count() == 3
