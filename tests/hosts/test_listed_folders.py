"""Which folders an admin can register, and who may have one listed that root has not."""

import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client

from images.models import Image
from storage_admin.accounts.models import Actor, AuditEntry, ForbiddenError, Role
from storage_admin.agent.folders import image_folders
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.hosts import services
from storage_admin.hosts.models import Host, StoragePool
from tests.factories import HostFactory, TokenFactory, UserFactory
from tests.harness.filesystems import new_folder
from tests.working import ADMIN, create, digests, fails_as, image_at, refused_as, reread, scan, scanned_machine, work

pytestmark = pytest.mark.django_db
LIMITED = Actor("lisa", Role.ADMIN, hosts=frozenset({"local"}))
BACKEND = "django.contrib.auth.backends.ModelBackend"

#: What an admin of one host once registered to become root with.
WAYS_IN = [
    "/", "/etc", "/etc/cron.d", "/usr/lib/python3", "/root", "/root/.ssh", "/var/lib", "/var/lib/dpkg",
    "/var/lib/redis", "/var/lib/postgresql", "/var/log", "/var/spool/cron", "/run", "/run/systemd/system", "/boot",
    "/dev/shm", "/proc/self", "/sys/kernel", "/home", "/srv", "/var/www",
]  # fmt: skip


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of this test alone; it is empty."""
    path = tmp_path / "etc" / "image-folders"
    path.parent.mkdir()
    path.write_text("")
    monkeypatch.setenv(image_folders.VARIABLE, str(path))
    return path


@pytest.fixture
def host() -> Host:
    return HostFactory.create(slug="local")


def own_folders() -> list[str]:
    data = Path(settings.DATA_DIR)
    return [str(one) for one in (settings.BASE_DIR, settings.BASE_DIR / "images", data, data.parent, sys.prefix)]


def refused(actor: Actor, host: Host, path: str) -> str:
    with pytest.raises((InvalidError, RefusedError)) as error:
        services.register_folder(actor, host, path)
    return getattr(error.value, "code", "invalid")


def test_an_admin_of_one_host_registers_no_way_to_become_root_there(
    lists: Path, host: Host, client: Client, tmp_path: Path
) -> None:
    Path(settings.DATA_DIR).mkdir(parents=True, exist_ok=True)
    mine = new_folder(tmp_path / "some")
    ways = [*WAYS_IN, *own_folders(), str(mine)]
    lists.write_text("/\n")  # not even where root lists everything
    assert {path: refused(LIMITED, host, path) for path in ways[:-1]} == dict.fromkeys(ways[:-1], "invalid")
    lists.write_text("")
    user = UserFactory.create(username="lisa", role="admin", hosts=["local"])
    TokenFactory.create(role="admin", hosts=["local"], secret="x")
    client.force_login(user, BACKEND)
    for path in ways:
        for more in ({}, {"add_to_list": "on"}):
            page = client.post(f"/hosts/{host.pk}/folders/", {"path": path, **more})
            assert page.status_code in {400, 403}, path
        answer = Client().post(
            "/api/v1/pools/",
            {"host": "local", "path": path},
            content_type="application/json",
            headers={"Authorization": "Bearer x"},
        )
        assert (answer.status_code, answer.json()["code"]) in {(400, "invalid"), (409, "folder_not_listed")}, path
    assert not StoragePool.objects.exists()
    assert lists.read_text() == ""


def test_the_refusal_has_the_line_that_root_has_to_run(lists: Path, host: Host, tmp_path: Path) -> None:
    new = new_folder(tmp_path / "it's new")
    with fails_as(RefusedError, "folder_not_listed") as error:
        services.register_folder(LIMITED, host, str(new))
    line = error.value.detail.partition("run there: ")[2]
    here = line.replace("/etc/storage-admin/image-folders", str(lists)).replace("/etc/storage-admin", str(lists.parent))
    subprocess.run(["sh", "-c", here], check=True)
    assert services.register_folder(LIMITED, host, str(new)).path == str(new)


def test_only_an_admin_of_all_hosts_has_a_folder_listed(lists: Path, host: Host, tmp_path: Path) -> None:
    new = new_folder(tmp_path / "new")
    with pytest.raises(ForbiddenError):
        services.register_folder(LIMITED, host, str(new), add_to_list=True)
    assert lists.read_text() == ""
    assert refused(ADMIN, host, str(new)) == "folder_not_listed"
    pool = services.register_folder(ADMIN, host, str(new), add_to_list=True)
    assert pool.root is not None
    lines = lists.read_text().splitlines()
    assert str(new) in lines
    assert {f"!{Path(one).resolve()}" for one in (settings.BASE_DIR, settings.DATA_DIR)} <= set(lines)
    assert (AuditEntry.objects.get(what="pool registered").after or {})["listed"] == str(new)


def test_a_key_that_can_only_run_the_agent_lists_nothing(lists: Path) -> None:
    host = HostFactory.create(kind="ssh", transport="forced", address="192.0.2.1")
    from storage_admin.hosts import transport  # noqa: PLC0415

    with pytest.raises(RefusedError, match="only run the agent"), transport.agent_command(host, image_folders.ALLOW):
        pass


@pytest.mark.qemu
@pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")
class TestAnotherFolder:
    @pytest.fixture
    def pool(self, tmp_path: Path) -> StoragePool:
        (tmp_path / "images").mkdir()
        create(tmp_path / "images" / "vm.qcow2")
        host = scanned_machine(tmp_path / "images")
        return host.pools.get()

    def exchange(self, tmp_path: Path) -> Path:
        images = tmp_path / "images"
        images.rename(tmp_path / "before")
        images.mkdir()
        create(images / "vm.qcow2")
        return images

    def test_is_a_state_of_the_pool_until_an_admin_confirms_it(self, pool: StoragePool, tmp_path: Path) -> None:
        before = Image.objects.get()
        images = self.exchange(tmp_path)
        scan(pool.host)
        assert reread(pool).state == "changed"
        kept = image_at(images / "vm.qcow2")
        assert (kept.pk, kept.inode, kept.missing_since) == (before.pk, before.inode, None)
        services.confirm_folder(LIMITED, pool)
        scan(pool.host)
        assert reread(pool).state == "ok"
        assert image_at(images / "vm.qcow2").inode != before.inode

    def test_is_not_worked_in(self, pool: StoragePool, tmp_path: Path) -> None:
        image = Image.objects.get()
        images = self.exchange(tmp_path)
        held = digests(images)
        job = work("analyze", image.pk, ADMIN)
        assert (job.state, job.error_code) == ("failed", "pool_changed")
        scan(pool.host)
        assert refused_as(work, "reclaim", image.pk, ADMIN, method="copy") == "pool_changed"
        assert digests(images) == held

    def test_a_folder_that_root_lists_no_more_is_left_alone(
        self, pool: StoragePool, tmp_path: Path, lists: Path
    ) -> None:
        image = Image.objects.get()
        scan(pool.host)
        assert (reread(pool).state, pool.root is not None) == ("not_listed", True)
        assert image_at(tmp_path / "images" / "vm.qcow2").missing_since is None
        assert refused_as(work, "reclaim", image.pk, ADMIN, method="copy") == "folder_not_listed"
        services.confirm_folder(ADMIN, pool, add_to_list=True)
        scan(pool.host)
        assert reread(pool).state == "ok"
