"""Drive strings: read, changed and written back, with nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_admin.hosts.proxmox.drives import CONTAINER, VM, Drive, is_drive, parse_size
from storage_admin.hosts.proxmox.known import is_understood
from tests.harness.proxmox import schema
from tests.harness.proxmox.confs import print_drive

PLAIN = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S"), exclude_characters=",="), min_size=1)
VALUES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S"), exclude_characters=","), min_size=1)
NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,15}", fullmatch=True).filter(lambda name: name not in ("file", "volume"))
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=8)


@st.composite
def drive_strings(draw: st.DrawFn) -> str:
    """Any drive string: the volume with or without its key, anywhere among the options."""
    parts = [f"{key}={value}" for key, value in draw(OPTIONS).items()]
    key = draw(st.sampled_from(["", "file=", "volume="]))
    volume = draw(PLAIN if not key else VALUES)
    parts.insert(draw(st.integers(0, len(parts))), key + volume)
    return ",".join(parts)


@given(drive_strings())
def test_what_is_not_changed_is_written_as_it_was(text: str) -> None:
    assert str(Drive.parse(text)) == text


@given(drive_strings(), OPTIONS)
def test_a_change_changes_nothing_else(text: str, changes: dict[str, str]) -> None:
    before = Drive.parse(text)
    after = Drive.parse(str(before.with_options(dict(changes))))
    assert after.volume == before.volume
    assert dict(after.parts) == dict(before.parts) | changes
    assert [key for key, _ in after.parts if key in dict(before.parts)] == [key for key, _ in before.parts]
    gone = after.with_options(dict.fromkeys(changes))
    assert dict(gone.parts) == {key: value for key, value in before.parts if key not in changes}


@given(drive_strings(), VALUES)
def test_a_new_volume_leaves_the_options(text: str, volume: str) -> None:
    before = Drive.parse(text)
    after = Drive.parse(str(before.with_volume(volume)))
    assert after.volume == volume
    named = ("", "file", "volume")
    assert [part for part in after.parts if part[0] not in named] == [
        part for part in before.parts if part[0] not in named
    ]


@given(st.text(max_size=80))
def test_any_text_is_a_drive_or_no_drive(text: str) -> None:
    try:
        drive = Drive.parse(text)
    except ValueError:
        return
    assert drive.volume
    assert Drive.parse(str(drive)) == drive


KNOWN = {name: one for name, one in schema.options("vm-now:scsi").items() if name not in ("file", "volume")}


@st.composite
def proxmox_drives(draw: st.DrawFn) -> str:
    """A drive that Proxmox VE's own schema takes."""
    parts = ["store:100/vm-100-disk-0.qcow2"]
    for name in draw(st.lists(st.sampled_from(sorted(KNOWN)), unique=True, max_size=6)):
        one = KNOWN[name]
        if one.alias or one.pattern or one.format == "urlencoded":
            continue
        if one.choices:
            value = draw(st.sampled_from(one.choices))
        elif one.type == "boolean":
            value = draw(st.sampled_from(["0", "1", "on", "off"]))
        elif one.format == "disk-size":
            value = draw(st.sampled_from(["1", "528K", "1.5G", "32G", "0.25T", "4MiB"]))
        else:
            value = str(draw(st.integers(one.least or 0, 10**6)))
        parts.append(f"{name}={value}")
    return ",".join(draw(st.permutations(parts)))


@given(proxmox_drives())
def test_it_reads_what_proxmox_reads(text: str) -> None:
    drive = Drive.parse(text)
    mine = {key or "file": value for key, value in drive.parts}
    assert mine == schema.properties("vm-now:scsi", text)
    assert is_understood("scsi0", drive)
    assert Drive.parse(print_drive("scsi0", text)).volume == drive.volume


@pytest.mark.parametrize(
    ("text", "volume", "size"),
    [
        ("store:100/vm-100-disk-0.qcow2,size=32G", "store:100/vm-100-disk-0.qcow2", 32 << 30),
        ("file=store:106/c.qcow2,size=1G", "store:106/c.qcow2", 1 << 30),
        ("size=1G,file=store:106/d.qcow2,media=disk", "store:106/d.qcow2", 1 << 30),
        ("size=1.5G,volume=store:106/d.qcow2", "store:106/d.qcow2", 3 << 29),
        ("/dev/disk/by-id/ata-SAMSUNG_X,size=250059096K", "/dev/disk/by-id/ata-SAMSUNG_X", 250059096 << 10),
        ("none,media=cdrom", "none", None),
        ("file=/srv/a=b.img", "/srv/a=b.img", None),
        (",,store:1/a.raw,,size=10P", "store:1/a.raw", None),
    ],
)
def test_the_volume_may_stand_anywhere(text: str, volume: str, size: int | None) -> None:
    drive = Drive.parse(text)
    assert (drive.volume, drive.size_bytes) == (volume, size)


@pytest.mark.parametrize(
    "text",
    ["", ",", "size=1G", "a:1/x.raw,file=b:1/x.raw", "a:1/x.raw,b:1/x.raw", "a:1/x.raw,size=", "a,=b", "a,ro=1,ro=1"],
)
def test_what_proxmox_would_not_read_is_no_drive(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Drive.parse(text)


@pytest.mark.parametrize(
    ("key", "value"), [("file", "x"), ("a b", "x"), ("A", "x"), ("ro", "1,size=2"), ("ro", "\n"), ("ro", " ")]
)
def test_a_change_cannot_smuggle_an_option_in(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Drive.parse("store:1/a.raw").with_options({key: value})
    if key == "ro":
        with pytest.raises(ValueError, match=r"."):
            Drive.parse("store:1/a.raw").with_volume(value)


def test_optical_drives_are_told_from_disks_also_those_of_cloud_init() -> None:
    assert Drive.parse("none,media=cdrom").is_cdrom
    assert Drive.parse("cdrom").is_cdrom
    assert Drive.parse("none").is_empty
    assert not Drive.parse("none").is_cdrom
    assert Drive.parse("store:100/vm-100-cloudinit.qcow2,media=cdrom").is_cdrom


@given(
    st.integers(0, 10**7), st.sampled_from(["", ".0", ".5", ".25", ".125"]), st.sampled_from(["", "K", "M", "G", "T"])
)
def test_sizes_are_exact(whole: int, fraction: str, unit: str) -> None:
    thousandths = whole * 1000 + round(float("0" + fraction) * 1000)
    assert parse_size(f"{whole}{fraction}{unit}") == (thousandths << " KMGT".index(unit or " ") * 10) // 1000


@pytest.mark.parametrize("text", ["", "G", "10P", "1,5G", "-1G", "1 G", "1g", "\u0661G", "1.G", ".5G", "9" * 5000])
def test_what_is_no_size_is_none(text: str) -> None:
    assert parse_size(text) is None


def test_drives_are_those_of_the_schema() -> None:
    known = {name for name, one in schema.vm_options().items() if one.format in schema.load()["formats"]} | {"vmstate"}
    names = {name.replace("[n]", str(i)) for name in known for i in range(300)}
    for name in names:
        assert is_drive(name, VM) == (name == "vmstate" or schema.find(schema.vm_options(), name) is not None), name
    assert is_drive("mp255", CONTAINER)
    assert is_drive("rootfs", CONTAINER)
    assert not any(is_drive(name, CONTAINER) for name in ("scsi0", "mp256", "net0", "vmstate"))
    assert not any(is_drive(name, VM) for name in ("rootfs", "mp0", "net0", "usb0", "scsi", "0"))
