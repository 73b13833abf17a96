"""Whose ZFS pools are changed, and which journals count: by what ZFS says of them."""

import contextlib
from pathlib import Path

import pytest

from storage_admin.agent.host import far_disks, zfs
from storage_admin.agent.host.space import Reserve
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.agent.swap import zfs_volumes
from storage_admin.agent.swap.volumes import Journal, Place, Wanted
from tests.agent.harness import ask, refusal_of
from tests.agent.recording import RecordingIO
from tests.agent.test_volumes import HERE, placed
from tests.harness.filesystems import new_program

OWN = {"guid": "77", "health": "ONLINE", "readonly": "off", "multihost": "off"}
PLACE = Place("zfs", "tank/data", "77", "vm-900-disk-0", "5")
#: What ZFS says of a zvol, by the columns that are asked for.
ZVOL = ("tank/data/vm-900-disk-0", "volume", "5", "149", "4096", "0", "-", "-")


def say(folder: Path, pool: dict[str, str], disk: str, *datasets: tuple[str, ...]) -> None:
    (folder / "get").write_text("".join(f"{name}\t{value}\n" for name, value in pool.items()))
    (folder / "disks").write_text(f"tank\t1G\n\tmirror-0\t1G\n\t{disk}\t1G\tONLINE\n")
    (folder / "datasets").write_text("".join("\t".join(line) + "\n" for line in datasets))
    tools = {
        "zpool": f'[ "$1" = get ] && cat {folder}/get || cat {folder}/disks',
        "zfs": f"cat {folder}/datasets",
    }
    for tool, does in tools.items():
        new_program(folder / "bin" / tool, f"#!/bin/sh\n{does}\n")


@pytest.fixture
def disk(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of the disk that the pool lies on, which is this machine's own."""
    placed(monkeypatch, tmp_path, HERE)
    say(tmp_path, OWN, "/dev/sda3")
    return "/dev/sda3"


def code() -> str:
    """With what a change of the pool is refused; empty where it may be changed."""
    return refusal_of(zfs_volumes.refuse_shared, PLACE, RecordingIO())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, ""), ({"health": "DEGRADED"}, ""), ({"health": "SUSPENDED"}, "shared_pool"), ({"guid": "78"}, "stale_plan"),
     ({"multihost": "on"}, "shared_pool"), ({"readonly": "on"}, "shared_pool")],
)  # fmt: skip
def test_a_pool_counts_by_what_it_says_of_itself(
    disk: str, tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    say(tmp_path, OWN | changes, disk)
    assert code() == expected


def test_a_pool_counts_by_its_disks(disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, OWN, "/dev/sdb")  # which the kernel does not have
    assert code() == "shared_pool"
    (tmp_path / "sys/devices/platform/host3/session1/target3:0:0/3:0:0:0/block/sdb").mkdir(parents=True)
    link = tmp_path / "sys/class/block/sdb"
    link.symlink_to(tmp_path / "sys/devices/platform/host3/session1/target3:0:0/3:0:0:0/block/sdb")
    assert code() == "shared_pool"
    link.unlink()
    link.symlink_to(tmp_path / "sys/devices" / HERE)
    assert code() == ""
    (tmp_path / "file").touch()
    say(tmp_path, OWN, f"{tmp_path}/file")  # on a filesystem of no disk that the kernel has
    assert code() == "shared_pool"
    monkeypatch.setattr(far_disks, "_way", lambda below: "" if below.startswith("dev/block/") else "unknown")
    assert code() == ""


@pytest.mark.parametrize(
    ("value", "counts"),
    [("j1.5.default.vm-900-disk-0", True), ("j1.5.=dev.vm-900-disk-0", True), ("j1.6.default.vm-900-disk-0", False),
     ("-", False), ("j1.5", False), ("../x.5.default.vm-900-disk-0", False), ("j1.0.new.vm-900-disk-0", False)],
)  # fmt: skip
def test_only_the_journal_of_the_dataset_itself_counts(disk: str, tmp_path: Path, value: str, counts: bool) -> None:
    say(tmp_path, OWN, disk, (*ZVOL, value))
    (found,) = zfs_volumes.there([], RecordingIO())
    assert (found.id, found.group, found.name, found.taken) == ("5", "tank/data", "vm-900-disk-0", 4096)
    assert (found.journal is not None) == counts
    if found.journal is not None:
        assert (found.journal.job, found.journal.own_name) == ("j1", "vm-900-disk-0")


@pytest.mark.parametrize(
    ("name", "value", "is_new"),
    [(".sa-j1.new", "j1.0.new.disk", True), (".sa-j1.new", "j1.5.new.disk", True), ("disk", "j1.0.new.disk", None),
     (".sa-j2.new", "j1.0.new.disk", None), (".sa-j2.new", "j1.5.new.disk", False), ("disk", "j1.5.new.disk", False)],
)  # fmt: skip
def test_a_volume_that_is_made_counts_before_its_id_is_known_only_under_its_jobs_name(
    disk: str, tmp_path: Path, name: str, value: str, is_new: bool | None
) -> None:
    say(tmp_path, OWN, disk, (f"tank/data/{name}", *ZVOL[1:], value))
    (found,) = zfs_volumes.there([], RecordingIO())
    assert (found.journal and found.is_new) == is_new
    if found.journal is not None:
        assert (found.journal.makes, found.journal.own_name) == (True, "disk")


@pytest.mark.parametrize(
    ("name", "takes"),
    [("disk", True), ("a:b_c-1.d", True), ("a b", False), ("-a", False), (".sa-j1.new", False), ("..", False),
     ("a/b", False), ("a@b", False), ("", False), ("x" * 245, True), ("x" * 246, False)],
)  # fmt: skip
def test_a_new_volume_has_a_name_that_zfs_takes_and_guests_find(name: str, takes: bool) -> None:
    wanted = {"backend": "zfs", "group": "tank/data", "group_id": "77", "name": name, "pool": ""}
    answer = ask("volume_to_volume", vars(PLACE) | {"group": "none/none", "volume": wanted})
    assert (answer["code"] != "invalid") == takes, answer


def test_a_volume_is_not_moved_onto_its_own_name() -> None:
    wanted = {name: value for name, value in vars(PLACE).items() if name != "id"}
    answer = ask("volume_to_volume", vars(PLACE) | {"volume": wanted | {"pool": ""}})
    assert answer["code"] == "target_exists"


@pytest.mark.parametrize(
    ("available", "needed", "is_full"),
    [(100, 0, False), (99, 0, True), (150, 50, False), (149, 50, True)],
)
def test_what_zfs_has_available_is_written_to_down_to_the_reserve(
    disk: str, tmp_path: Path, available: int, needed: int, is_full: bool
) -> None:
    say(tmp_path, OWN, disk, ("used", "5000"), ("available", str(available)))
    wanted = Wanted(PLACE, "", Reserve(0.0, 100))
    with pytest.raises(RefusedError, match="above its reserve") if is_full else contextlib.nullcontext():
        zfs_volumes.refuse_full(wanted, needed, RecordingIO())


def test_a_device_that_is_no_volume_of_zfs_is_not_taken_for_one(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zfs_volumes, "_AWAY", 0.3)
    monkeypatch.setattr(zfs, "device", lambda _: "/dev/null")
    one = zfs_volumes.Dataset("tank/data", "disk", "5", 0, None, False, True, 1, 0, False)
    with pytest.raises(HostError, match="udev has not made"):
        zfs_volumes.device(one)


def test_a_recovery_goes_on_with_files_where_zfs_does_not_answer(disk: str, tmp_path: Path) -> None:
    (tmp_path / "bin/zfs").write_text("#!/bin/sh\nexit 5\n")
    new_program(tmp_path / "bin/lvs", "#!/bin/sh\nexit 5\n")
    told = {"recovered": [], "images": [], "unread": [], "silent": ["lvm", "zfs"], "away": []}
    made = [{"job": "j1", "backend": name, "group": "g", "name": "n", "id": "i"} for name in ("lvm", "zfs")]
    assert ask("recover", {"pools": [], "volumes": [], "volumes_made": made}) == told


@pytest.mark.parametrize(
    "changes", [{"backend": "btrfs"}, {"group": "-x/y"}, {"name": "a/b"}, {"name": "a@b"}, {"id": ""}]
)
def test_a_place_that_is_none_is_refused(changes: dict[str, str]) -> None:
    answer = ask("set_volume_aside", vars(PLACE) | changes)
    assert answer["code"] == "invalid"


@pytest.mark.parametrize(
    ("others", "left", "freed"),
    [(0, 0, 4096), (1 << 30, 0, 4096), (-(1 << 30), 0, 4096 - (1 << 30)), (0, 1024, 3072), (1 << 30, 1024, 3072)],
)
def test_what_others_give_up_meanwhile_is_nothing_that_a_deletion_has_freed(
    monkeypatch: pytest.MonkeyPatch, others: int, left: int, freed: int
) -> None:
    """What is being freed is in use still (dsl_destroy.c: it is the pool's ``$FREE`` that has it)."""
    used = iter([8 << 30, (8 << 30) - 4096 + left - others])
    monkeypatch.setattr(zfs_volumes, "_used", lambda *_: next(used))
    monkeypatch.setattr(zfs_volumes, "_freeing", lambda *_: left)
    monkeypatch.setattr(zfs_volumes, "_FREED", 0.0)
    monkeypatch.setattr(zfs_volumes, "change", lambda *_: None)
    one = zfs_volumes.Dataset("tank/data", "disk", "5", 4096, None, False, True, 1, 0, False)
    assert zfs_volumes.remove(one, Journal("", "j1", "=dev", "disk"), RecordingIO(), 0) == freed


def test_a_pool_that_is_not_imported_or_whose_disks_are_silent_is_away(disk: str, tmp_path: Path) -> None:
    """``zpool list`` knows a pool that is suspended; what ``zfs list`` says of it then is no proof."""
    (tmp_path / "bin/zpool").write_text(
        "#!/bin/sh\nprintf '77\\ta\\tONLINE\\n78\\tb\\tSUSPENDED\\n79\\tc\\tDEGRADED\\n'\n"
    )
    groups = [{"backend": "zfs", "group_id": group} for group in ("77", "78", "79", "80")]
    told = ask("recover", {"pools": [], "groups": groups})
    assert [one["group_id"] for one in told["away"]] == ["78", "80"]
    assert told["silent"] == []
