"""A base that an overlay's owner may not read is refused by the plan, unless an admin allows it; never by policies."""

import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from django.utils import timezone

from benchmarks import boot
from images.policies.planned import planned
from images.policies.rules import Candidate
from images.policies.shape import Rules
from images.rewrite.space import Admitted
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.services import update_pool
from storage_admin.jobs import services
from tests.agent.harness import write
from tests.agent.test_other_peoples_bases import ALICE, BOB, own
from tests.factories import PolicyFactory
from tests.working import ADMIN, OPERATOR, create, image_at, refused_as, register, scan, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


@pytest.fixture
def overlay() -> Iterator[Path]:
    """Alice's overlay in her pool, of Bob's private image in his, both scanned."""
    with TemporaryDirectory() as name:
        site = Path(name)
        site.chmod(0o755)
        for owner in ("alice", "bob"):
            (site / owner).mkdir()
            (site / owner).chmod(0o755)
        base, top = site / "bob" / "private.qcow2", site / "alice" / "mine.qcow2"
        create(base, "8M")
        write(base, 0x41, "1M", "2M")
        create(top, "8M", base=str(base))
        own(base, BOB, 0o600)
        own(top, ALICE, 0o644)
        host = this_machine(site / "alice")
        register(host, site / "bob")
        scan(host)
        yield top


def base_of(overlay: Path) -> Path:
    return overlay.parent.parent / "bob" / "private.qcow2"


def codes_after_scan(overlay: Path) -> list[str]:
    scan(image_at(overlay).host)
    return codes(overlay)


def codes(overlay: Path, kind: str = "flatten") -> list[str]:
    return [refusal.code for refusal in services.plan(OPERATOR, kind, image_at(overlay).pk, {}).refusals]


def allow(overlay: Path) -> StoragePool:
    return update_pool(ADMIN, image_at(base_of(overlay)).pool, share_bases=True)


@pytest.mark.parametrize("kind", ["flatten", "convert"])
def test_the_plan_refuses_what_the_owner_may_not_read(overlay: Path, kind: str) -> None:
    assert codes(overlay, kind) == ["foreign_base"]
    with pytest.raises(RefusedError, match="private") as refused:
        services.submit(OPERATOR, kind, image_at(overlay).pk, {})
    assert refused.value.code == "foreign_base"


def test_the_plan_knows_acls_groups_and_closed_folders(overlay: Path) -> None:
    own(base_of(overlay), BOB, 0o644)
    assert codes_after_scan(overlay) == []
    own(base_of(overlay).parent, BOB, 0o700)
    own(overlay, ALICE, 0o640)  # what was unchanged is not looked at again: the agent judges folders on the spot
    assert codes_after_scan(overlay) == ["foreign_base"]
    own(base_of(overlay).parent, BOB, 0o755)
    own(base_of(overlay), BOB, 0o600)
    subprocess.run(["setfacl", "-m", f"u:{ALICE}:r", base_of(overlay)], check=True)
    own(overlay, ALICE, 0o644)
    assert codes_after_scan(overlay) == []


def test_the_same_owner_and_root_are_no_strangers(overlay: Path) -> None:
    own(overlay, 0, 0o600)
    assert codes_after_scan(overlay) == []
    own(overlay, BOB, 0o600)
    assert codes_after_scan(overlay) == []


def test_the_plan_knows_who_owns_the_folder_of_roots_overlay(overlay: Path) -> None:
    own(overlay.parent, ALICE, 0o755)
    own(overlay, 0, 0o644)
    assert codes_after_scan(overlay) == ["foreign_base"]
    own(overlay, 0, 0o600)  # which she may not read
    assert codes_after_scan(overlay) == []
    own(overlay, BOB, 0o644)
    assert codes_after_scan(overlay) == ["foreign_base"]
    own(base_of(overlay), BOB, 0o644)
    own(base_of(overlay).parent, BOB, 0o700)
    own(overlay, 0, 0o640)
    own(overlay, 0, 0o644)
    assert codes_after_scan(overlay) == ["foreign_base"]
    own(base_of(overlay).parent, BOB, 0o755)
    own(overlay, 0, 0o640)
    own(overlay, 0, 0o644)
    assert codes_after_scan(overlay) == []


def test_a_boot_benchmark_is_refused_by_its_plan_unless_an_admin_allows_it(overlay: Path) -> None:
    image = image_at(overlay)
    boots = boot.of(image.host, boot.clean(boot.KIND, {"image": image.pk}))
    assert "foreign_base" in [one.code for one in boot.against(boots)]
    assert refused_as(boot.told, image.host, [{}], boots.options) == "foreign_base"
    allow(overlay)
    [step] = boot.told(image.host, [{}], boots.options)
    assert [one["for_all"] for one in step["chain"]] == [True]


def test_a_right_that_went_since_the_scan_is_noticed_by_the_agent(overlay: Path) -> None:
    own(base_of(overlay), BOB, 0o644)
    scan(image_at(overlay).host)
    own(base_of(overlay).parent, BOB, 0o700)
    job = work("flatten", image_at(overlay).pk, OPERATOR)
    assert (job.state, job.error_code) == ("failed", "foreign_base")


def test_an_admin_allows_it_for_the_pool_of_the_base_and_that_is_audited(overlay: Path) -> None:
    pool = allow(overlay)
    entry = AuditEntry.objects.filter(what="pool changed").latest("id")
    assert (entry.before, entry.after) == ({"share_bases": False}, {"share_bases": True})
    plan = services.plan(OPERATOR, "flatten", image_at(overlay).pk, {})
    assert plan.refusals == ()
    assert [one.code for one in plan.by_hand] == ["foreign_base"]
    assert any(pool.name in warning for warning in plan.warnings)
    assert work("flatten", image_at(overlay).pk, OPERATOR).state == "succeeded"


def test_a_policy_does_not_do_it_where_it_is_allowed(overlay: Path) -> None:
    allow(overlay)
    image, now = image_at(overlay), timezone.now()
    rules = Rules.of(PolicyFactory.create(kind="flatten", options={}))
    candidate = Candidate(image.pk, image.host_id, image.pool_id, image.name, None)
    [found] = planned(rules, [candidate], Admitted(), until=now + timedelta(hours=6), now=now)
    assert found.refusal is not None
    assert found.refusal.code == "foreign_base"
    assert refused_as(services.submit, ADMIN, "flatten", image.pk, {}, by_hand=False) == "foreign_base"
