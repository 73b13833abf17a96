"""A block job whose switch libvirt refuses, or whose disk is unplugged: told as that, and not as a silent libvirt.

A stand-in for a domain: none of the ways that were tried (a paused job, a bitmap in the way) has libvirt 9.0 refuse it.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import libvirt
import pytest

from images.live.follow import REFUSED, Follower
from storage_admin.hosts.libvirt import block_job, helper
from storage_admin.hosts.libvirt.block_jobs import Wanted
from storage_admin.jobs.kinds import BEGUN
from storage_admin.jobs.models import Job

DISK = "<disk>{}<target dev='vda'/></disk>"
MIRROR = "<mirror job='copy' ready='yes'><source file='/copy'/></mirror>"
REQUEST = {"disk": "vda", "op": "copy", "target": {"path": "/copy"}, "chain": ["/image"], "base": None}


class Domain:
    """One whose disk is copied, and ready; every switch is refused."""

    def __init__(self, *, alive: bool = True) -> None:
        self.alive, self.aborted, self.unplugged = alive, False, False

    def connect(self) -> Any:
        return SimpleNamespace(isAlive=lambda: self.alive)

    def blockJobInfo(self, disk: str, flags: int) -> dict[str, int]:  # noqa: N802 (libvirt's name)
        if self.unplugged:
            raise libvirt.libvirtError(f"invalid argument: disk {disk} not found in domain")
        return {} if self.aborted else {"type": libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_COPY, "cur": 1, "end": 1}

    def XMLDesc(self) -> str:  # noqa: N802
        return f"<domain><devices>{'' if self.unplugged else DISK.format(MIRROR)}</devices></domain>"

    def isActive(self) -> bool:  # noqa: N802
        return True

    def blockJobAbort(self, disk: str, flags: int) -> None:  # noqa: N802
        if flags == libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT:
            raise libvirt.libvirtError("internal error: it cannot be completed")
        self.aborted = True


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(helper, "say", found.append)
    return found


def follower() -> Follower:
    begun = {"stage": "mirroring", "before": None}
    job = mock.Mock(spec=Job, kept={BEGUN: begun}, target_label="web")
    wanted = Wanted("u", "vda", "copy", ["/image"], 0, None, 0, {"path": "/copy"})
    return Follower(job, mock.Mock(cancel_requested=False), mock.Mock(), wanted, against=lambda: "", watch=lambda: "")


def test_a_switch_that_libvirt_keeps_refusing_is_given_up(heard: list[dict[str, Any]]) -> None:
    domain, follows = Domain(), follower()

    def order() -> str:
        told = heard[-1]
        follows._told(told)
        return follows._order(told["stage"])

    block_job._follow(domain, REQUEST, SimpleNamespace(next=order))  # type: ignore[arg-type]
    assert domain.aborted
    assert follows.refused is not None
    assert follows.refused.code == "tool_failed"
    assert sum(bool(one.get("against")) for one in heard) == REFUSED


def test_a_libvirt_that_ends_in_that_moment_has_refused_nothing(heard: list[dict[str, Any]]) -> None:
    with pytest.raises(libvirt.libvirtError):
        block_job._follow(Domain(alive=False), REQUEST, SimpleNamespace(next=lambda: "pivot"))  # type: ignore[arg-type]


def test_a_disk_that_is_unplugged_has_no_block_job_any_more(heard: list[dict[str, Any]]) -> None:
    domain = Domain()

    def unplugs() -> str:
        domain.unplugged = True
        return ""

    block_job._follow(domain, REQUEST, SimpleNamespace(next=unplugs))  # type: ignore[arg-type]
    assert len(heard) == 1
