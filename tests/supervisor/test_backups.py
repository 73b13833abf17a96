"""A dashboard that moves: what `backup` writes, `restore` brings back, whole or not at all."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from images.selectors.undo_copies import kept_on_hosts
from storage_admin.supervisor import backups
from storage_admin.supervisor.errors import SetupError
from tests.factories import ImageFactory, JobFactory

ROOT = Path(__file__).resolve().parents[2]
SEAL = "from storage_admin import sealing; print(sealing.lock('the key of a host').decode())"
OPEN = "from storage_admin import sealing; import sys; print(sealing.unlock(sys.argv[1].encode()))"


def manage(data_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    foreign = {"DATABASE_URL", "SECRET_KEY", "STORAGE_ADMIN_SECRETS_KEY", "DJANGO_SETTINGS_MODULE"}
    env = {name: value for name, value in os.environ.items() if name not in foreign}
    env["STORAGE_ADMIN_DATA_DIR"] = str(data_dir)
    argv = [sys.executable, str(ROOT / "manage.py"), *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.services
def test_what_is_restored_elsewhere_has_rows_and_can_read_the_secrets(tmp_path: Path) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "saved.tar.gz"
    assert manage(old, "migrate", "-v", "0").returncode == 0
    assert manage(old, "create_token", "kept", "--role", "viewer").returncode == 0
    sealed = manage(old, "shell", "-v", "0", "-c", SEAL).stdout.strip()
    assert sealed
    done = manage(old, "backup", str(file))
    assert (done.returncode, file.stat().st_mode & 0o777) == (0, 0o600), done.stderr
    with tarfile.open(file) as archive:
        assert sorted(archive.getnames()) == ["db.sqlite3", "manifest.json", "secret_key", "secrets.key"]
    assert manage(old, "backup", str(file)).returncode == 1, "no backup is written over"

    done = manage(new, "restore", str(file))
    assert done.returncode == 0, done.stderr
    for name in ("secret_key", "secrets.key"):
        assert (new / name).read_bytes() == (old / name).read_bytes()
        assert (new / name).stat().st_mode & 0o777 == 0o600
    look = "from storage_admin.accounts.models import Token as T; print(*T.objects.values_list('name', flat=True))"
    assert manage(new, "shell", "-v", "0", "-c", look).stdout.split() == ["kept"]
    opened = manage(new, "shell", "-v", "0", "-c", OPEN.replace("sys.argv[1]", repr(sealed)))
    assert opened.stdout.strip() == "the key of a host", opened.stderr
    assert manage(new, "restore", str(file)).returncode == 1, "no database is written over"


def saved(folder: Path) -> Path:
    (folder / "secrets.key").write_bytes(b"key")
    backups.write(folder / "saved", folder, None, [{"host": "h", "path": "/p/.sa-1.orig", "bytes": 7}])
    return folder / "saved"


def test_a_backup_without_a_database_has_the_keys_and_the_list(tmp_path: Path) -> None:
    file, new = saved(tmp_path), tmp_path / "new"
    new.mkdir()
    manifest = backups.read(file, new)
    assert (manifest["database"], manifest["undo_copies"][0]["bytes"]) == ("postgresql", 7)
    assert [(one.name, one.read_bytes()) for one in new.iterdir()] == [("secrets.key", b"key")]


def test_what_is_cut_off_changed_or_something_else_is_refused_and_nothing_is_restored(tmp_path: Path) -> None:
    file, new = saved(tmp_path), tmp_path / "new"
    new.mkdir()
    whole = file.read_bytes()
    for number, content in enumerate((whole[:-40], whole[:200], b"", b"text" * 1000)):
        bad = tmp_path / f"bad{number}"
        bad.write_bytes(content)
        with pytest.raises(SetupError):
            backups.read(bad, new)
    other = tmp_path / "other"
    with tarfile.open(file) as archive:
        archive.extractall(other)
    (other / "secrets.key").write_bytes(b"yek")
    with tarfile.open(tmp_path / "changed", "w:gz") as archive:
        for one in other.iterdir():
            archive.add(one, one.name)
    with pytest.raises(SetupError, match="damaged"):
        backups.read(tmp_path / "changed", new)
    assert list(new.iterdir()) == []


@pytest.mark.django_db
def test_it_lists_the_undo_copies_that_stay_on_hosts() -> None:
    image = ImageFactory.create()
    job = JobFactory.create(target=image, state="succeeded", undo_state="available", undo_bytes=4096)
    JobFactory.create(target=image, state="succeeded", undo_state="expired", undo_bytes=4096)
    folder = os.fsdecode(bytes(image.path_bytes)).rpartition("/")[0]
    assert kept_on_hosts() == [{"host": image.host.name, "path": f"{folder}/.sa-{job.uid}.orig", "bytes": 4096}]
