"""Containers as vzlist tells of them, and where it does not."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.openvz import AbsentError, containers
from storage_admin.hosts.shells import Done
from tests.harness.filesystems import new_folder, new_program
from tests.harness.openvz import OpenVZHost


def listed(host: OpenVZHost) -> dict[str, GuestFacts]:
    found = containers(host.shell, folders=host.folders)
    assert len({guest.uid for guest in found}) == len(found)
    assert {guest.kind for guest in found} <= {"container"}
    return {guest.uid: guest for guest in found}


def test_every_container_with_its_state_and_priority(host: OpenVZHost) -> None:
    host.add("200", 'HOSTNAME="a.example.org"\nIOPRIO="7"\n', "running")
    host.add("201", 'HOSTNAME="b"\n')
    host.add("202", 'HOSTNAME="c"\nIOPRIO="0"\n', "mounted")
    host.add("203", 'IOPRIO="4"\n', "suspended")
    host.add("c4d2a8f0-1111-4222-8333-123456789abc", 'HOSTNAME="seven"\n', "running")
    assert [(uid, guest.name, guest.state, guest.io_priority) for uid, guest in listed(host).items()] == [
        ("200", "a.example.org", "running", 7),
        ("201", "b", "shut off", None),
        ("202", "c", "mounted", 0),
        ("203", "203", "suspended", 4),
        ("c4d2a8f0-1111-4222-8333-123456789abc", "seven", "running", None),
    ]
    assert host.calls("vzlist")[0] == ["-aH", "-o", "ctid,hostname,status,ioprio"]


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("two words", "two words"),
        ("x running 7", "x running 7"),
        ("running", "running"),
        ("stopped 4", "stopped 4"),
        ("-", "200"),
        ("", "200"),
        ("\x1b[31mred\x1b]0;owned\x07", "\\x1b[31mred\\x1b]0;owned\\x07"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("a\rb", "a\\rb"),
        ("a\x0bb\x0cc", "a\\x0bb\\x0cc"),
        ("zwei\u2028zeilen\u202e", "zwei\\u2028zeilen\\u202e"),
        ("w" * 31, "w" * 31),
        ("w" * 32, "w" * 32),
        ("w" * 60 + ".example.org", "w" * 60 + ".example.org"),
    ],
)
def test_any_hostname_is_shown_and_moves_no_column(host: OpenVZHost, hostname: str, name: str) -> None:
    host.add("200", f'HOSTNAME="{hostname}"\nIOPRIO="3"\n', "running")
    host.add("201")
    found = listed(host)
    assert (found["200"].name, found["200"].state, found["200"].io_priority) == (name, "running", 3)
    assert (found["201"].name, found["201"].state, found["201"].io_priority) == ("ct", "shut off", None)


def test_a_hostname_that_is_not_utf_8_is_shown(host: OpenVZHost) -> None:
    host.add("200", b'HOSTNAME="\xff\xfe"\n')
    assert listed(host)["200"].name == "\\xff\\xfe"


def test_warnings_among_the_rows_are_no_containers(host: OpenVZHost) -> None:
    host.add("200", 'HOSTNAME="a"\nIOPRIO="x"\n')
    host.switch("noise", "Warning at 200.conf:2: invalid value\n-1 x running 5\n0 host running 4\n\n1e3 x running 5\n")
    assert set(listed(host)) == {"200"}


@dataclass
class Saying:
    """A host whose vzlist says always the same."""

    stdout: bytes
    exit_code: int = 0
    stderr: bytes = b""

    def run(self, argv: object, *, stdin: bytes = b"", seconds: float = 30.0) -> Done:
        return Done(self.exit_code, self.stdout, self.stderr)


@pytest.mark.parametrize(
    "row", [b"200 a thinking 5", b"200 a running 9", b"200 a running", b"200", b"200 a running 5x"]
)
def test_a_row_that_is_not_understood_is_told_as_it_is(row: bytes) -> None:
    (guest,) = containers(Saying(row + b"\n"))
    assert (guest.uid, guest.io_priority, guest.unread[0]) == ("200", None, row.decode())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Saying(b"", 1, b"This program can only be run under root.\n"), "under root"),
        (Saying(b"Killed\n", 0), "Killed"),
        (Saying(b"       200 a running 5\n", 139, b"Segmentation fault\n"), "Segmentation fault"),
        (Saying(b"", 1, b"\x1b[31mbad"), r"\\x1b\[31mbad"),
    ],
)
def test_a_vzlist_that_fails_is_no_empty_host(answer: Saying, words: str) -> None:
    with pytest.raises(HostError, match=words):
        containers(answer)


def test_no_containers_is_an_answer_and_no_openvz_is_another(host: OpenVZHost) -> None:
    assert containers(host.shell, folders=host.folders) == ()
    host.switch("no_kernel")
    assert host.shell.run(["vzlist", "-aH", "-o", "ctid"]) == Done(
        0, b"", b"Unable to open /proc/vz/veinfo: No such file or directory\n"
    )
    with pytest.raises(AbsentError, match="does not run OpenVZ") as absent:
        containers(host.shell, folders=host.folders)
    assert absent.value.code == "tool_missing"


def test_without_vzlist_and_without_configurations_there_is_no_openvz(bare: OpenVZHost) -> None:
    with pytest.raises(AbsentError):
        containers(bare.shell, folders=bare.folders)
    with pytest.raises(AbsentError):
        containers(bare.shell, folders=("/nonexistent",))


@pytest.mark.parametrize("missing", ["the tools", "the kernel"])
def test_without_vzlist_configurations_tell(host: OpenVZHost, missing: str) -> None:
    host.add("200", 'HOSTNAME="a"\nIOPRIO="2"\nIOPRIO="6"\nVE_PRIVATE="/vz/private/$VEID"\n', "running")
    host.add("201", 'VE_PRIVATE="/srv/${VEID}/x"\n')
    for name in ("0.conf", "vps.conf", "200.conf.bak", "ve-basic.conf-sample", "007.conf"):
        (host.conf / name).write_text('HOSTNAME="none"\n')
    (host.conf / "300.conf").mkdir()
    (host.conf / "301.conf").write_bytes(b"x" * (1024 * 1024 + 1))
    if missing == "the tools":
        host.remove("vzctl", "vzlist")
    else:
        host.switch("no_kernel")
    found = listed(host)
    assert [(uid, guest.name, guest.state, guest.io_priority) for uid, guest in found.items()] == [
        ("200", "a", "unknown", 6),
        ("201", "201", "unknown", None),
    ]
    assert [disk.path for disk in found["200"].disks] == ["/vz/private/200"]
    assert [disk.path for disk in found["201"].disks] == ["/srv/201/x"]


def test_the_first_folder_that_has_a_container_tells_of_it(bare: OpenVZHost) -> None:
    proxmox = new_folder(bare.folder / "pve")
    bare.add("200", 'HOSTNAME="here"\n')
    (proxmox / "200.conf").write_text('HOSTNAME="there"\n')
    (proxmox / "201.conf").write_text('HOSTNAME="there"\n')
    assert {uid: guest.name for uid, guest in listed(bare).items()} == {"200": "here", "201": "there"}


def test_a_folder_of_files_and_the_images_of_a_ploop_are_disks(host: OpenVZHost, tmp_path: Path) -> None:
    area = tmp_path / "an area"
    (area / "root.hdd").mkdir(parents=True)
    for name in ("root.hdd", "root.hdd.{9a2c}", "DiskDescriptor.xml", "DiskDescriptor.xml.lck", "root.hdd.lck"):
        (area / "root.hdd" / name).touch()
    (area / "root.hdd" / "templates").symlink_to("root.hdd")
    host.add("200", f'VE_PRIVATE="{area}"\n')
    host.add("201")
    found = listed(host)
    assert found["200"].disks == (
        DiskFacts("root", "disk", f"{area}/root.hdd/root.hdd"),
        DiskFacts("root.1", "disk", f"{area}/root.hdd/root.hdd.{{9a2c}}"),
    )
    assert found["201"].disks == (DiskFacts("root", "directory", f"{host.folder}/private/201"),)


def test_an_area_whose_name_is_no_text_is_told_as_not_read(host: OpenVZHost) -> None:
    host.add("200", b'VE_PRIVATE="/vz/\xff"\n')
    (guest,) = listed(host).values()
    assert (guest.disks, guest.unread) == ((), ("/vz/\\xff",))


def test_a_private_area_that_is_not_known_is_told_as_not_read(bare: OpenVZHost) -> None:
    """So that its images are not taken for nobody's."""
    bare.add("200", 'HOSTNAME="a"\n')
    bare.add("201", 'VE_PRIVATE="elsewhere"\n')
    assert {uid: guest.unread for uid, guest in listed(bare).items()} == {
        "200": ("VE_PRIVATE=",), "201": ("VE_PRIVATE=elsewhere",),
    }  # fmt: skip


def test_areas_that_cannot_be_looked_into_are_no_empty_areas(host: OpenVZHost) -> None:
    host.add("200")
    broken = host.bin / "sh"
    new_program(broken, "#!/bin/sh\necho broken >&2\nexit 2\n")
    with pytest.raises(HostError, match="could not be read: broken"):
        containers(host.shell)
    host.remove("vzlist")
    with pytest.raises(HostError, match="could not be read: broken"):
        containers(host.shell)


def test_listing_changes_nothing_on_the_host(host: OpenVZHost) -> None:
    host.add("200", "IOPRIO=5")
    before = subprocess.run(["ls", "-liR", "--time-style=full-iso", str(host.conf)], capture_output=True).stdout
    listed(host)
    after = subprocess.run(["ls", "-liR", "--time-style=full-iso", str(host.conf)], capture_output=True).stdout
    assert before == after
