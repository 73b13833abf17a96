"""``manage.py scan``, where no worker is up."""

from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from storage_admin.jobs.models import Job
from tests.factories import HostFactory
from tests.working import create, image_at, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor")]


def test_it_scans_by_itself_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path / "a.qcow2")
    host = this_machine(tmp_path)
    call_command("scan")
    assert f"{host.name}: 1 images, 1 of them new or changed, 0 vanished." in capsys.readouterr().out
    assert image_at(tmp_path / "a.qcow2").state == "ok"


def test_a_host_that_there_is_not_is_named_with_those_that_are(tmp_path: Path) -> None:
    this_machine(tmp_path)
    with pytest.raises(CommandError, match=r"no host elsewhere. Known hosts: local\."):
        call_command("scan", "elsewhere")


def test_a_machine_that_only_its_own_worker_can_scan_is_not_waited_for() -> None:
    HostFactory.create(slug="local", name="Other", capabilities={"machine_id": "0" * 32})
    with pytest.raises(CommandError, match=r"No running worker can scan Other\. .*worker --host local\."):
        call_command("scan")
    assert not Job.objects.exists()
