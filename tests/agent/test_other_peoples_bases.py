"""What an overlay's owner may not read does not become his by a job that shortens the chain."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from storage_admin.agent.bench import boot
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.chain import Chain, Planned
from tests.agent.harness import (
    ask,
    at_ready,
    leftovers,
    link,
    location,
    make_image,
    qemu_img,
    reclaim_args,
    rewrite_args,
    write,
)
from tests.agent.test_boot_steps import STEP, bench_in
from tests.harness.filesystems import new_folder
from tests.working import refused_as

pytestmark = pytest.mark.qemu

ALICE, BOB, GROUP = 61001, 61002, 61003


@pytest.fixture
def overlay() -> Iterator[Path]:
    """An image of one owner, in a pool of its own, that names another one's, which nobody else may read."""
    with TemporaryDirectory() as name:  # pytest's own folders let nobody else pass
        site = Path(name)
        site.chmod(0o755)
        for owner in ("alice", "bob"):
            (site / owner).mkdir()
            (site / owner).chmod(0o755)
        base, top = make_image(site / "bob" / "private.qcow2"), site / "alice" / "mine.qcow2"
        qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", top, "8M")
        write(top, 0x42, "1M", "1M")
        own(base, BOB, 0o600)
        own(top, ALICE, 0o644)
        yield top


def base_of(overlay: Path) -> Path:
    return overlay.parent.parent / "bob" / "private.qcow2"


def own(path: Path, uid: int, mode: int, gid: int | None = None) -> None:
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)


def flatten(overlay: Path, method: str = "rebase", **of_base: Any) -> dict[str, Any]:
    args = reclaim_args(overlay, base_of(overlay), method=method)
    args["chain"][0] |= of_base
    return ask("flatten", args)


@pytest.mark.parametrize("method", ["rebase", "convert"])
def test_a_base_of_somebody_else_is_not_flattened_into_an_overlay(overlay: Path, method: str) -> None:
    assert flatten(overlay, method).get("code") == "foreign_base"
    assert leftovers(overlay.parent) == set()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_base_of_somebody_else_is_not_converted_into_a_copy(overlay: Path, replaces: bool) -> None:
    target = location(overlay.with_suffix(".raw")) | {"format": "raw", "replaces": replaces}
    assert ask("convert", rewrite_args(overlay, base_of(overlay), target=target)).get("code") == "foreign_base"
    assert leftovers(overlay.parent) == set()


def test_an_overlay_stays_an_overlay_when_it_is_reclaimed(overlay: Path) -> None:
    assert ask("reclaim", reclaim_args(overlay, base_of(overlay), method="copy")).get("method") == "copy"


def test_an_admin_may_allow_it(overlay: Path) -> None:
    assert flatten(overlay, for_all=True).get("swapped")


MINE, PRIVATE = "alice/mine.qcow2", "bob/private.qcow2"
#: Whose files and folders are, with which rights, and an ACL of the base, where that lets the base be flattened.
ALLOWED: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "a base of the same owner": ({PRIVATE: (ALICE, 0o600), "bob": (0, 0o700)}, ""),
    "an overlay of root": ({MINE: (0, 0o644)}, ""),
    "a base that everybody may read": ({PRIVATE: (BOB, 0o644)}, ""),
    "a base that the group may read": ({MINE: (ALICE, 0o640, GROUP), PRIVATE: (BOB, 0o640, GROUP)}, ""),
    "an ACL that names the owner": ({}, f"u:{ALICE}:r"),
}
#: And where it does not. To root's overlay in somebody's folder he may put any image, by a link of its base's name.
REFUSED: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "a group that the folder gave to the overlay": (
        {MINE: (ALICE, 0o640, GROUP), "alice": (0, 0o2755, GROUP), PRIVATE: (BOB, 0o640, GROUP)}, "",
    ),
    "a base of another group": ({PRIVATE: (BOB, 0o640)}, ""),
    "a base in a folder that the owner may not pass": ({PRIVATE: (BOB, 0o644), "bob": (BOB, 0o700)}, ""),
    "an ACL that keeps the owner out": ({PRIVATE: (BOB, 0o644)}, f"u:{ALICE}:-"),
    "an ACL whose mask takes the right away": ({}, f"u:{ALICE}:r,m::-"),
    "an overlay of root in somebody's folder": ({MINE: (0, 0o644), "alice": (ALICE, 0o755)}, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", [*ALLOWED, *REFUSED])
def test_a_base_is_flattened_where_the_overlays_owner_may_read_it(overlay: Path, what: str) -> None:
    rights, acl = (ALLOWED | REFUSED)[what]
    for name, (uid, mode, *gid) in rights.items():
        own(overlay.parent.parent / name, uid, mode, *gid)
    if acl:
        subprocess.run(["setfacl", "-m", acl, base_of(overlay)], check=True)
    answer = flatten(overlay)
    assert (answer.get("swapped"), answer.get("code")) == ((True, None) if what in ALLOWED else (None, "foreign_base"))


def test_a_middle_image_of_somebody_else_is_refused_too(overlay: Path) -> None:
    top = overlay.with_name("top.qcow2")
    qemu_img("create", "-q", "-f", "qcow2", "-b", overlay, "-F", "qcow2", top, "8M")
    own(top, ALICE, 0o644)
    args = reclaim_args(top, overlay, base_of(overlay), method="rebase")
    assert ask("flatten", args).get("code") == "foreign_base"
    assert ask("flatten", args | {"keep": 2}).get("swapped")  # it still stands on it, as it did


# Who keeps a folder


def convert_into(folder: Path, overlay: Path) -> dict[str, Any]:
    """The arguments of a conversion beside the image, into another pool."""
    target = location(folder / "new.raw") | {"format": "raw", "replaces": False}
    return rewrite_args(overlay, base_of(overlay), target=target)


def test_roots_overlay_is_not_converted_into_the_folder_of_somebody_who_may_not_read_its_base(overlay: Path) -> None:
    own(overlay, 0, 0o644)
    target = new_folder(overlay.parent.parent / "carol", mode=0o755)
    assert ask("convert", convert_into(target, overlay)).get("code") is None
    (target / "new.raw").unlink()
    os.chown(target, GROUP, GROUP)
    assert ask("convert", convert_into(target, overlay)).get("code") == "foreign_base"
    assert list(target.iterdir()) == []
    own(overlay, 0, 0o600)
    assert ask("convert", convert_into(target, overlay)).get("swapped"), "which he could not read"


def test_who_takes_a_folder_over_while_a_copy_is_made_gets_nothing(overlay: Path) -> None:
    own(overlay, 0, 0o644)
    with at_ready("flatten", reclaim_args(overlay, base_of(overlay), method="rebase")) as agent:
        os.chown(overlay.parent, ALICE, ALICE)
        assert agent.go().get("code") == "foreign_base"
    assert leftovers(overlay.parent) == set()


def test_who_puts_a_link_in_the_place_of_his_folder_is_not_taken_for_the_keeper_of_another(overlay: Path) -> None:
    own(overlay, 0, 0o644)
    own(overlay.parent.parent, ALICE, 0o755)
    args = reclaim_args(overlay, base_of(overlay))
    with contextlib.closing(Chain(Planned.parse(args), [Planned.parse(args["chain"][0])])) as chain:
        overlay.parent.rename(overlay.parent.parent / "kept")
        overlay.parent.symlink_to("/")
        os.chown(overlay.parent, ALICE, ALICE, follow_symlinks=False)
        assert refused_as(volume_chains.refuse_foreign, chain.image, chain.ancestors) == "pool_changed"


def test_guests_are_not_booted_from_what_the_images_owner_may_not_read(overlay: Path) -> None:
    args = reclaim_args(overlay, base_of(overlay))
    fields = {"image": args, "chain": args["chain"], "virtual_bytes": 8 << 20, "image_bytes": 8 << 20}
    with bench_in(overlay.parent.parent) as bench:
        (step,) = boot.parse([STEP | {"kernel": "", "initrd": "", "append": ""} | fields])
        assert isinstance(step, boot.BootStep)
        assert (refused_as(boot.make_source, bench, step.boots), bench.scratch.names()) == ("foreign_base", [])
        own(base_of(overlay), BOB, 0o644)
        args["chain"] = [link(base_of(overlay))]
        (step,) = boot.parse([STEP | {"kernel": "", "initrd": "", "append": ""} | fields | {"chain": args["chain"]}])
        assert isinstance(step, boot.BootStep)
        boot.make_source(bench, step.boots)
        assert bench.scratch.names() == ["source.raw"]
