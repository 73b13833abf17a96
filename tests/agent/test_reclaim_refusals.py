"""What a reclaim refuses, with which code, and that nothing is changed then."""

import os
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from tests.agent.harness import (
    Agent,
    Writer,
    ask,
    at_ready,
    leftovers,
    make_image,
    overwrite,
    qemu_img,
    reclaim_args,
    write,
)
from tests.agent.test_estimate_leaks import l2_table
from tests.harness.filesystems import immutable, loop_device, new_file, new_folder
from tests.harness.processes import holder
from tests.working import create

pytestmark = pytest.mark.qemu


def refused(args: dict[str, Any], code: str, job: str = "j1", generation: int = 1) -> dict[str, Any]:
    """Asks for a reclaim, expects a refusal, and that the image is what it was and nothing is left beside it."""
    path = Path(os.fsdecode(protocol.unb64(args["path_b64"])))
    before = path.stat() if path.exists() else None
    answer = ask("reclaim", args, job, generation)
    assert answer.get("code") == code, answer
    if before is not None:
        after = path.stat()
        assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
        assert leftovers(path.parent) <= {".sa-old.journal"}
    assert "event" in answer
    assert len(answer["detail"]) > 20 or code == "invalid"
    return answer


def test_an_image_that_a_guest_writes_to(image: Path) -> None:
    args = reclaim_args(image)
    with Writer(image):
        refused(args, "image_in_use")


def test_an_image_that_a_guest_reads(image: Path) -> None:
    args = reclaim_args(image)
    with Writer(image, read_only=True):
        refused(args, "image_in_use")


def test_the_base_of_a_running_overlay(image: Path, overlay: Path) -> None:
    with Writer(overlay):
        refused(reclaim_args(image), "image_in_use")


def test_a_program_that_locks_nothing(image: Path) -> None:
    with holder(image) as reader:
        answer = refused(reclaim_args(image), "image_in_use")
        assert str(reader.pid) in answer["detail"]


@pytest.mark.parametrize(("hold", "code"), [(loop_device, "image_in_use"), (immutable, "immutable")])
def test_an_image_behind_a_loop_device_and_a_protected_template(
    image: Path, hold: Callable[[Path], AbstractContextManager[object]], code: str
) -> None:
    with hold(image):
        refused(reclaim_args(image), code)


def test_a_base_that_another_overlay_only_reads_is_no_hindrance(image: Path) -> None:
    other, mine = image.parent / "other.qcow2", image.parent / "mine.qcow2"
    for overlay in (other, mine):
        qemu_img("create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", overlay)
    write(mine, 0x44, "1M", "2M")
    with Writer(other):
        assert ask("reclaim", reclaim_args(mine, image))["swapped"]


def test_a_base_that_is_written_to(image: Path, overlay: Path) -> None:
    args = reclaim_args(overlay, image)
    with Writer(image):
        refused(args, "image_in_use")


def test_internal_snapshots(image: Path) -> None:
    qemu_img("snapshot", "-c", "before-upgrade", image)
    refused(reclaim_args(image), "has_internal_snapshots")


def encrypted(path: Path) -> Path:
    secret = "secret,id=s,data=password"
    options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"
    qemu_img("create", "-q", "-f", "qcow2", "--object", secret, "-o", options, path, "1M")
    return path


def test_an_encrypted_image(tmp_path: Path) -> None:
    refused(reclaim_args(encrypted(tmp_path / "secret.qcow2")), "encrypted")


def test_an_external_data_file(tmp_path: Path) -> None:
    path = create(tmp_path / "split.qcow2", "1M", "-o", f"data_file={tmp_path}/data.raw")
    refused(reclaim_args(path), "external_data_file")


@pytest.mark.parametrize("bit", [1, 2], ids=["dirty", "corrupt"])
def test_an_image_that_is_marked_dirty_or_corrupt(image: Path, bit: int) -> None:
    args = reclaim_args(image)
    overwrite(image, 79, bytes([bit]))
    refused({**args, **now(image)}, "dirty_or_corrupt")


def test_an_image_with_damaged_tables(image: Path) -> None:
    args = reclaim_args(image)
    overwrite(image, l2_table(image), struct.pack(">Q", 1 << 63 | 0x7FFF0000))
    refused({**args, **now(image)}, "dirty_or_corrupt")


def now(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"file_size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def test_a_raw_disk_into_which_a_guest_wrote_a_header(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    qemu_img("create", "-q", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", path, "1M")
    answer = refused(reclaim_args(path, format="raw"), "format_mismatch")
    assert "qcow2" in answer["detail"]


def test_an_image_declared_as_qcow2_that_is_none(tmp_path: Path) -> None:
    path = new_file(tmp_path / "vm.qcow2", os.urandom(1 << 20))
    args = {**reclaim_args(path, format="raw"), "format": "qcow2"}
    refused(args, "format_mismatch")


@pytest.mark.parametrize("form", ["raw", "vdi", "vpc", "vmdk"])
def test_a_format_that_cannot_hold_compressed_data(tmp_path: Path, form: str) -> None:
    path = create(tmp_path / f"disk.{form}", form=form)
    answer = refused(reclaim_args(path, format=form), "unsupported_subformat")
    assert "convert" in answer["detail"]


@pytest.mark.parametrize("field", ["dev", "inode", "file_size", "mtime_ns", "ctime_ns", "virtual_size"])
def test_an_image_that_is_not_what_the_plan_saw(image: Path, field: str) -> None:
    args = reclaim_args(image)
    refused({**args, field: args[field] + 1}, "stale_plan")


def test_an_image_that_is_gone(image: Path) -> None:
    args = reclaim_args(image)
    image.unlink()
    refused(args, "stale_plan")


def test_a_base_that_is_not_what_the_plan_saw(image: Path, overlay: Path) -> None:
    args = reclaim_args(overlay, image)
    args["chain"][0]["mtime_ns"] -= 1
    refused(args, "stale_plan")


def test_a_base_that_is_gone(image: Path, overlay: Path) -> None:
    args = reclaim_args(overlay, image)
    image.rename(image.parent / "moved.qcow2")
    refused(args, "chain_broken")


def test_a_base_that_the_plan_does_not_know(image: Path, overlay: Path) -> None:
    refused(reclaim_args(overlay), "stale_plan")
    other = make_image(image.parent / "other.qcow2")
    refused(reclaim_args(overlay, other), "stale_plan")


def test_a_base_of_another_format_than_declared(image: Path) -> None:
    overlay = image.parent / "overlay.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", image, "-F", "raw", overlay, "8M")
    refused(reclaim_args(overlay, image), "format_mismatch")


@pytest.mark.parametrize("backing", ['json:{"driver":"raw"}', "nbd:localhost:10809", "file:vm.qcow2", "ssh://h/x"])
def test_a_base_that_is_no_file_of_a_pool(image: Path, backing: str) -> None:
    overlay = image.parent / "overlay.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", "qcow2", overlay, "8M")
    refused(reclaim_args_without_opening(overlay, image), "outside_pool")


def reclaim_args_without_opening(overlay: Path, *ancestors: Path) -> dict[str, Any]:
    """Arguments for an overlay that qemu-img itself cannot open."""
    args = reclaim_args(ancestors[0], *ancestors)
    status = overlay.stat()
    return {**args, "path_b64": b64(os.fsencode(overlay)), "dev": status.st_dev, "inode": status.st_ino, **now(overlay)}


def test_a_symbolic_link_to_an_image_elsewhere(image: Path) -> None:
    pool = new_folder(image.parent / "other")
    (pool / "link.qcow2").symlink_to(image)
    (pool / "folder").symlink_to(image.parent)
    for path in (pool / "link.qcow2", pool / "folder/vm.qcow2", pool / "../vm.qcow2", image):
        args = {**reclaim_args(image, pool=pool), "path_b64": b64(os.fsencode(path))}
        assert ask("reclaim", args)["code"] == "outside_pool"


def test_something_that_is_no_regular_file(image: Path) -> None:
    pipe = image.with_name("fifo.qcow2")
    os.mkfifo(pipe)
    args = {**reclaim_args(image), "path_b64": b64(bytes(pipe))}
    assert ask("reclaim", args)["code"] == "outside_pool"


def test_a_file_with_two_names(image: Path) -> None:
    os.link(image, image.parent / "second-name")
    refused(reclaim_args(image), "hard_linked")


def test_an_image_whose_overlays_are_not_known(image: Path) -> None:
    refused(reclaim_args(image, children_known=False), "guests_unknown")


def test_not_enough_space(image: Path) -> None:
    free = os.statvfs(image.parent).f_bavail * os.statvfs(image.parent).f_frsize
    refused(reclaim_args(image, predicted_high=free * 2), "not_enough_space")
    refused(reclaim_args(image, reserve={"percent": 0, "bytes": free + (1 << 30)}), "not_enough_space")
    refused(reclaim_args(image, reserve={"percent": 100, "bytes": 0}), "not_enough_space")
    refused(reclaim_args(image, others_bytes={"elsewhere": {"other": free * 2}}), "not_enough_space")


def test_a_missing_tool(image: Path) -> None:
    program = (
        "import sys; from storage_admin.agent import main; from storage_admin.agent.programs import tools\n"
        "tools._SEARCH_PATH = '/nowhere'\nsys.exit(main.main())"
    )
    answer = ask("reclaim", reclaim_args(image), command=[*Agent.python(), "-c", program], env={"PATH": "/nowhere"})
    assert answer["code"] == "tool_missing"
    assert "prlimit" in answer["detail"]
    assert leftovers(image.parent) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"sparsify": True},
        {"method": "magic"},
        {"compression": "lzma"},
        {"undo_hours": -1},
        {"undo_hours": "24"},
        {"idle_io": 1},
        {"bandwidth_bytes_sec": 0},
        {"path_b64": "not base64!"},
        {"dev": "1"},
        {"chain": [{}]},
        {"chain": {}},
        {"reserve": {"percent": 101}},
        {"others_bytes": {"here": {"other": -1}}},
        {"others_bytes": {"elsewhere": {"other": "1"}}},
        {"others_bytes": {"other": 1}},
        {"others_bytes": 5},
        {"reserve": {"share": 5}},
        {"virtual_size": True},
        {"format": None},
    ],
    ids=str,
)
def test_options_that_are_unknown_or_of_the_wrong_type(image: Path, change: dict[str, Any]) -> None:
    answer = ask("reclaim", {**reclaim_args(image), **change})
    assert answer["code"] == "invalid", answer
    assert leftovers(image.parent) == set()


def test_zstd_for_an_image_that_old_programs_must_read(tmp_path: Path) -> None:
    path = make_image(tmp_path / "old.qcow2", options="compat=0.10")
    refused(reclaim_args(path, compression="zstd"), "invalid")


def on_ready(image: Path, change: Callable[[], object]) -> dict[str, Any]:
    """What the agent answers where something changes in the moment before it may swap."""
    with at_ready("reclaim", reclaim_args(image)) as agent:
        change()
        return agent.go()


def test_what_changes_in_the_last_moment_is_seen(image: Path) -> None:
    content = image.read_bytes()

    def exchange() -> None:
        (image.parent / "other").write_bytes(content)
        (image.parent / "other").replace(image)

    changes: dict[str, Callable[[], object]] = {
        "touched": lambda: os.utime(image),
        "written to": lambda: write(image, 0x99, "0", "64k"),
        "owner": lambda: os.chown(image, 5, 5),
        "linked": lambda: os.link(image, image.parent / "second"),
        "exchanged": exchange,
    }
    for what, change in changes.items():
        answer = on_ready(image, change)
        assert answer.get("code") == "stale_plan", what
        assert leftovers(image.parent) == set(), what
        (image.parent / "second").unlink(missing_ok=True)


def test_a_guest_that_runs_when_the_swap_should_happen_wins(image: Path) -> None:
    with at_ready("reclaim", reclaim_args(image)) as agent, Writer(image):
        answer = agent.go()
    assert answer.get("code") == "image_in_use", answer
    assert leftovers(image.parent) == set()


def test_a_controller_that_does_not_say_go_gets_no_swap(image: Path) -> None:
    inode = image.stat().st_ino
    with at_ready("reclaim", reclaim_args(image), generation=7) as agent:
        agent.say("go", generation=6)
        assert agent.answer()["code"] == "no_go"
    assert image.stat().st_ino == inode
    assert leftovers(image.parent) == set()


def test_two_agents_with_the_same_job_do_not_work_at_once(image: Path) -> None:
    with at_ready("reclaim", reclaim_args(image), generation=2) as first:
        for generation in (1, 2, 3):
            assert ask("reclaim", reclaim_args(image), generation=generation)["code"] == "busy"
        first.say("go", generation=2)
        assert first.answer()["swapped"]


@pytest.mark.parametrize("generation", [1, 2])
def test_an_older_run_of_a_job_that_was_claimed_again(image: Path, generation: int) -> None:
    with at_ready("reclaim", reclaim_args(image), generation=2) as first:
        first.process.kill()
    assert ask("reclaim", reclaim_args(image), generation=generation)["code"] == "stale_plan"
    assert ask("reclaim", reclaim_args(image), generation=3)["swapped"]
