"""What a profile would do and cost on a pool, before it starts."""

import pytest

from benchmarks import profiles, results
from benchmarks.steps import GIB, MADE, MIB, short
from images.rewrite import refusals
from storage_admin.hosts.models import StoragePool
from tests.benchmarks.factories import BenchmarkFactory, SampleFactory

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("quick", [True, False])
def test_every_step_has_a_name_of_its_own_and_a_stated_cost(pool: StoragePool, kind: str, quick: bool) -> None:
    profile = profiles.build(pool, kind, quick=quick)
    names = [results.key_of(step["setting"]) for step in profile.steps]
    assert len(set(names)) == len(names) <= 400
    assert profile.cost.bytes_written > 0
    assert 0 < profile.cost.scratch_bytes <= pool.available_bytes - refusals.reserve_of(pool.capacity_bytes)  # type: ignore[operator,arg-type]
    assert profile.cost.seconds_about >= 1
    assert profile.repetitions == (3 if quick else 5)


@pytest.mark.parametrize("kind", MADE)
def test_thorough_costs_more_than_quick(pool: StoragePool, kind: str) -> None:
    quick, thorough = profiles.build(pool, kind).cost, profiles.build(pool, kind, quick=False).cost
    assert thorough.bytes_written > quick.bytes_written
    assert thorough.seconds_about > quick.seconds_about


def test_cluster_sizes_go_from_512_to_2m_and_extended_l2_is_a_variant(pool: StoragePool) -> None:
    steps = profiles.build(pool, "cluster_size", quick=False).steps
    assert [step["cluster_bytes"] for step in steps if not step["extended_l2"]] == [512 << n for n in range(13)]
    assert {"cluster_size": "128K", "extended_l2": "on"} in [step["setting"] for step in steps]


def test_chains_go_to_ten_and_both_compressions_are_there(pool: StoragePool) -> None:
    steps = profiles.build(pool, "formats", quick=False).steps
    assert {step["depth"] for step in steps if step["layout"] == "chain"} == set(range(3, 11))
    assert {"raw", "qcow2", "raw+qcow2", "qcow2+qcow2", "zlib", "zstd"} < {step["layout"] for step in steps}


def test_a_thorough_dd_and_bonnie_exceed_the_hosts_memory(pool: StoragePool) -> None:
    buffered = [step for step in profiles.build(pool, "dd", quick=False).steps if step["sync"] == "fdatasync"]
    assert {step["block_bytes"] * step["count"] for step in buffered} == {16 * GIB}
    bonnie, synced = profiles.build(pool, "bonnie", quick=False).steps
    assert (bonnie["size_bytes"], bonnie["memory_bytes"]) == (16 * GIB, 8 * GIB)
    assert (synced["unbuffered"], synced["size_bytes"], bonnie["unbuffered"]) == (True, 64 * MIB, False)
    assert profiles.build(pool, "bonnie", quick=False).warnings == ()
    (warning,) = profiles.build(pool, "bonnie").warnings
    assert "less than twice the memory of the host" in warning


@pytest.mark.parametrize("odd", [1, 4096, MIB - 1, MIB, 3 * MIB + 4096])
def test_a_thorough_bonnie_does_not_warn_of_its_own_rounding(pool: StoragePool, odd: int) -> None:
    pool.host.capabilities["memory_bytes"] = 8 * GIB + odd
    profile = profiles.build(pool, "bonnie", quick=False)
    step = profile.steps[0]
    assert profile.warnings == ()
    assert step["size_bytes"] % (2 * MIB) == 0
    assert 0 <= step["size_bytes"] - 2 * (8 * GIB + odd) < 2 * MIB
    assert step["size_bytes"] // MIB >= 2 * (step["memory_bytes"] // MIB), "as bonnie++ wants it"


@pytest.mark.parametrize("kind", MADE)
def test_sizes_shrink_to_what_a_small_pool_has(pool: StoragePool, kind: str) -> None:
    pool.capacity_bytes, pool.available_bytes = 10 * GIB, 3 * GIB
    profile = profiles.build(pool, kind, quick=False)
    assert profile.cost.scratch_bytes <= GIB  # two stay free


def test_a_given_size_is_kept_whether_it_fits_or_not(pool: StoragePool) -> None:
    steps = profiles.build(pool, "preallocation", size_bytes=200 * GIB).steps
    assert {step["write_bytes"] for step in steps} == {200 * GIB}


@pytest.mark.parametrize(("kind", "package"), [("fio", "fio"), ("bonnie", "bonnie++"), ("formats", "qemu-utils")])
def test_what_misses_its_tool_names_the_package(pool: StoragePool, kind: str, package: str) -> None:
    pool.host.capabilities["tools"] = {"fio": False, "bonnie++": False, "qemu-img": False}
    profile = profiles.build(pool, kind)
    assert profile.package == package
    assert f"Install {package} there" in profile.missing
    assert profiles.build(pool, "dd").missing == ""


def test_a_host_that_was_never_scanned_is_not_said_to_miss_anything(pool: StoragePool) -> None:
    pool.host.capabilities = {}
    assert {profiles.build(pool, kind).missing for kind in MADE} == {""}
    assert "not known" in profiles.build(pool, "bonnie").warnings[0]


def test_the_memory_is_taken_from_an_earlier_run_where_no_scan_told_it(pool: StoragePool) -> None:
    del pool.host.capabilities["memory_bytes"]
    assert profiles.memory_of(pool.host) is None
    BenchmarkFactory.create(pool=pool, environment={"memory_bytes": 4 * GIB})
    assert profiles.memory_of(pool.host) == 4 * GIB


def test_the_time_is_told_from_what_was_measured_there(pool: StoragePool) -> None:
    before = profiles.build(pool, "dd").cost
    run = SampleFactory.create(benchmark__pool=pool, value=20 * MIB, setting={"a": "b"}).benchmark
    SampleFactory.create(benchmark=run, metric="seq_write_rate", value=9, setting={"unbuffered": "on"})
    assert profiles.build(pool, "dd").cost.seconds_about == pytest.approx(10 * before.seconds_about, rel=0.1)


def test_the_same_steps_have_the_same_key_and_others_another(pool: StoragePool) -> None:
    quick = profiles.build(pool, "dd")
    assert quick.key == profiles.build(pool, "dd", repetitions=7).key
    assert quick.key != profiles.build(pool, "dd", size_bytes=64 * MIB).key
    assert quick.key != profiles.build(pool, "dd", quick=False).key


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512"), (65536, "64K"), (2 * MIB, "2M"), (3 * GIB, "3G"), (1536, "1536")]
)
def test_sizes_are_written_as_qemu_img_takes_them(size: int, text: str) -> None:
    assert short(size) == text
