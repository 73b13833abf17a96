"""Where a guest's I/O weight counts: the kernel weighs guests on some disks only."""

from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import facts
from storage_admin.guests import io_settings
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.libvirt.io import outcome
from storage_admin.jobs.models import JobLog
from storage_admin.jobs.plan_and_progress import Recorder
from tests.factories import GuestFactory, JobFactory

SET: dict[str, Any] = {"weight": 300, "disks": {}}
UNSET: dict[str, Any] = {"weight": None, "disks": {}}


def answer(*scopes: str) -> dict[str, Any]:
    """As libvirt tells of a weight that was set in a running guest, its definition, or both."""
    told = dict.fromkeys(scopes, UNSET), dict.fromkeys(scopes, SET)
    return {"before": told[0], "now": told[1], "set": list(scopes), "failed": "", "can_weigh": True}


@pytest.mark.parametrize(
    ("weighing", "effect", "told"),
    [(["sda"], "now", "take effect on sda"), ([], "unsupported", "no effect yet"), (None, "unknown", "is unknown")],
)
def test_a_weight_is_in_effect_only_where_a_disk_weighs_guests(
    weighing: list[str] | None, effect: str, told: str
) -> None:
    done = outcome(answer("live", "config"), 300, None, weighing)
    assert (done.effect, done.as_asked, done.now.weight) == (effect, True, 300)
    assert told in done.words
    assert "in effect" not in done.words.lower()


def test_a_guest_that_is_off_has_its_weight_from_its_next_start_on() -> None:
    assert outcome(answer("config"), 300, None, []).effect == "next_start"


@pytest.mark.django_db
def test_what_an_admin_should_know_beside_stands_in_the_jobs_log_and_in_its_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guest, job = GuestFactory.create(), JobFactory.create()
    untried = outcome(answer("config") | {"can_weigh": None}, 300, None, [])
    assert untried.notes, "libvirt refuses to start a guest with a weight where the host cannot weigh"
    monkeypatch.setattr(control, "set_io", lambda *_, **__: untried)
    recorder = Recorder(job, {})
    done = io_settings.apply(guest, io_settings.Setting(weight=300), recorder)
    recorder.flush()
    assert done.notes == untried.notes
    warned = JobLog.objects.filter(job=job, level=JobLog.Level.WARNING).values_list("text", flat=True)
    assert tuple(warned) == untried.notes


def test_limits_count_on_every_disk() -> None:
    limits = {"vda": {"read_iops_sec": 5}}
    told = answer("live") | {"now": {"live": {"weight": None, "disks": limits}}}
    done = outcome(told, None, limits, [])
    assert done.effect == "now"
    assert "weigh" not in done.words


def test_disks_weigh_by_bfq_or_by_their_costs(tmp_path: Path) -> None:
    for disk, schedulers in (("sda", "none mq-deadline [bfq]"), ("sdb", "[none] bfq"), ("vda", "[mq-deadline]")):
        queue = tmp_path / "sys/block" / disk / "queue"
        queue.mkdir(parents=True)
        (queue / "scheduler").write_text(schedulers + "\n")
    assert facts.weighing_disks(str(tmp_path)) == ["sda"]
    costs = tmp_path / "sys/fs/cgroup/io.cost.qos"
    costs.parent.mkdir(parents=True)
    numbers = tmp_path / "sys/dev/block/8:16"
    numbers.parent.mkdir(parents=True)
    numbers.symlink_to("../../block/sdb")
    costs.write_text("8:16 enable=1 ctrl=auto rpct=0.00\n252:0 enable=0 ctrl=auto\n")
    assert facts.weighing_disks(str(tmp_path)) == ["sda", "sdb"]
    assert facts.weighing_disks(str(tmp_path / "none")) == []
