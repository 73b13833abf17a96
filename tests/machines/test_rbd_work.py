"""Zeros of images of a real Ceph go back to it, and clones get what they read of their parent: every byte as before."""

import pytest

from images.models import Image
from storage_admin.hosts.models import Host as Row
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.harness.debian_trees import Booted
from tests.machines.test_rbd import MIB, cluster, row, said
from tests.working import ADMIN, scan, work
from tests.working import said as log_of

__all__ = ["cluster", "row"]

pytestmark = [pytest.mark.services, pytest.mark.night, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

CLONE, SPARSE = "vm-102-disk-0", "vm-300-disk-0"
OPENED = "(qemu-io -f raw -c 'sleep 600000' rbd:vms/{0} >/dev/null 2>&1 & echo $! >/root/sleeper)"


def image(name: str) -> Image:
    return Image.every.get(name=name)


def content(cluster: Booted, name: str) -> str:
    return cluster.run(f"rbd export --no-progress vms/{name} - | sha256sum")


def own(cluster: Booted, name: str) -> int:
    return sum(one["used_size"] for one in said(cluster, f"rbd du vms/{name}")["images"] if "snapshot" not in one)


@pytest.fixture
def sparse(cluster: Booted, row: Row) -> Booted:
    """An image of 40 MiB: 8 MiB of data, 24 MiB of zeros with a bit of data in one object, and 8 MiB never written."""
    cluster.run(f"rbd rm --no-progress vms/{SPARSE} 2>/dev/null || true; rbd create --size 40M vms/{SPARSE}")
    for write in ("write -P 7 0 8M", "write -z 8M 24M", "write -P 0 8M 24M", "write -P 9 17M 4k"):
        cluster.run(f"qemu-io -f raw -c '{write}' rbd:vms/{SPARSE} >/dev/null")
    scan(row)
    return cluster


def test_ceph_frees_the_zeros_of_an_image_and_every_byte_stays(sparse: Booted) -> None:
    digest, before = content(sparse, SPARSE), own(sparse, SPARSE)
    plan = services.plan(ADMIN, "reclaim", image(SPARSE).pk, {})
    assert (plan.refusals, plan.method, plan.predicted_low, plan.predicted_high) == ((), "sparsify", 0, 32 * MIB)
    job = work("reclaim", image(SPARSE).pk, ADMIN)
    assert job.state == "succeeded", (job.error_code, job.error_detail, log_of(job))
    assert (before, own(sparse, SPARSE)) == (32 * MIB, 12 * MIB)
    assert job.freed_bytes == (job.result or {})["freed_bytes"] == 20 * MIB
    assert content(sparse, SPARSE) == digest


@pytest.mark.parametrize("kind", ["reclaim", "flatten"])
def test_what_anybody_has_open_or_is_another_one_by_now_is_left_alone(sparse: Booted, row: Row, kind: str) -> None:
    name = SPARSE if kind == "reclaim" else CLONE
    before, digest = own(sparse, name), content(sparse, name)
    sparse.run(OPENED.format(name))
    sparse.wait_until(f"rbd status vms/{name} | grep -q watcher=")
    job = work(kind, image(name).pk, ADMIN)
    sparse.run("kill -9 $(cat /root/sleeper)")
    assert (job.state, job.error_code) == ("failed", "image_in_use")
    sparse.wait_until(f"! rbd status vms/{name} | grep -q watcher=")
    if kind == "reclaim":
        sparse.run(f"rbd resize --no-progress --size 48M vms/{name}")
        assert work(kind, image(name).pk, ADMIN).error_code == "stale_plan"
        sparse.run(f"rbd resize --no-progress --allow-shrink --size 40M vms/{name}")
    assert (own(sparse, name), content(sparse, name)) == (before, digest)


def test_one_that_is_cut_off_leaves_every_byte(sparse: Booted, row: Row) -> None:
    digest = content(sparse, SPARSE)
    tool = "mv /usr/bin/rbd /usr/bin/rbd.real; printf '#!/bin/sh\n{}\n' >/usr/bin/rbd; chmod +x /usr/bin/rbd"
    kills = (
        'case "$*" in *sparsify*) timeout -s KILL 0.05 rbd.real "$@"; kill -KILL $PPID ;; *) exec rbd.real "$@" ;; esac'
    )
    sparse.run(tool.format(kills.replace("'", "'\\''")))
    try:
        job = work("reclaim", image(SPARSE).pk, ADMIN)
    finally:
        sparse.run("mv /usr/bin/rbd.real /usr/bin/rbd")
    assert job.state == "interrupted"
    Job.objects.filter(pk=job.pk).update(needs_recovery=True)
    assert work("recover", row.pk).state == "succeeded"
    assert content(sparse, SPARSE) == digest
    sparse.wait_until(f"! rbd status vms/{SPARSE} | grep -q watcher=")
    assert work("reclaim", image(SPARSE).pk, ADMIN).state == "succeeded"
    assert content(sparse, SPARSE) == digest


def test_a_clone_gets_what_it_reads_of_its_parent_and_grows_as_was_foretold(sparse: Booted, row: Row) -> None:
    digest, base = content(sparse, CLONE), content(sparse, "base-101-disk-0@__base__")
    plan = services.plan(ADMIN, "flatten", image(CLONE).pk, {})
    assert (plan.refusals, plan.predicted_low, plan.predicted_high) == ((), 16 * MIB, 20 * MIB)
    job = work("flatten", image(CLONE).pk, ADMIN)
    assert job.state == "succeeded", (job.error_code, job.error_detail, log_of(job))
    assert (job.result or {})["after_bytes"] == own(sparse, CLONE) == 16 * MIB
    assert job.freed_bytes == -12 * MIB
    assert "parent" not in said(sparse, f"rbd info vms/{CLONE}")
    assert (content(sparse, CLONE), content(sparse, "base-101-disk-0@__base__")) == (digest, base)
    scan(row)
    assert image(CLONE).backing is None
    assert "stale_plan" in {one.code for one in services.plan(ADMIN, "flatten", image(CLONE).pk, {}).refusals}
