"""The Debian package: built, installed, started, upgraded, removed and purged in clean trees of Debian 12 and 13."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage_admin
from tests.harness.debian_trees import Booted, Tree

pytestmark = [pytest.mark.services, pytest.mark.night]

ROOT = Path(__file__).resolve().parents[2]
BUILT_WITH = (
    "python3-venv", "python3-dev", "gcc", "pkg-config", "libvirt-dev", "libldap2-dev", "libsasl2-dev", "dpkg-dev",
    "ca-certificates",
)  # fmt: skip
HIGHER = "9.9.9"
ETC = "etc/storage-admin/environment"
ASK = "import json, urllib.request as r; print(json.load(r.urlopen('http://127.0.0.1:8123/healthz'))['worker'])"
WORKS = f'/usr/lib/storage-admin/bin/python -c "{ASK}" | grep True'
UP = "storage-admin-up.service"
PARTS = tuple(f"storage-admin-{part}.service" for part in ("web", "worker", "scheduler"))


@pytest.fixture(params=["bookworm", "trixie"])
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that does not stay after a failure, as pytest's own do: a tree is large."""
    with tempfile.TemporaryDirectory(prefix="deb-") as name:
        Path(name).chmod(0o755)  # apt's own user reads there
        yield Path(name)


@pytest.fixture
def package(suite: str, folder: Path) -> Path:
    """The package as `setup/deb` makes it in a tree of that Debian."""
    tree = Tree(folder / "build", suite, BUILT_WITH)
    source = tree.folder / "source"
    for name in ("setup", "docs", "requirements"):
        shutil.copytree(ROOT / name, source / name)
    shutil.copy(ROOT / "CHANGELOG.md", source)
    subprocess.run([sys.executable, ROOT / "setup/wheel", source], check=True)
    tree.run("/source/setup/deb /source/*.whl /source")
    (package,) = source.glob("*.deb")
    kept = shutil.move(package, folder)
    shutil.rmtree(tree.folder)
    return Path(kept)


def higher(package: Path, folder: Path) -> Path:
    """The same package of a higher version, whose file in /etc has changed as well."""
    content = folder / "higher"
    subprocess.run(["dpkg-deb", "--raw-extract", package, content], check=True)
    control = content / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^(Version: )[^+]+", rf"\g<1>{HIGHER}", control.read_text()))
    (code,) = content.glob("usr/lib/storage-admin/lib/python3.*/site-packages/storage_admin/__init__.py")
    code.write_text(code.read_text().replace(storage_admin.__version__, HIGHER))
    with (content / ETC).open("a") as file:
        file.write("# New in this version.\n")
    made = folder / "higher.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", content, made], check=True)
    shutil.rmtree(content)
    return made


def test_it_is_installed_started_upgraded_removed_and_purged(suite: str, package: Path, folder: Path) -> None:
    tree = Tree(folder / "clean", suite, ["systemd-sysv"])
    before = tree.named("storage-admin")
    assert package.stat().st_size < 40 << 20
    install(tree, package)
    shutil.copy(higher(package, folder), tree.folder / "root")
    with Booted(tree, folder / "log") as machine:
        runs_by_itself(machine)
        is_upgraded(machine)
        runs_in_parts_and_stays_so(machine)
        is_removed(tree, machine)
        machine.run("apt-get -q -y purge storage-admin")
        assert machine.run("getent passwd storage-admin || echo gone") == "gone\n"
        assert machine.run("systemctl list-units --failed --no-legend 'storage-admin*'") == ""
    (tree.folder / "root/storage-admin.deb").unlink()
    assert tree.named("storage-admin") == before == []


def install(tree: Tree, package: Path) -> None:
    """With its dependencies, where no systemd runs; its command works there."""
    shutil.copy(package, tree.folder / "root/storage-admin.deb")
    tree.run("apt-get -q update && apt-get -q -y install --no-install-recommends /root/storage-admin.deb")
    assert tree.run("storage-admin --version") == f"{storage_admin.__version__}\n"
    tree.run("storage-admin check")
    tree.run("storage-admin migrate -v 0")
    environment = tree.folder / ETC
    assert environment.stat().st_mode & 0o777 == 0o600
    with environment.open("a") as file:
        file.write("STORAGE_ADMIN_BIND=127.0.0.1:8123\n")
    # A command that somebody types reads that file as well.
    ask = "storage-admin shell --no-imports -c 'from django.conf import settings as s; print(s.BIND, s.DATA_DIR)'"
    assert tree.run(ask) == "127.0.0.1:8123 /var/lib/storage-admin\n"


def runs_by_itself(machine: Booted) -> None:
    """Enabled and started, as root, in a folder that is for root alone."""
    machine.wait_until(WORKS)
    assert machine.run(f"systemctl is-enabled {UP}") == "enabled\n"
    assert machine.run("stat -c '%a %U' /var/lib/storage-admin") == "700 root\n"
    machine.run("storage-admin create_token kept --role admin")


def is_upgraded(machine: Booted) -> None:
    """It runs anew, of the new version, with its data and the file in /etc as the admin has changed it."""
    before = machine.run(f"systemctl show --value -p MainPID {UP}; cat /{ETC}").splitlines()
    machine.run("apt-get -q -y -o Dpkg::Options::=--force-confdef install /root/higher.deb")
    after = machine.run(f"systemctl show --value -p MainPID {UP}; cat /{ETC}").splitlines()
    assert after[0] not in {before[0], "0"}
    assert after[1:] == before[1:]
    assert machine.run("storage-admin --version") == f"{HIGHER}\n"
    machine.wait_until(WORKS)
    assert tokens(machine) == "1\n"


def tokens(machine: Booted) -> str:
    return machine.run(
        "storage-admin shell --no-imports -c 'from storage_admin.accounts.models import Token; "
        'print(Token.objects.filter(name="kept").count())\''
    )


def runs_in_parts_and_stays_so(machine: Booted) -> None:
    """Web server, worker and scheduler instead of it, on the system's Redis; an upgrade leaves it at that."""
    machine.run(f"echo REDIS_URL=redis://127.0.0.1:6379/0 >>/{ETC}")
    machine.run(f"systemctl disable -q --now {UP} && systemctl enable -q --now storage-admin.target redis-server")
    in_parts(machine)
    machine.run("apt-get -q -y install --reinstall /root/higher.deb")
    in_parts(machine)


def in_parts(machine: Booted) -> None:
    machine.wait_until(f"systemctl is-active {' '.join(PARTS)} && {WORKS}")
    assert machine.run(f"systemctl is-enabled {UP} || true") == "disabled\n"
    assert machine.run(f"systemctl is-active {UP} || true") == "inactive\n"
    assert machine.run("stat -c '%a %U' /var/lib/storage-admin /var/lib/storage-admin/*.sqlite3").split()[:4] == [
        "700", "storage-admin", "600", "storage-admin",
    ]  # fmt: skip
    assert tokens(machine) == "1\n"


def is_removed(tree: Tree, machine: Booted) -> None:
    """Nothing of it runs; data and configuration stay."""
    machine.run("apt-get -q -y remove storage-admin")
    assert machine.run("systemctl list-units --no-legend 'storage-admin*'") == ""
    assert not (tree.folder / "usr/lib/storage-admin").exists()
    assert not (tree.folder / "usr/bin/storage-admin").is_symlink()
    assert (tree.folder / ETC).exists()
    assert (tree.folder / "var/lib/storage-admin/db.sqlite3").stat().st_size > 0
