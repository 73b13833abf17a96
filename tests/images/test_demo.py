import json
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from images.demo import make
from images.demo import pool as demo_pool
from images.demo.recipes import ODD_NAME, RECIPES, DemoError
from images.models import ImageUse
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from tests.factories import GuestDiskFactory, ImageFactory, JobFactory
from tests.working import info

NAMES = {name for recipe in RECIPES for name in recipe.names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished demo, which tests only look at."""
    path = tmp_path_factory.mktemp("pools") / "demo"
    make.make(path)
    return path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with four of its images, which are made in a second."""
    chosen = {"debian-12-base.qcow2", "web-02.qcow2", "mail.qcow2", "cycle-a.qcow2"}
    monkeypatch.setattr(make, "RECIPES", tuple(recipe for recipe in RECIPES if chosen & set(recipe.names)))


def marked(tmp_path: Path, *names: str) -> Path:
    """A folder as the demo leaves it, with small stand-ins for the images."""
    path = tmp_path / "demo"
    path.mkdir()
    for name in names:
        (path / name).write_text("made by the demo")
    (path / make.MARKER).write_text(json.dumps({"files": list(names)}))
    return path


@pytest.mark.qemu
class TestImages:
    def test_there_are_about_twenty_of_less_than_400_mib_together(self, folder: Path) -> None:
        assert {path.name for path in folder.iterdir()} == NAMES | {make.MARKER}
        assert 20 <= len(NAMES) <= 30
        assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 400 * 1024**2

    def test_a_chain_is_four_deep_with_relative_bases_of_declared_format(self, folder: Path) -> None:
        chain, name = [], "web-02-hotfix.qcow2"
        while name:
            facts = info(folder / name)
            chain.append(name)
            name = facts.get("backing-filename", "")
            assert not name or facts["backing-filename-format"] == "qcow2"
        assert chain == ["web-02-hotfix.qcow2", "web-02-staging.qcow2", "web-02.qcow2", "debian-12-base.qcow2"]

    def test_one_base_is_gone_and_two_images_are_each_others_base(self, folder: Path) -> None:
        assert info(folder / "shop.qcow2")["backing-filename"] == "template-deleted.qcow2"
        assert not (folder / "template-deleted.qcow2").exists()
        assert info(folder / "cycle-a.qcow2")["backing-filename"] == "cycle-b.qcow2"
        assert info(folder / "cycle-b.qcow2")["backing-filename"] == "cycle-a.qcow2"

    def test_formats_and_features_are_what_their_names_say(self, folder: Path) -> None:
        specific = {
            name: info(folder / name).get("format-specific", {}).get("data", {}) for name in NAMES - {"damaged.qcow2"}
        }
        assert specific["appliance.vmdk"]["create-type"] == "monolithicSparse"
        assert specific["appliance-export.vmdk"]["create-type"] == "streamOptimized"
        assert specific["point-of-sale.vmdk"]["create-type"] == "monolithicFlat"
        assert info(folder / "desktop.vdi")["format"] == "vdi"
        assert info(folder / "legacy-server.vhd")["format"] == "vpc"
        assert specific["archive-zstd.qcow2"]["compression-type"] == "zstd"
        assert specific["ci-runner.qcow2"]["extended-l2"] is True
        assert specific["payroll-encrypted.qcow2"]["encrypt"]["format"] == "luks"
        assert info(folder / "media-2M-clusters.qcow2")["cluster-size"] == 2 * 1024**2
        assert [snapshot["name"] for snapshot in info(folder / "build-server.qcow2")["snapshots"]] == [
            "before-upgrade", "after-upgrade", "nightly",
        ]  # fmt: skip
        assert info(folder / "uploaded-by-customer.img")["format"] == "qcow2"
        assert info(folder / ODD_NAME)["format"] == "qcow2"

    def test_the_damaged_one_is_damaged_and_all_other_qcow2_are_clean(self, folder: Path) -> None:
        broken = {"damaged.qcow2", "shop.qcow2", "cycle-a.qcow2", "cycle-b.qcow2", "payroll-encrypted.qcow2"}
        for name in sorted(name for name in NAMES - broken if name.endswith(".qcow2")):
            assert subprocess.run(["qemu-img", "check", "-q", "-f", "qcow2", str(folder / name)]).returncode == 0, name
        assert subprocess.run(["qemu-img", "info", str(folder / "damaged.qcow2")], capture_output=True).returncode != 0

    def test_compressing_the_mail_server_wins_more_than_four_fifths(self, folder: Path, tmp_path: Path) -> None:
        before = (folder / "mail.qcow2").stat().st_blocks
        small = tmp_path / "small.qcow2"
        subprocess.run(["qemu-img", "convert", "-c", "-O", "qcow2", str(folder / "mail.qcow2"), str(small)], check=True)
        assert small.stat().st_blocks < before / 5

    def test_the_same_bytes_are_made_each_time(self, folder: Path, tmp_path: Path) -> None:
        make.make(tmp_path / "again")
        for name in ("mail.qcow2", "debian-12-base.qcow2", "web-02-hotfix.qcow2", "database.raw"):
            again = ["qemu-img", "compare", "-q", str(folder / name), str(tmp_path / "again" / name)]
            assert subprocess.run(again).returncode == 0, name

    def test_a_second_run_makes_only_what_is_missing(self, few: None, tmp_path: Path) -> None:
        path = tmp_path / "demo"
        make.make(path)
        kept = (path / "mail.qcow2").stat()
        (path / "web-02.qcow2").unlink()
        (path / "cycle-b.qcow2").unlink()
        again = make.make(path)
        assert set(again.made) == {"web-02.qcow2", "cycle-b.qcow2"}
        assert (path / "mail.qcow2").stat() == kept
        assert info(path / "web-02.qcow2")["backing-filename"] == "debian-12-base.qcow2"
        assert not (path / make.WORKSHOP).exists()


class TestFoldersOfOthers:
    def test_a_folder_with_anything_in_it_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine.qcow2").write_text("precious")
        with pytest.raises(DemoError, match="did not make"):
            make.make(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine.qcow2"]

    def test_a_file_instead_of_a_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("precious")
        with pytest.raises(DemoError, match="is a file"):
            make.make(tmp_path / "file")
        assert (tmp_path / "file").read_text() == "precious"

    @pytest.mark.qemu
    def test_a_file_of_somebody_with_a_name_of_ours_is_neither_replaced_nor_deleted(
        self, few: None, tmp_path: Path
    ) -> None:
        path = marked(tmp_path)
        (path / "mail.qcow2").write_text("precious")
        assert make.make(path).foreign == ("mail.qcow2",)
        assert make.remove(path).foreign == ("mail.qcow2",)
        assert [left.name for left in path.iterdir()] == ["mail.qcow2"]
        assert (path / "mail.qcow2").read_text() == "precious"

    def test_removing_takes_what_the_marker_names_and_the_undo_copies(self, tmp_path: Path) -> None:
        path = marked(tmp_path, "mail.qcow2")
        (path / ".sa-1f.orig").write_text("the original of mail.qcow2")
        assert make.remove(path).count == 2
        assert not path.exists()

    def test_removing_leaves_undo_copies_that_may_belong_to_files_of_others(self, tmp_path: Path) -> None:
        path = marked(tmp_path, "mail.qcow2")
        (path / ".sa-1f.orig").write_text("precious")
        (path / "mine.qcow2").write_text("precious")
        assert make.remove(path).foreign == ("mine.qcow2",)
        assert {left.name for left in path.iterdir()} == {"mine.qcow2", ".sa-1f.orig"}

    def test_removing_without_a_marker_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "mail.qcow2").write_text("precious")
        with pytest.raises(DemoError, match="so nothing is removed"):
            make.remove(tmp_path)
        assert (tmp_path / "mail.qcow2").exists()

    @pytest.mark.parametrize("text", ["", "[]", '{"files": 5}', '{"files": [5]}'])
    def test_a_marker_that_somebody_changed_is_not_believed(self, tmp_path: Path, text: str) -> None:
        path = marked(tmp_path, "mail.qcow2")
        (path / make.MARKER).write_text(text)
        for call in (make.make, make.remove):
            with pytest.raises(DemoError, match="nothing in the folder is"):
                call(path)
        assert (path / "mail.qcow2").exists()

    def test_a_marker_cannot_have_other_files_deleted(self, tmp_path: Path) -> None:
        path = marked(tmp_path, "mail.qcow2")
        (tmp_path / "precious").write_text("precious")
        (path / make.MARKER).write_text(json.dumps({"files": ["mail.qcow2", "../precious"]}))
        make.remove(path)
        assert (tmp_path / "precious").exists()


@pytest.mark.django_db
class TestPool:
    def test_the_folder_becomes_a_pool_of_this_machine_once(self, tmp_path: Path) -> None:
        first = demo_pool.register(SYSTEM, tmp_path)
        assert demo_pool.register(SYSTEM, tmp_path) == first
        assert (first.source, first.path, first.host.slug) == ("demo", str(tmp_path), "local")

    def test_no_scan_is_queued_where_no_worker_would_do_it(self, tmp_path: Path) -> None:
        assert demo_pool.scan_if_a_worker_is_up(SYSTEM, demo_pool.register(SYSTEM, tmp_path)) is None
        assert not Job.objects.exists()

    def test_forgetting_it_takes_pool_and_rows_and_marks_undo_copies_discarded(self, tmp_path: Path) -> None:
        pool = demo_pool.register(SYSTEM, tmp_path)
        image = ImageFactory.create(pool=pool, host=pool.host)
        job = JobFactory.create(kind="reclaim", target=image, state="succeeded", undo_state="available", undo_bytes=5)
        demo_pool.forget(SYSTEM, tmp_path)
        job.refresh_from_db()
        assert not StoragePool.objects.filter(pk=pool.pk).exists()
        assert (job.undo_state, job.undo_bytes) == ("discarded", 0)

    def test_images_of_a_guest_are_not_taken_away(self, tmp_path: Path) -> None:
        path = marked(tmp_path, "mail.qcow2")
        pool = demo_pool.register(SYSTEM, path)
        image = ImageFactory.create(pool=pool, host=pool.host, name="mail.qcow2")
        ImageUse.objects.create(image=image, disk=GuestDiskFactory.create())
        with pytest.raises(CommandError, match=r"mail\.qcow2 is used by a guest"):
            call_command("demo", "--remove", path=path)
        assert (path / "mail.qcow2").exists()
        assert StoragePool.objects.filter(pk=pool.pk).exists()

    @pytest.mark.qemu
    def test_the_command_makes_shows_and_removes(
        self, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: Any
    ) -> None:
        settings.DATA_DIR = tmp_path / "data"
        path = tmp_path / "demo"
        call_command("demo", path=path, stdout=StringIO())
        said = capsys.readouterr().out
        assert "5 files made, 0 were there" in said
        # Typed as it stands, it starts on the same data.
        assert f"STORAGE_ADMIN_DATA_DIR={settings.DATA_DIR} make run" in said
        call_command("demo", path=path)
        assert "0 files made, 5 were there" in capsys.readouterr().out
        call_command("demo", "--remove", path=path)
        assert not path.exists()
        assert not StoragePool.objects.filter(source="demo").exists()
