"""Whose volume groups are changed: by what LVM says of one, and over what its disks are reached."""

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import far_disks
from storage_admin.agent.host.space import Reserve
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, b64
from storage_admin.agent.swap import lvm_volumes
from storage_admin.agent.swap.volumes import Journal, Place, Wanted
from storage_admin.agent.verbs import aside_volume
from tests.agent.harness import ask, refusal_of
from tests.agent.recording import RecordingIO, request
from tests.harness.filesystems import new_folder, new_program
from tests.harness.lvm import GROUP, TOOLS, VOLUME, Lvm
from tests.working import code_of, refused_as

OWN = {
    "vg_name": "vg0", "vg_uuid": "u1", "vg_shared": "", "vg_clustered": "", "vg_lock_type": "", "vg_systemid": "",
    "vg_tags": "mine", "vg_exported": "", "vg_partial": "",
}  # fmt: skip

PLACE = Place("lvm", "vg0", "u1", "vm-900-disk-0", "id")
#: The volume that LVM has in most of these tests.
DISK = {"backend": "lvm", "group": "vg0", "group_id": "g1", "name": "disk", "id": "id"}
LvmWith = Callable[..., Lvm]
GroupIs = Callable[..., None]
HERE = "pci0000:00/ata1/host0/target0:0:0/0:0:0:0/block/sda3"


@pytest.fixture
def group_is(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> GroupIs:
    """``group_is(path, …)``: on a disk that the kernel has at that place; what LVM says else than of one's own."""

    def said(path: str, **changes: str) -> None:
        placed(monkeypatch, tmp_path, path)
        group = OWN | {"pv_name": f"/dev/{Path(path).name}"} | changes
        (tmp_path / "vgs.json").write_text(json.dumps({"report": [{"vg": [group]}]}))
        new_program(programs / "vgs", f"#!/bin/sh\ncat {tmp_path}/vgs.json\n")

    return said


def placed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str) -> None:
    """The kernel has a disk at that place below /sys/devices."""
    root = tmp_path / "sys"
    (root / "class/block").mkdir(parents=True)
    (root / "devices" / path).mkdir(parents=True)
    (root / "class/block" / Path(path).name).symlink_to(root / "devices" / path)
    monkeypatch.setattr(far_disks, "SYS", str(root))


def code() -> str:
    """With what a change of the group is refused; empty where it may be changed."""
    return refusal_of(lvm_volumes.refuse_shared, PLACE, RecordingIO())


def test_a_group_on_a_disk_of_this_machine_may_be_changed(group_is: GroupIs) -> None:
    group_is("pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda3")
    assert code() == ""


@pytest.mark.parametrize(
    "changes",
    [{"vg_shared": "shared"}, {"vg_clustered": "clustered"}, {"vg_lock_type": "sanlock"}, {"vg_systemid": "other"},
     {"vg_tags": "a,RHAT_storage_domain"}, {"vg_tags": "MDT_LEASETIMESEC=60"}, {"vg_exported": "exported"},
     {"vg_partial": "partial"}],
)  # fmt: skip
def test_a_group_that_somebody_else_manages_is_not(group_is: GroupIs, changes: dict[str, str]) -> None:
    group_is(HERE, **changes)
    assert code() == "shared_pool"


@pytest.mark.parametrize(
    "path",
    ["platform/host3/session1/target3:0:0/3:0:0:0/block/sdb", "pci0000:00/host4/rport-4:0-0/target4:0:0/block/sdc",
     "virtual/block/rbd0", "virtual/block/nbd1", "virtual/block/drbd0"],
)  # fmt: skip
def test_a_disk_that_other_machines_may_have_makes_it_shared(group_is: GroupIs, path: str) -> None:
    group_is(path)
    assert code() == "shared_pool"


@pytest.mark.parametrize(("transport", "shared"), [("pcie", False), ("tcp", True), ("rdma", True), ("", True)])
def test_nvme_counts_by_its_transport(group_is: GroupIs, tmp_path: Path, transport: str, shared: bool) -> None:
    group_is("pci0000:00/nvme/nvme0/nvme0n1")
    (tmp_path / "sys/class/nvme/nvme0").mkdir(parents=True)
    (tmp_path / "sys/class/nvme/nvme0/transport").write_text(transport + "\n")
    assert code() == ("shared_pool" if shared else "")


@pytest.mark.parametrize(("uuid", "shared"), [("mpath-3600", True), ("CRYPT-LUKS2-x", False)])
def test_a_disk_counts_by_what_lies_below_it(group_is: GroupIs, tmp_path: Path, uuid: str, shared: bool) -> None:
    group_is("virtual/block/dm-0")
    blocks = tmp_path / "sys/devices/virtual/block"
    (new_folder(blocks / "dm-0/dm") / "uuid").write_text(uuid + "\n")
    assert code() == ("shared_pool" if shared else "")
    (new_folder(blocks / "dm-0/slaves") / "rbd0").symlink_to(tmp_path)
    (tmp_path / "sys/class/block/rbd0").symlink_to(new_folder(blocks / "rbd0"))
    assert code() == "shared_pool"


def test_a_recovery_goes_on_with_files_where_lvm_does_not_answer(group_is: GroupIs, programs: Path) -> None:
    group_is(HERE)
    new_program(programs / "lvs", "#!/bin/sh\nexit 5\n")
    told = {"recovered": [], "images": [], "unread": [], "silent": ["lvm"], "away": []}
    assert ask("recover", {"pools": [], "volumes": []}) == told


@pytest.fixture
def lvm_with(programs: Path) -> LvmWith:
    """``lvm_with({…}, …)``: this machine's LVM, with these volumes in one group of its own."""

    def made(*volumes: dict[str, str], **more: Any) -> Lvm:
        lvm = Lvm(programs)
        own = {"vg_name": "vg0"}
        lvm.install(vg=[GROUP | own], lv=[VOLUME | own | {"lv_uuid": "id"} | one for one in volumes], thin="", **more)
        return lvm

    return made


def test_a_volume_that_could_not_be_put_back_is_owed_a_recovery(lvm_with: LvmWith) -> None:
    """The first change is its tag; what takes its device away fails, and then what takes the tag away."""
    lvm = lvm_with({"lv_name": "disk"}, fails="lvchange", spared=1)
    assert ask("set_volume_aside", DISK)["code"] == "interrupted"
    assert lvm.volumes()["disk"]["lv_tags"] == "sa-j1.iy.disk"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No change is waited for longer than two seconds."""
    run = tools.run_to_end

    def briefly(argv: Any, io: Any, seconds: float = 60.0, pass_fds: Any = ()) -> Any:
        return run(argv, io, 2.0 if argv[0] in TOOLS[2:] else seconds, pass_fds)

    monkeypatch.setattr(tools, "run_to_end", briefly)
    monkeypatch.setattr(RecordingIO, "wait_for_go", lambda *_, **__: None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("how", "told"), [("lvchange", ["reverted"]), ("lvrename", [])])
def test_a_command_that_is_killed_after_its_work_is_owed_a_recovery(
    lvm_with: LvmWith, how: str, told: list[str]
) -> None:
    """Where it was no more than the tag, that stays; a rename the job itself takes back."""
    lvm = lvm_with({"lv_name": "disk"}, hangs=how)
    assert (
        code_of(HostError, aside_volume.set_aside, request("set_volume_aside", **DISK), RecordingIO()) == "interrupted"
    )
    assert [one["outcome"] for one in ask("recover", {"pools": []})["recovered"]] == told
    assert [(name, one["lv_tags"]) for name, one in lvm.volumes().items()] == [("disk", "")]


@pytest.mark.usefixtures("impatient")
def test_a_volume_whose_making_is_killed_after_it_was_made_goes_with_a_recovery(programs: Path) -> None:
    lvm, name = Lvm(programs), f"sat{secrets.token_hex(4)}"
    lvm.install(vg=[GROUP | {"vg_name": name}], lv=[], thin="", hangs="lvcreate")
    wanted = Wanted(Place("lvm", name, "g1", "new", ""), "", Reserve(0.0, 0))
    try:
        code = code_of(HostError, lvm_volumes.make, wanted, 4 << 20, 0, "j1", RecordingIO(), 2)
        assert (code, list(lvm.volumes())) == ("interrupted", [".sa-j1.new"])
        assert [one["outcome"] for one in ask("recover", {"pools": []})["recovered"]] == ["reverted"]
        assert lvm.volumes() == {}
    finally:
        lvm.let_go()
        shutil.rmtree(f"/dev/{name}", ignore_errors=True)


def test_what_a_recovery_cannot_put_back_now_is_tried_again(lvm_with: LvmWith) -> None:
    lvm = lvm_with({"lv_name": ".sa-j1.work", "lv_tags": "sa-j1.iy.disk"}, fails="lvrename")
    (told,) = ask("recover", {"pools": [], "volumes": []})["recovered"]
    assert (told["outcome"], bool(told["detail"])) == ("busy", True)
    lvm.write(lvm.read() | {"fails": ""})
    (told,) = ask("recover", {"pools": [], "volumes": []})["recovered"]
    assert (told["outcome"], list(lvm.volumes())) == ("reverted", ["disk"])


def test_a_volume_gets_its_name_back_beside_a_copy_of_its_group_that_has_its_id(programs: Path) -> None:
    """As ``vgimportclone`` makes of a snapshot of the disks: the ids of volumes stay."""
    lvm, tag = Lvm(programs), "sa-j1.in.disk"
    groups = [GROUP | {"vg_name": name, "vg_uuid": name} for name in ("copy", "vg0")]
    work = VOLUME | {"lv_name": ".sa-j1.work", "lv_uuid": "same", "lv_tags": tag}
    volumes = [work | {"vg_name": one["vg_name"], "vg_uuid": one["vg_uuid"]} for one in groups]
    lvm.install(vg=groups, lv=volumes, thin="")
    told = ask("recover", {"pools": [], "volumes": []})["recovered"]
    assert [(one["job"], one["outcome"]) for one in told] == [("j1", "reverted")] * 2
    assert [(one["vg_name"], one["lv_name"], one["lv_tags"]) for one in lvm.read()["lv"]] == [
        ("copy", "disk", ""), ("vg0", "disk", "")
    ]  # fmt: skip


def test_another_volume_that_has_taken_the_name_in_that_moment_gets_it_back(
    lvm_with: LvmWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes a volume names it: between the last look and its tag, its name may have become another one's."""
    lvm = lvm_with({"lv_name": "disk", "lv_active": "active"})
    write = lvm_volumes.write_journal

    def late(*args: Any) -> str:
        told = lvm.read()
        lvm.write(told | {"lv": [told["lv"][0] | {"lv_uuid": "another"}]})
        return write(*args)

    monkeypatch.setattr(lvm_volumes, "write_journal", late)
    monkeypatch.setattr(RecordingIO, "wait_for_go", lambda *_, **__: None)
    assert refused_as(aside_volume.set_aside, request("set_volume_aside", **DISK), RecordingIO()) == "stale_plan"
    (one,) = lvm.read()["lv"]
    assert [one[name] for name in ("lv_name", "lv_tags", "lv_active", "lv_autoactivation")] == [
        "disk", "", "active", "enabled"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "taken"), [("-wi-a-----", 25165824), ("owi-a-s---", 25165824), ("rwi-a-r---", 0), ("mwi-a-m---", 0)]
)
def test_what_a_mirror_takes_of_its_group_is_not_taken_for_its_size(
    lvm_with: LvmWith, attributes: str, taken: int
) -> None:
    """A scan adds its legs up; to an agent that changes it nobody tells."""
    lvm_with({"lv_name": "disk", "lv_attr": attributes})
    (one,) = lvm_volumes.there([], RecordingIO())
    assert one.taken == taken


def test_an_lvm_that_does_not_answer_is_not_taken_for_one_that_activates_nothing_by_itself(lvm_with: LvmWith) -> None:
    lvm_with({"lv_name": "disk"}, fails="lvs")
    with pytest.raises(HostError):
        lvm_volumes.autoactivation(RecordingIO())


def test_a_deletion_of_which_nobody_knows_whether_it_was_done_is_told_by_a_recovery(lvm_with: LvmWith) -> None:
    lvm_with({"lv_name": ".sa-j1.aside", "lv_tags": "sa-j1.iy.disk"}, fails="lvremove")
    place = DISK | {"aside_job": "j1"}
    assert ask("delete_volume", place, job="j2")["code"] == "interrupted"
    waits = place | {"inode": "7", "path_b64": b64(b"/dev/vg0/disk")}
    (told,) = ask("recover", {"pools": [], "volumes": [waits]})["recovered"]
    assert (told["job"], told["outcome"]) == ("j1", "kept")


@pytest.mark.parametrize(
    ("attributes", "others", "freed"),
    [("-wi-------", 0, 24 << 20), ("-wi-------", 1 << 30, 24 << 20), ("-wi-------", -(8 << 20), 16 << 20),
     ("rwi---r---", 0, 24 << 20)],
)  # fmt: skip
def test_what_others_give_up_meanwhile_is_nothing_that_a_deletion_of_a_thick_volume_has_freed(
    lvm_with: LvmWith, monkeypatch: pytest.MonkeyPatch, attributes: str, others: int, freed: int
) -> None:
    """Of a mirror nobody tells what it takes: there what the group has more free counts."""
    lvm_with({"lv_name": "disk", "lv_attr": attributes})
    used = iter([2 << 30, (2 << 30) - (24 << 20) - others])
    monkeypatch.setattr(lvm_volumes, "used_with", lambda *_: next(used))
    (found,) = lvm_volumes.there([], RecordingIO())
    assert lvm_volumes.remove(found, Journal("", "j1", "in", "disk"), RecordingIO(), 2) == freed


@pytest.mark.parametrize("pool", ["", "data"])
def test_a_volume_that_is_there_after_its_removal_is_not_called_removed(
    lvm_with: LvmWith, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """What the selection of ``lvremove`` leaves out, it passes over with success."""
    lvm_with({"lv_name": "disk", "pool_lv": pool})
    monkeypatch.setattr(lvm_volumes, "change", lambda *_: None)
    (found,) = lvm_volumes.there([], RecordingIO())
    assert refused_as(lvm_volumes.remove, found, Journal("", "j1", "in", "disk"), RecordingIO(), 2) == "has_overlays"
