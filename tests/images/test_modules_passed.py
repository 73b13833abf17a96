"""How many of the product's modules one scan and one reclaim pass; a figure that may fall, and not rise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage_admin.hosts import transport
from storage_admin.hosts.models import Host
from tests.modules_passed import agent, counted
from tests.working import OPERATOR, image_at, scan, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


Passed = Callable[[Callable[[], object]], list[str]]


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Passed:
    told = tmp_path / "modules"
    command = transport.local_command()

    def count(action: Callable[[], object]) -> list[str]:
        told.unlink(missing_ok=True)
        with monkeypatch.context() as patched:
            patched.setattr(transport, "local_command", lambda: agent(command, told))
            with counted(told):
                action()
        names = sorted(set(told.read_text().split()))
        print(f"{len(names)} modules:", *names, sep="\n  ")
        return names

    return count


def test_a_scan_passes_no_more_modules_than_written_down(
    path: Path, passed: Callable[[Callable[[], object]], list[str]]
) -> None:
    host = Host.objects.get()
    names = passed(lambda: scan(host))
    assert "storage_admin.agent.verbs.scan" in names
    assert len(names) <= 44


def test_a_reclaim_passes_no_more_modules_than_written_down(
    path: Path, passed: Callable[[Callable[[], object]], list[str]]
) -> None:
    image = image_at(path)
    names = passed(lambda: work("reclaim", image.pk, OPERATOR))
    assert "storage_admin.agent.swap.swap" in names
    assert len(names) <= 58
