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
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.chain import Chain, Planned
from tests.agent.harness import ask, at_ready, leftovers, link, make_image, qemu_img, reclaim_args, rewrite_args, write
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
    target = {"path_b64": b64(os.fsencode(overlay.with_suffix(".raw"))), "format": "raw", "replaces": replaces}
    target["pool_path_b64"] = b64(os.fsencode(overlay.parent))
    assert ask("convert", rewrite_args(overlay, base_of(overlay), target=target)).get("code") == "foreign_base"
    assert leftovers(overlay.parent) == set()


def test_an_overlay_stays_an_overlay_when_it_is_reclaimed(overlay: Path) -> None:
    assert ask("reclaim", reclaim_args(overlay, base_of(overlay), method="copy")).get("method") == "copy"


def test_an_admin_may_allow_it(overlay: Path) -> None:
    assert flatten(overlay, for_all=True).get("swapped")


def allowed(overlay: Path) -> None:
    assert flatten(overlay).get("swapped")


def refused(overlay: Path) -> None:
    assert flatten(overlay).get("code") == "foreign_base"


def test_a_base_of_the_same_owner_is_flattened(overlay: Path) -> None:
    own(base_of(overlay), ALICE, 0o600)
    base_of(overlay).parent.chmod(0o700)
    allowed(overlay)


def test_an_overlay_of_root_is_flattened(overlay: Path) -> None:
    own(overlay, 0, 0o644)
    allowed(overlay)


def test_a_base_that_everybody_may_read_is_flattened(overlay: Path) -> None:
    own(base_of(overlay), BOB, 0o644)
    allowed(overlay)


def test_a_base_that_the_group_may_read_is_flattened(overlay: Path) -> None:
    own(overlay, ALICE, 0o640, GROUP)
    own(base_of(overlay), BOB, 0o640, GROUP)
    allowed(overlay)


def test_a_group_that_the_folder_gave_to_the_overlay_proves_nothing(overlay: Path) -> None:
    own(overlay, ALICE, 0o640, GROUP)
    own(overlay.parent, 0, 0o2755, GROUP)
    own(base_of(overlay), BOB, 0o640, GROUP)
    refused(overlay)


def test_a_base_of_another_group_is_refused(overlay: Path) -> None:
    own(base_of(overlay), BOB, 0o640)
    refused(overlay)


def test_a_base_in_a_folder_that_the_owner_may_not_pass_is_refused(overlay: Path) -> None:
    own(base_of(overlay), BOB, 0o644)
    own(base_of(overlay).parent, BOB, 0o700)
    refused(overlay)


def test_an_acl_that_names_the_owner_allows_it(overlay: Path) -> None:
    subprocess.run(["setfacl", "-m", f"u:{ALICE}:r", base_of(overlay)], check=True)
    allowed(overlay)


def test_an_acl_that_keeps_the_owner_out_refuses_it(overlay: Path) -> None:
    own(base_of(overlay), BOB, 0o644)
    subprocess.run(["setfacl", "-m", f"u:{ALICE}:-", base_of(overlay)], check=True)
    refused(overlay)


def test_an_acl_whose_mask_takes_the_right_away_refuses_it(overlay: Path) -> None:
    subprocess.run(["setfacl", "-m", f"u:{ALICE}:r,m::-", base_of(overlay)], check=True)
    refused(overlay)


def test_roots_overlay_in_somebodys_folder_gives_him_nothing(overlay: Path) -> None:
    """He may put a link to any image under the name that the overlay has for its base."""
    own(overlay, 0, 0o644)
    own(overlay.parent, ALICE, 0o755)
    refused(overlay)


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
    target = {"path_b64": b64(os.fsencode(folder / "new.raw")), "pool_path_b64": b64(os.fsencode(folder))}
    return rewrite_args(overlay, base_of(overlay), target={**target, "format": "raw", "replaces": False})


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
        with pytest.raises(RefusedError) as refused:
            volume_chains.refuse_foreign(chain.image, chain.ancestors)
    assert refused.value.code == "pool_changed"


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
