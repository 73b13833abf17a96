"""Preallocated images: shown, warned of, and left alone by policies that do not say otherwise."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image, Policy
from images.policies.rules import choose
from images.policies.shape import Rules
from images.rewrite import planning
from images.rewrite.neighbours import share
from storage_admin.jobs.models import Job
from tests.factories import PolicyFactory
from tests.working import OPERATOR, image_at, run, scan, succeeded, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

SIZE = 32 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of each kind, scanned and sampled."""
    pool = tmp_path / "pool"
    pool.mkdir()
    for mode in ("off", "metadata", "falloc", "full"):
        qemu("create", "-f", "qcow2", "-o", f"preallocation={mode}", pool / f"{mode}.qcow2", SIZE)
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 7 0 1M", "-c", "write -P 0 1M 4M",
                        pool / f"{mode}.qcow2"], check=True, capture_output=True)  # fmt: skip
    qemu("create", "-f", "raw", "-o", "preallocation=falloc", pool / "falloc.raw", SIZE)
    (pool / "zeros.raw").write_bytes(bytes(SIZE))
    qemu("create", "-f", "qcow2", pool / "zeros.qcow2", SIZE)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -P 0 0 {SIZE}", pool / "zeros.qcow2"], check=True,
                   capture_output=True)  # fmt: skip
    subprocess.run(["sync", "-f", pool], check=True)
    look_at(pool)
    return pool


def qemu(*words: object) -> None:
    subprocess.run(["qemu-img", str(words[0]), "-q", *map(str, words[1:])], check=True, capture_output=True)


def look_at(pool: Path) -> None:
    scan(this_machine(pool))
    assert run(Job.objects.get(kind="sample", state="queued")).state == "succeeded"


def preallocations() -> dict[str, str]:
    return dict(Image.objects.values_list("name", "preallocation"))


def chosen(**columns: Any) -> set[str]:
    policy: Policy = PolicyFactory.create(min_reclaimable_bytes=0, **columns)
    return {one.label for one in choose(Rules.of(policy), timezone.now()).chosen}


def left_out(kind: str) -> dict[str, str]:
    policy: Policy = PolicyFactory.create(kind=kind, options={})
    return {one.label: one.code for one in choose(Rules.of(policy), timezone.now()).skips}


def warned(name: str, kind: str = "reclaim", **options: Any) -> bool:
    image = Image.objects.select_related("host", "pool").get(name=name)
    share([image])
    plan = planning.plan_for(OPERATOR, planning.image_kind(kind), image, options)
    return any("preallocat" in warning for warning in plan.warnings)


def test_what_is_recognised_is_shown_and_what_cannot_be_told_is_unknown(folder: Path) -> None:
    assert folder.is_dir()
    assert preallocations() == {
        "off.qcow2": "off", "metadata.qcow2": "metadata", "falloc.qcow2": "falloc", "full.qcow2": "",
        "falloc.raw": "falloc", "zeros.raw": "", "zeros.qcow2": "",
    }  # fmt: skip


def test_a_policy_leaves_alone_what_is_recognised_and_still_chooses_what_was_filled_with_zeros(folder: Path) -> None:
    assert folder.is_dir()
    filled = {"zeros.raw", "zeros.qcow2", "full.qcow2"}
    assert chosen() == filled | {"off.qcow2"}
    assert chosen(include_preallocated=True) >= filled | {"off.qcow2", "metadata.qcow2", "falloc.qcow2", "falloc.raw"}
    # Holes leave the places that a metadata preallocation gave out.
    assert chosen(options={"method": "in_place"}) == filled | {"off.qcow2", "metadata.qcow2"}


def test_the_plan_says_that_a_reclaim_undoes_it_or_may(folder: Path) -> None:
    assert folder.is_dir()
    said = {name: [warned(name, method=method) for method in ("in_place", "copy")] for name in preallocations()}
    assert said == {
        "off.qcow2": [False, False], "metadata.qcow2": [False, True], "falloc.qcow2": [True, True],
        "full.qcow2": [True, True], "falloc.raw": [True, True], "zeros.raw": [True, True], "zeros.qcow2": [True, True],
    }  # fmt: skip


@pytest.mark.parametrize("replace", [False, True])
def test_full_is_known_of_what_a_conversion_here_has_made_so(tmp_path: Path, replace: bool) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    qemu("create", "-f", "raw", pool / "disk.raw", SIZE)
    scan(this_machine(pool))
    options = {"format": "qcow2", "format_options": {"preallocation": "full"}, "replace": replace}
    job = succeeded(work("convert", image_at(pool / "disk.raw").pk, OPERATOR, **options))
    run(Job.objects.filter(kind="scan", state="queued").get())
    work("sample", job.host_id)
    assert preallocations()["disk.qcow2"] == "full"
    assert "disk.qcow2" not in chosen()
    # Another file under that name is not what was made here.
    qemu("create", "-f", "qcow2", "-o", "preallocation=full", pool / "other.qcow2", SIZE)
    (pool / "other.qcow2").rename(pool / "disk.qcow2")
    work("scan", job.host_id)
    work("sample", job.host_id)
    assert preallocations()["disk.qcow2"] == ""


def test_a_flatten_policy_waits_for_the_sample_that_tells_a_preallocation(tmp_path: Path) -> None:
    qemu("create", "-f", "qcow2", tmp_path / "base.qcow2", SIZE)
    on_base = ("-f", "qcow2", "-F", "qcow2", "-b", tmp_path / "base.qcow2")
    qemu("create", *on_base, tmp_path / "plain.qcow2")
    qemu("create", *on_base, "-o", "extended_l2=on,preallocation=falloc", tmp_path / "falloc.qcow2", SIZE)
    scan(this_machine(tmp_path))
    assert left_out("flatten") == {"base.qcow2": "chain_too_short"} | dict.fromkeys(
        ("plain.qcow2", "falloc.qcow2"), "not_analyzed"
    )
    assert chosen(kind="flatten", options={}, include_preallocated=True) == {"plain.qcow2", "falloc.qcow2"}
    assert run(Job.objects.get(kind="sample", state="queued")).state == "succeeded"
    assert left_out("flatten") == {"base.qcow2": "chain_too_short", "falloc.qcow2": "preallocated"}
    assert chosen(kind="flatten", options={}) == {"plain.qcow2"}


def test_rules_that_were_kept_before_there_was_such_a_column_are_read() -> None:
    kept = Rules.of(PolicyFactory.create()).as_json()
    del kept["include_preallocated"]
    assert Rules.from_json(kept).include_preallocated is False
