"""Which builds of QEMU have which known bug: by upstream branch, and by the revision of each distribution's package."""

import pytest

from storage_admin.hosts import qemu_bugs
from storage_admin.hosts.models import Host
from storage_admin.hosts.qemu_bugs import BUGS, Build, compare

DISCARD, START, ZERO = "discard_while_writing", "mirror_start", "mirror_zero_write"


def has(said: object) -> list[str]:
    return [bug.code for bug in BUGS if bug.affects(Build.parse(said))]


@pytest.mark.parametrize(
    ("said", "bugs"),
    [
        ("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)", [DISCARD]),
        ("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", [DISCARD]),
        ("10.0.8 (Debian 1:10.0.8+ds-0+deb13u1)", [DISCARD, START]),
        ("8.2.2 (Debian 1:8.2.2+ds-0ubuntu1.4)", [DISCARD, START]),
        ("10.1.2 (pve-qemu-kvm_10.1.2-6)", [DISCARD, START, ZERO]),
        ("10.1.2 (pve-qemu-kvm_10.1.2-7)", [DISCARD, START]),
        ("10.1.2 (pve-qemu-kvm_10.1.2-10)", [DISCARD, START]),
        ("10.2.1 (pve-qemu-kvm_10.2.1-1)", [DISCARD]),
        ("11.0.0 (pve-qemu-kvm_11.0.0-1)", []),
        ("11.0.0 (pve-qemu-kvm_11.0.0-2)", []),
        ("10.1.0 (qemu-kvm-10.1.0-14.el10)", [DISCARD, START, ZERO]),
        ("10.1.0 (qemu-kvm-10.1.0-15.el10)", [DISCARD, ZERO]),
        ("10.1.0 (qemu-kvm-10.1.0-16.el10_2.3)", [DISCARD, ZERO]),
        ("10.1.0 (qemu-kvm-10.1.0-15.el9)", [DISCARD, START, ZERO]),
        ("7.2.0 (qemu-kvm-7.2.0-14.el9_2)", [DISCARD, START, ZERO]),  # what RHEL took of later versions is not known
        ("10.2.1", [DISCARD, START, ZERO]),
        ("11.0.0", [DISCARD]),
        ("11.1.0", []),
        ("12.0.0 (Debian 1:12.0.0+ds-1)", []),
    ],
)
def test_a_build_has_the_bugs_that_it_is_not_known_to_be_without(said: str, bugs: list[str]) -> None:
    assert has(said) == bugs


@pytest.mark.parametrize("said", [None, "", "rubbish", "7", 7, "7.2 (Debian 1:7.2; rm -rf)", "\x1b[2J"])
def test_what_is_not_understood_has_all_of_them(said: object) -> None:
    assert has(said) == [DISCARD, START, ZERO]


def test_the_package_that_mends_a_bug_is_the_vendors_own() -> None:
    start = next(bug for bug in BUGS if bug.code == START)
    assert start.cure(Build.parse("10.1.2 (pve-qemu-kvm_10.1.2-6)")) == "pve-qemu-kvm 10.2.1-1 or newer"
    assert start.cure(Build.parse("10.1.0 (qemu-kvm-10.1.0-14.el10)")).startswith("qemu-kvm 10.1.0-15")
    assert start.cure(Build.parse("8.2.2 (Debian 1:8.2.2+ds-0ubuntu1.4)")) == "QEMU 11.0.0 or newer"
    assert start.cure(None) == "QEMU 11.0.0 or newer"


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("10.1.2-7", "10.1.2-10"), ("10.1.2-7", "10.2.1-1"), ("1.0~rc1", "1.0"), ("1.0", "1.0a"), ("9.9", "1:1.0"),
        ("7.2+dfsg-7+deb12u9", "7.2+dfsg-7+deb12u18"), ("1.0a", "1.0+b1"),
    ],
)  # fmt: skip
def test_versions_are_ordered_as_dpkg_does(older: str, newer: str) -> None:
    assert (compare(older, newer), compare(newer, older), compare(newer, newer)) == (-1, 1, 0)


def host(**facts: object) -> Host:
    return Host(slug="h", name="h", capabilities=facts)


def test_a_guest_that_goes_on_with_an_older_qemu_is_judged_by_that() -> None:
    mended = host(qemu_system="11.0.0 (pve-qemu-kvm_11.0.0-1)", tools={"qemu-system": True})
    assert qemu_bugs.against(mended, "trim", "11.0.0") == []
    assert qemu_bugs.against(mended, "trim", "") == []
    assert len(qemu_bugs.against(mended, "trim", "10.1.2")) == 1
    assert len(qemu_bugs.against(mended, "move_disk", "10.1.2")) == 2
    assert qemu_bugs.against(mended, "resize", "10.1.2") == []


def test_a_guest_that_was_started_before_an_update_is_judged_by_what_its_host_told() -> None:
    older = {"one": "10.1.0 (qemu-kvm-10.1.0-14.el10)", "two": "unknown"}
    mended = host(qemu_system="10.1.0 (qemu-kvm-10.1.0-16.el10)", older_qemus=older)
    told = {
        name: qemu_bugs.against(mended, "live_copy", qemu_bugs.started_with(mended, name))
        for name in ("one", "two", "three")
    }
    assert {name: len(bugs) for name, bugs in told.items()} == {"one": 2, "two": 2, "three": 1}
    assert qemu_bugs.started_with(host(), "one") == ""


def test_a_host_without_qemu_has_no_bugs_of_it() -> None:
    assert qemu_bugs.of_host(host()) == []
    assert qemu_bugs.of_host(host(tools={"qemu-system": False})) == []
    assert len(qemu_bugs.of_host(host(tools={"qemu-system": True}))) == 3
    assert len(qemu_bugs.of_host(host(proxmox_version="9.1"))) == 3
