"""Weights and limits of real domains: what was there, what is there now, and from when on it counts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import libvirt
import pytest

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import control, tune
from storage_admin.hosts.libvirt import domains as libvirt_domains
from storage_admin.hosts.libvirt import io as libvirt_io
from storage_admin.hosts.libvirt.disks import ContradictedError
from storage_admin.hosts.libvirt.io import IoOutcome, checked
from storage_admin.hosts.libvirt.process import ask
from storage_admin.hosts.models import Host
from tests.factories import HostFactory
from tests.harness.guests import Disk, Domains
from tests.working import create, invalid_fields, scan, this_machine

pytestmark = [pytest.mark.guest, pytest.mark.services]

LIVE, CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
MB = 1_000_000


@pytest.fixture
def here() -> Host:
    return HostFactory.build()


@pytest.fixture
def domain(domains: Domains, shared_folder: Path) -> Iterator["libvirt.virDomain"]:
    """A domain with two disks that does not run."""
    disks = [Disk(create(shared_folder / f"{name}.qcow2", "64M")) for name in "ab"]
    made = domains.define(disks)
    yield made
    if made.isActive():
        made.destroy()


def limits_of(domain: "libvirt.virDomain", target: str, flags: int) -> dict[str, Any]:
    told = domain.blockIoTune(target, flags).items()
    return {name: value for name, value in told if value and not str(value).startswith("/machine/")}


def set_io(host: Host, domain: "libvirt.virDomain", **what: Any) -> IoOutcome:
    return control.set_io(host, domain.UUIDString(), **what)


def test_limits_of_a_running_guest_hold_now_and_from_the_next_start(here: Host, domain: "libvirt.virDomain") -> None:
    domain.create()
    done = set_io(here, domain, limits={"vda": {"read_bytes_sec": 10 * MB, "write_iops_sec": 300}})
    wanted = {"read_bytes_sec": 10 * MB, "write_iops_sec": 300}
    assert limits_of(domain, "vda", LIVE) == limits_of(domain, "vda", CONFIG) == wanted
    assert limits_of(domain, "vdb", LIVE) == {}
    assert (done.before.limits, done.now.limits, done.running) == ({}, {"vda": wanted}, True)
    assert (done.effect, done.as_asked, done.notes) == ("now", True, ())
    assert "vda read_bytes_sec 10,000,000 (was none)" in done.words
    assert done.words.endswith("Set for the running guest and for every start.")


def test_limits_of_a_guest_that_is_off_hold_from_its_next_start(here: Host, domain: "libvirt.virDomain") -> None:
    done = set_io(here, domain, limits={"vdb": {"write_bytes_sec": 5 * MB}})
    assert (done.effect, done.running, done.now.limits) == ("next_start", False, {"vdb": {"write_bytes_sec": 5 * MB}})
    assert "from the next start" in done.words
    domain.create()
    assert limits_of(domain, "vdb", LIVE) == {"write_bytes_sec": 5 * MB}


def test_only_the_running_guest_or_only_its_definition(here: Host, domain: "libvirt.virDomain") -> None:
    domain.create()
    done = set_io(here, domain, limits={"vda": {"read_iops_sec": 50}}, config=False)
    assert (limits_of(domain, "vda", LIVE), limits_of(domain, "vda", CONFIG)) == ({"read_iops_sec": 50}, {})
    assert (done.effect, "until it is shut down" in done.words) == ("now", True)
    done = set_io(here, domain, limits={"vda": {"read_iops_sec": 70}}, live=False)
    assert limits_of(domain, "vda", LIVE) == {"read_iops_sec": 50}
    assert limits_of(domain, "vda", CONFIG) == {"read_iops_sec": 70}
    assert (done.effect, done.now.limits) == ("next_start", {"vda": {"read_iops_sec": 50}})


def test_0_takes_a_limit_away_and_the_other_stays(here: Host, domain: "libvirt.virDomain") -> None:
    set_io(here, domain, limits={"vda": {"read_bytes_sec": 1 * MB, "write_bytes_sec": 2 * MB, "read_iops_sec": 5}})
    done = set_io(here, domain, limits={"vda": {"read_bytes_sec": 0}})
    assert done.now.limits == {"vda": {"write_bytes_sec": 2 * MB, "read_iops_sec": 5}}
    assert "vda read_bytes_sec none (was 1,000,000)" in done.words
    done = set_io(here, domain, limits={"vda": {"write_bytes_sec": 0, "read_iops_sec": 0}})
    assert done.now.limits == {}


@pytest.mark.parametrize("running", [False, True])
def test_limits_of_both_directions_bursts_and_groups_are_handled(
    here: Host, domain: "libvirt.virDomain", running: bool
) -> None:
    there = {
        "total_bytes_sec": 20 * MB, "total_iops_sec": 500, "total_iops_sec_max": 700, "total_iops_sec_max_length": 5,
        "group_name": "g", "size_iops_sec": 4096,
    }  # fmt: skip
    for target in ("vda", "vdb"):
        domain.setBlockIoTune(target, there, CONFIG)
    if running:
        domain.create()
    done = set_io(here, domain, limits={"vda": {"read_bytes_sec": 5 * MB}})
    wanted = {"read_bytes_sec": 5 * MB, "write_bytes_sec": 20 * MB}
    kept = {name: value for name, value in there.items() if name != "total_bytes_sec"}
    assert limits_of(domain, "vda", CONFIG) == wanted | kept
    if running:
        assert limits_of(domain, "vda", LIVE) == wanted | kept
    assert done.as_asked
    assert any("total_bytes_sec was replaced by separate limits" in note for note in done.notes)
    assert any("share their limits, because they belong to the group g" in note for note in done.notes)
    done = set_io(here, domain, limits={"vda": {"read_iops_sec": 100, "write_iops_sec": 900}})
    expected = wanted | {
        "read_iops_sec": 100, "write_iops_sec": 900, "read_iops_sec_max": 700, "read_iops_sec_max_length": 5,
        "group_name": "g", "size_iops_sec": 4096,
    }  # fmt: skip
    assert limits_of(domain, "vda", CONFIG) == expected
    assert done.as_asked


def test_a_weight_holds_where_the_host_weighs_and_is_refused_where_it_cannot(
    here: Host, domain: "libvirt.virDomain"
) -> None:
    domain.create()
    try:
        domain.blkioParameters(LIVE)
    except libvirt.libvirtError:
        with pytest.raises(RefusedError, match="does not support I/O weights"):
            set_io(here, domain, weight=300)
        assert domain.blkioParameters(CONFIG)["weight"] == 0
        return
    done = set_io(here, domain, weight=300)
    assert (domain.blkioParameters(LIVE)["weight"], domain.blkioParameters(CONFIG)["weight"]) == (300, 300)
    assert (done.now.weight, done.effect, done.as_asked) == (300, "unknown", True), "no scan told which disks weigh"
    domain.destroy()
    domain.create()
    assert domain.blkioParameters(LIVE)["weight"] == 300


def test_a_weight_of_a_guest_that_is_off_says_that_the_host_could_not_be_tried(
    here: Host, domain: "libvirt.virDomain"
) -> None:
    done = set_io(here, domain, weight=250)
    assert (done.now.weight, done.effect, done.as_asked) == (250, "next_start", True)
    others_run = control.states(here).values()
    if not set(others_run) - {"shut off"}:
        assert any("does not support them, libvirt refuses to start" in note for note in done.notes)


class Unweighing:
    """A running domain on a host whose kernel has no controller for it."""

    def __init__(self, domain: "libvirt.virDomain") -> None:
        self._domain = domain

    def blkioParameters(self, flags: int) -> Any:  # noqa: N802 (libvirt's name)
        if flags == LIVE:
            error = libvirt.libvirtError("")
            error.err = (libvirt.VIR_ERR_OPERATION_INVALID, 10, "blkio cgroup isn't mounted")
            raise error
        return self._domain.blkioParameters(flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._domain, name)


def test_a_host_that_cannot_weigh_gets_no_weight_into_a_definition(domain: "libvirt.virDomain") -> None:
    domain.create()
    connection = mock.Mock()
    connection.lookupByUUIDString.return_value = Unweighing(domain)
    connection.listAllDomains.return_value = [Unweighing(domain)]
    request = {"uid": "", "weight": 300, "limits": None, "live": False, "config": True, "until": 1e12}
    with pytest.raises(ContradictedError, match="would no longer start"):
        tune._tune(connection, request)
    assert domain.blkioParameters(CONFIG)["weight"] == 0


def test_what_libvirt_refuses_is_told_with_what_is_there(
    here: Host, domain: "libvirt.virDomain", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libvirt_io, "HIGHEST", 10**16)  # one more than libvirt takes
    domain.create()
    done = set_io(here, domain, limits={"vda": {"read_bytes_sec": 7}, "vdb": {"read_bytes_sec": 10**15 + 1}})
    assert (done.as_asked, done.effect, done.now.limits) == (False, "unknown", {"vda": {"read_bytes_sec": 7}})
    assert "vda read_bytes_sec 7 (was none)" in done.words
    assert "libvirt refused the remaining changes: " in done.words
    assert limits_of(domain, "vda", LIVE) == {"read_bytes_sec": 7}
    assert limits_of(domain, "vda", CONFIG) == {}


@pytest.mark.parametrize("target", ["vdz", "sda"])
def test_a_disk_that_is_not_there_stops_everything(here: Host, domain: "libvirt.virDomain", target: str) -> None:
    with pytest.raises(RefusedError, match=f"no disk {target}"):
        set_io(here, domain, weight=200, limits={"vda": {"read_iops_sec": 5}, target: {"read_iops_sec": 5}})
    assert (limits_of(domain, "vda", CONFIG), domain.blkioParameters(CONFIG)["weight"]) == ({}, 0)


def test_a_disk_that_only_the_running_guest_has_is_named(
    here: Host, domain: "libvirt.virDomain", shared_folder: Path
) -> None:
    domain.create()
    extra = create(shared_folder / "extra.qcow2", "8M")
    domain.attachDeviceFlags(
        f"<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{extra}'/>"
        "<target dev='vdc' bus='virtio'/></disk>",
        LIVE,
    )
    with pytest.raises(RefusedError, match="no disk vdc at its next start"):
        set_io(here, domain, limits={"vdc": {"read_iops_sec": 5}})
    done = set_io(here, domain, limits={"vdc": {"read_iops_sec": 5}}, config=False)
    assert done.now.limits == {"vdc": {"read_iops_sec": 5}}


def test_a_guest_that_does_not_run_has_nothing_live(here: Host, domain: "libvirt.virDomain") -> None:
    with pytest.raises(RefusedError, match="is not running"):
        set_io(here, domain, limits={"vda": {"read_iops_sec": 5}}, config=False)


def test_a_domain_that_is_gone_is_told(here: Host, libvirtd: str) -> None:
    with pytest.raises(HostError, match="omain not found"):
        control.set_io(here, "00000000-0000-4000-8000-000000000000", weight=5)


def test_nothing_is_set_after_the_time_is_up(
    here: Host, domain: "libvirt.virDomain", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "TUNE_TIMEOUT", 0.0)
    monkeypatch.setattr(
        control, "ask", lambda uri, program, seconds, *more, **how: ask(uri, program, 20.0, *more, **how)
    )
    with pytest.raises(RefusedError, match="too long"):
        set_io(here, domain, limits={"vda": {"read_iops_sec": 5}})
    assert limits_of(domain, "vda", CONFIG) == {}


WRONG: list[dict[str, Any]] = [
    {}, {"weight": 0}, {"weight": 1001}, {"weight": -1}, {"weight": True}, {"weight": "100"}, {"weight": 1.5},
    {"limits": {}}, {"limits": {"vda": {"read_bytes_sec": -1}}}, {"limits": {"vda": {"read_bytes_sec": 10**15 + 1}}},
    {"limits": {"vda": {"read_bytes_sec": 1.0}}}, {"limits": {"vda": {"read_bytes_sec": True}}},
    {"limits": {"vda": {"total_bytes_sec": 1}}}, {"limits": {"vda": {"group_name": "x"}}}, {"limits": {"vda": 5}},
    {"limits": {"../x": {"read_bytes_sec": 1}}}, {"limits": {"/dev/sda": {"read_bytes_sec": 1}}},
    {"limits": {"": {"read_bytes_sec": 1}}}, {"limits": {"-x": {"read_bytes_sec": 1}}}, {"limits": [1]},
    {"limits": {7: {"read_bytes_sec": 1}}}, {"weight": 5, "live": False, "config": False},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_out_of_range_starts_nothing(
    here: Host, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ask", None)
    assert invalid_fields(control.set_io, here, "x", **wrong)


@pytest.mark.parametrize("weight", [1, 99, 100, 1000])
def test_the_range_is_whole(weight: int) -> None:
    assert checked(weight, {"vda": {"write_iops_sec": 10**15}}) == (weight, {"vda": {"write_iops_sec": 10**15}})


@pytest.mark.django_db
@pytest.mark.usefixtures("quiet")
def test_a_scan_shows_what_is_set(domain: "libvirt.virDomain", shared_folder: Path) -> None:
    host = this_machine(shared_folder)
    set_io(host, domain, weight=222, limits={"vda": {"write_iops_sec": 300}})
    domain.setBlockIoTune("vdb", {"total_bytes_sec": 5 * MB, "total_bytes_sec_max": 6 * MB}, CONFIG)
    scan(host)
    guest = Guest.objects.get(uid=domain.UUIDString())
    assert (guest.io_weight, guest.io_priority) == (222, None)
    assert guest.io_limits == {"vda": {"write_iops_sec": 300}, "vdb": {"total_bytes_sec": 5 * MB}}
    assert set(libvirt_domains.LIMITS) >= {"total_iops_sec", "read_bytes_sec"}
