"""A boot storm before it starts: what may boot, who may say so, what it costs, how many guests fit."""

import json
from typing import Any

import pytest

from benchmarks import advice, boot, profiles, results, services
from benchmarks.kind import RunBenchmark
from benchmarks.models import Benchmark
from benchmarks.profiles import Profile
from benchmarks.steps import GIB, MIB
from storage_admin.accounts.models import ForbiddenError
from storage_admin.agent.bench import boot as agent
from storage_admin.agent.protocol import unb64
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services as jobs
from storage_admin.jobs.models import Job, ResourceLock
from tests.benchmarks.conftest import page_of
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory
from tests.factories import HostFactory, ImageFactory, StoragePoolFactory
from tests.web.confirming import confirm
from tests.working import ADMIN, OPERATOR, client_as, invalid_fields

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

KERNEL: dict[str, Any] = {"kernel": "/boot/vmlinuz", "initrd": "/boot/initrd.img", "append": "console=ttyS0"}


def profile(pool: StoragePool, *, quick: bool = True, size_bytes: int | None = None, **options: Any) -> Profile:
    return profiles.build(pool, "boot", quick=quick, size_bytes=size_bytes, boot=boot.clean("boot", options))


def counts(made: Profile) -> list[int]:
    return sorted({step["guests"] for step in made.steps})


def refusal_of(pool: StoragePool, **options: Any) -> str:
    plan = jobs.plan(ADMIN, "benchmark", pool.pk, {"kind": "boot", "boot": options})
    return plan.refusals[0].code if plan.refusals else ""


def available(pool: StoragePool, memory_bytes: int) -> None:
    pool.host.capabilities["memory_available_bytes"] = memory_bytes
    pool.host.save()


def test_each_count_is_measured_in_all_three_layouts(pool: StoragePool) -> None:
    quick, thorough = (profile(pool, quick=quick, **KERNEL) for quick in (True, False))
    assert (counts(quick), counts(thorough)) == ([1, 4], [1, 5, 10, 15])
    assert [step["setting"] for step in quick.steps[:3]] == [
        {"layout": layout, "guests": 1} for layout in ("raw", "raw+qcow2", "qcow2+qcow2")
    ]
    assert counts(profile(pool, guests=[2, 3], **KERNEL)) == [2, 3]
    assert {step["layout"] for step in profile(pool, layouts=["raw"], **KERNEL).steps} == {"raw"}


def test_only_as_many_guests_as_fit_into_the_memory_are_offered_and_that_is_said(pool: StoragePool) -> None:
    available(pool, 8 * 320 * MIB + 256 * MIB + MIB)
    thorough = profile(pool, quick=False, **KERNEL)
    assert counts(thorough) == [1, 5, 8]
    assert "8 guests of 256 MiB need 2.5 GiB of memory" in thorough.warnings[0]
    assert "2.75 GiB were available at the last scan, enough for 8." in thorough.warnings[0]
    assert counts(profile(pool, quick=False, memory_bytes=32 * MIB, **KERNEL)) == [1, 5, 10, 15]
    asked = profile(pool, guests=[15], **KERNEL)
    assert counts(asked) == [15]
    assert "15 guests of 256 MiB need 4.69 GiB" in asked.warnings[0]
    assert "enough for 8. Guests that do not fit at the start are left out." in asked.warnings[0]
    available(pool, 0)
    assert counts(profile(pool, quick=False, **KERNEL)) == [1]


def test_the_cost_counts_each_copy_and_what_each_guest_may_write(pool: StoragePool) -> None:
    image = ImageFactory.create(pool=pool, allocated_size=2 * GIB, virtual_size=10 * GIB)
    (made,) = [profile(pool, image=image.pk, guests=[4], layouts=["raw"], size_bytes=512 * MIB)]
    assert 2 * GIB + 4 * 2.5 * GIB <= made.cost.scratch_bytes < 2 * GIB + 4 * 2.5 * GIB + 8 * MIB
    (overlays,) = [profile(pool, image=image.pk, guests=[4], layouts=["raw+qcow2"], size_bytes=512 * MIB)]
    assert 4 * GIB <= overlays.cost.scratch_bytes < 4 * GIB + 32 * MIB
    assert made.cost.bytes_written > 8 * GIB > overlays.cost.bytes_written


def test_a_compressed_image_is_counted_as_what_it_unpacks_to(pool: StoragePool) -> None:
    image = ImageFactory.create(pool=pool, allocated_size=GIB, virtual_size=10 * GIB)
    plain = profile(pool, image=image.pk, layouts=["raw"], guests=[1]).cost.scratch_bytes
    predicted = {"predicted_after_bytes": 3 * GIB, "predicted_high": 3 * GIB}
    image.estimate = {"mode": "full", "methods": {"copy": predicted}}
    image.analyzed_fingerprint = image.fingerprint
    image.save()
    assert profile(pool, image=image.pk, layouts=["raw"], guests=[1]).cost.scratch_bytes == plain + 4 * GIB


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("size_bytes", [MIB, None])
@pytest.mark.parametrize("with_image", [True, False])
def test_the_agent_takes_every_profile_and_needs_no_more_than_was_stated(
    pool: StoragePool, quick: bool, size_bytes: int | None, with_image: bool
) -> None:
    base = ImageFactory.create(pool=pool, virtual_size=GIB, allocated_size=GIB)
    image = ImageFactory.create(backing=base, virtual_size=GIB, allocated_size=100 * MIB, in_use=False)
    options = {"image": image.pk} if with_image else KERNEL
    made = profile(pool, quick=quick, size_bytes=size_bytes, **options)
    cleaned = boot.clean("boot", options)
    assert cleaned is not None
    steps = agent.parse(json.loads(json.dumps(boot.told(pool.host, made.steps, cleaned))))
    assert len(steps) == len(made.steps)
    assert max(step.needed_bytes for step in steps) <= made.cost.scratch_bytes


def test_the_image_is_sent_by_its_path_and_its_facts_as_they_are_when_it_starts(pool: StoragePool) -> None:
    base = ImageFactory.create(pool=pool, allocated_size=MIB)
    image = ImageFactory.create(backing=base, allocated_size=MIB)
    job = services.submit(OPERATOR, "boot", pool.pk, {"boot": {"image": image.pk}}).job
    assert job is not None
    locked = set(ResourceLock.objects.filter(job=job).values_list("key", "exclusive"))
    assert locked >= {(f"image:{image.pk}", False), (f"image:{base.pk}", False)}
    image.mtime_ns += 1
    image.save()
    (first, *_rest) = RunBenchmark().request(job)["steps"]
    assert unb64(first["image"]["path_b64"]) == image.path.encode()
    assert first["image"]["mtime_ns"] == image.mtime_ns
    assert [unb64(link["path_b64"]) for link in first["chain"]] == [base.path.encode()]
    assert not any("path_b64" in json.dumps(step) for step in Benchmark.objects.get(job=job).steps)


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"in_use": True, "in_use_detail": "locked"}, "image_in_use"),
        ({"in_use": None}, "guests_unknown"),
        ({"state": "missing"}, "stale_plan"),
        ({"declared_format": ""}, "format_undeclared"),
        ({"format": "vmdk", "declared_format": "vmdk"}, "unsupported_subformat"),
        ({"encrypted": True}, "encrypted"),
        ({"header": {"dirty": True}}, "dirty_or_corrupt"),
        ({"nlink": 2}, ""),
    ],
)
def test_an_image_that_cannot_be_copied_safely_is_refused(
    pool: StoragePool, columns: dict[str, Any], code: str
) -> None:
    image = ImageFactory.create(pool=pool, allocated_size=MIB, **columns)
    assert refusal_of(pool, image=image.pk) == code


def test_an_image_of_another_host_does_not_exist_here(pool: StoragePool) -> None:
    image = ImageFactory.create(pool=StoragePoolFactory.create(host=HostFactory.create(slug="other")))
    for number in (image.pk, 987_654):
        with pytest.raises(InvalidError, match=f"no image {number} on"):
            services.submit(OPERATOR, "boot", pool.pk, {"boot": {"image": number}})


def test_a_kernel_of_the_host_is_named_by_admins_alone(pool: StoragePool) -> None:
    with pytest.raises(ForbiddenError):
        services.submit(OPERATOR, "boot", pool.pk, {"boot": KERNEL})
    assert not Job.objects.exists()
    assert services.submit(ADMIN, "boot", pool.pk, {"boot": KERNEL}).kind == "boot"
    Job.objects.update(state=Job.State.FAILED)
    with pytest.raises(ForbiddenError):
        jobs.retry(OPERATOR, Job.objects.get())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (None, "boot.image"),
        ({}, "boot.image"),
        ({"image": "7"}, "boot.image"),
        ({"kernel": "boot/vmlinuz"}, "boot.kernel"),
        ({"kernel": "/boot/a\n"}, "boot.kernel"),
        ({"image": 1, "append": "x"}, "boot.kernel"),
        ({"image": 1, "guests": []}, "boot.guests"),
        ({"image": 1, "guests": [65]}, "boot.guests"),
        ({"image": 1, "guests": [True]}, "boot.guests"),
        ({"image": 1, "guests": [2, 2]}, "boot.guests"),
        ({"image": 1, "memory_bytes": 5}, "boot.memory_bytes"),
        ({"image": 1, "pattern": ""}, "boot.pattern"),
        ({"image": 1, "up": "ping"}, "boot.up"),
        ({"image": 1, "layouts": ["vmdk"]}, "boot.layouts"),
        ({"image": 1, "xml": "<domain/>"}, "boot"),
        ([1], "boot"),
    ],
)
def test_senseless_options_are_named(pool: StoragePool, options: Any, field: str) -> None:
    assert list(invalid_fields(services.submit, ADMIN, "boot", pool.pk, {"boot": options})) == [field]


def test_what_boots_goes_with_no_other_kind(pool: StoragePool) -> None:
    assert list(invalid_fields(services.submit, ADMIN, "dd", pool.pk, {"boot": KERNEL})) == ["boot"]


@pytest.mark.parametrize(
    ("lacks", "package"),
    [
        ({"tools": {"virsh": False}}, "libvirt-clients"),
        ({"tools": {"qemu-img": False}}, "qemu-utils"),
        ({"tools": {"qemu-system": False}}, "qemu-system-x86"),
        ({"libvirt": "absent"}, "libvirt-daemon-system"),
    ],
)
def test_what_cannot_run_guests_names_the_package(pool: StoragePool, lacks: dict[str, Any], package: str) -> None:
    pool.host.capabilities |= lacks
    pool.host.save()
    made = profile(pool, **KERNEL)
    assert made.package == package
    assert f"Install {package} there" in made.missing
    assert refusal_of(pool, **KERNEL) == "tool_missing"


def boot_run(pool: StoragePool, times: dict[tuple[str, int], list[float]]) -> Benchmark:
    run: Benchmark = BenchmarkFactory.create(pool=pool, kind="boot")
    for (layout, guests), values in times.items():
        for number, value in enumerate(values, 1):
            for metric in ("boot_seconds", "boot_all_seconds"):
                setting = {"layout": layout, "guests": guests}
                SampleFactory.create(
                    benchmark=run, setting=setting, metric=metric, unit="s", value=value, repetition=number
                )
    return run


TIMES = {
    ("raw", 1): [3.0, 3.1, 3.2], ("raw+qcow2", 1): [3.1, 3.0, 3.2], ("qcow2+qcow2", 1): [3.0, 3.2, 3.1],
    ("raw", 4): [5.0, 5.1, 5.2], ("raw+qcow2", 4): [7.0, 7.1, 7.2], ("qcow2+qcow2", 4): [10.0, 10.1, 10.4],
}  # fmt: skip


def test_what_to_choose_is_said_for_each_count(pool: StoragePool) -> None:
    alone, four = advice.of("boot", results.of(boot_run(pool, TIMES)), "fast")
    assert (alone.topic, alone.measurable) == ("Layout, 1 guest", False)
    assert four.topic == "Layout, 4 guests"
    assert four.sentence == "On fast, raw boots 2.0 times faster than qcow2+qcow2 (5.1 s vs. 10.1 s)."


def test_a_run_shows_bars_for_each_layout_and_count_beside_what_was_published(pool: StoragePool) -> None:
    text = page_of(client_as(role="viewer"), f"/benchmarks/{boot_run(pool, TIMES).pk}/")
    for words in ("Time until all guests are up", "qcow2+qcow2 guests 4", "23 % better", "Layout, 4 guests"):
        assert words in text, words


def test_the_form_asks_for_what_boots_and_carries_it_to_the_job(pool: StoragePool) -> None:
    image = ImageFactory.create(pool=pool, name="template.qcow2", allocated_size=GIB)
    start = f"/benchmarks/start/?pool={pool.pk}&kind=boot"
    operator, admin = client_as(role="operator"), client_as(role="admin")
    empty = page_of(operator, start)
    assert "choose what boots" in empty
    assert "template.qcow2" in empty
    assert 'name="boot_kernel"' not in empty.replace('type="hidden" name="boot_kernel"', "")
    assert 'id="boot_kernel"' in page_of(admin, start)
    asked = f"{start}&boot_image={image.pk}&boot_guests=2, 3&boot_memory_mib=128&boot_up=agent"
    plan = page_of(operator, asked)
    assert "Boot storm on" in plan
    assert f'<a class="whole" href="/images/{image.pk}/">template.qcow2</a>' in plan
    assert "Only an admin may choose a kernel" in page_of(operator, f"{start}&boot_kernel=/boot/vmlinuz")
    form = {"pool": pool.pk, "kind": "boot", "boot_image": image.pk, "boot_guests": "2, 3", "boot_memory_mib": "128"}
    assert confirm(operator, "/benchmarks/start/", form | {"boot_kernel": "/boot/vmlinuz"}).status_code == 200
    assert not Job.objects.exists()
    assert confirm(operator, "/benchmarks/start/", form | {"boot_up": "agent"}).status_code == 302
    job = Job.objects.get()
    wanted = {"image": image.pk, "guests": [2, 3], "memory_bytes": 128 * MIB, "up": "agent", "kernel": ""}
    assert wanted.items() <= job.options["boot"].items()
