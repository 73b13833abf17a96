"""One storage by many names: of two real machines the server has the folder itself, the other one mounts it twice."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.models import Image
from images.rewrite import in_use
from images.scan import shared_storages
from images.selectors import overview
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import runner, services
from tests.factories import HostFactory
from tests.machines.lab import ADDRESSES, Machine, machines
from tests.machines.nfs import EXPORTED, MOUNTED, load_agents
from tests.working import ADMIN, image_at, refused_as, register, reread, scan, succeeded, work

pytestmark = [pytest.mark.machines, pytest.mark.django_db]
pytestmark.append(pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve"))

#: By another address and version; and what the second machine exports itself.
AGAIN, OTHER = "/var/lib/vz/again", "/var/lib/vz/other"
SECOND_ADDRESS = "10.9.0.11"
MAKE = "qemu-io -f raw -c 'write -P 97 0 64k' -c 'write -z 64k 960k'"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    with machines() as running:
        server, client = running
        for machine in running:
            load_agents(machine, tmp_path_factory.mktemp("agent"))
            machine.run("mkdir -p /etc/storage-admin; echo /srv/images >/etc/storage-admin/image-folders")
        server.run(f"ip address add {SECOND_ADDRESS}/24 dev eth1; mkdir -p {OTHER}")
        client.run(f"mkdir -p {AGAIN}; mount -t nfs -o vers=4.2 {ADDRESSES[0]}:/images {MOUNTED}")
        client.run(f"mount -t nfs -o vers=3 {SECOND_ADDRESS}:{EXPORTED} {AGAIN}")
        server.run(f"mount -t nfs -o vers=4.2 {ADDRESSES[1]}:/images {OTHER}")
        yield running


@pytest.fixture
def rows(both: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch) -> tuple[Row, Row]:
    """The machines as hosts; the first one's own folder, and what the second one has mounted, are their pools."""
    server = both[0]
    commands = {slug: machine.command("python3 /root/agent.pyz") for slug, machine in zip("sc", both, strict=True)}
    for module in (runner, asking):
        monkeypatch.setattr(module, "agent_command", lambda host, *_: contextlib.nullcontext(commands[host.slug]))
    server.run(f"rm -rf {EXPORTED}/* {EXPORTED}/.sa-*; cd {EXPORTED}; for i in a b; do truncate -s 1M $i.raw; done")
    server.run(f"cd {EXPORTED}; for i in a b; do {MAKE} $i.raw; done; sync")
    hosts = [HostFactory.create(slug=slug, kind="ssh", transport="forced", capabilities={}) for slug in "sc"]
    for host, path in zip([hosts[0], hosts[1], hosts[1]], [EXPORTED, MOUNTED, AGAIN], strict=True):
        register(host, Path(path))
    StoragePool.objects.update(all_hosts_registered=True)
    for host in hosts:
        scan(host)
    return reread(hosts[0]), reread(hosts[1])


def test_the_servers_own_folder_and_two_mounts_of_it_are_one_storage(rows: tuple[Row, Row]) -> None:
    server, client = rows
    own, *mounted = StoragePool.objects.order_by("pk")
    assert {one.shared_key for one in mounted} == {own.shared_key}
    assert [one.network for one in (own, *mounted)] == [True] * 3
    assert [one.mount["version"] for one in (own, *mounted)] == [None, "4.2", "3"]
    assert len({one.mount["inode"] for one in (own, *mounted)}) == 1
    assert [one.may_be for one in (own, *mounted)] == [[]] * 3
    totals = overview(SYSTEM).totals
    assert (Image.objects.count(), totals.images_count) == (6, 2)
    assert (
        abs((totals.capacity_bytes or 0) - (own.capacity_bytes or 0)) < 1 << 20
    )  # each mount rounds by its own blocks
    assert len(shared_storages.shared(server)) == 2
    assert len(shared_storages.shared(client)) == 4


def test_two_servers_from_one_template_with_the_same_numbers_are_two(
    both: tuple[Machine, Machine], rows: tuple[Row, Row]
) -> None:
    both[1].run(f"cd {EXPORTED}; truncate -s 1M c.raw; sync")
    other = register(rows[0], Path(OTHER))
    scan(rows[0])
    own = StoragePool.objects.order_by("pk").first()
    assert own is not None
    assert reread(other).mount["inode"] == own.mount["inode"]
    assert other.shared_key != own.shared_key
    assert all(pair.other.pk != other.pk for pair in shared_storages.shared(rows[1]))
    assert overview(SYSTEM).totals.images_count == 3


def test_what_another_machine_has_open_is_not_rewritten_in_the_servers_own_folder(
    both: tuple[Machine, Machine], rows: tuple[Row, Row]
) -> None:
    """By either mount of it, without any lock; and what the server has open not by the other machine."""
    server, client = both
    here = image_at(f"{EXPORTED}/a.raw".encode())
    there = image_at(f"{MOUNTED}/a.raw".encode())
    for machine, path, image in [
        (client, f"{MOUNTED}/a.raw", here), (client, f"{AGAIN}/a.raw", here), (client, f"{AGAIN}/a.raw", there),
        (server, f"{EXPORTED}/a.raw", there),
    ]:  # fmt: skip
        holder = machine.run(f"exec 9<{path}; setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!")
        assert refused_as(in_use.refuse_used_elsewhere, image) == "image_in_use", path
        machine.run(f"kill {holder}")
        in_use.refuse_used_elsewhere(image)


def test_two_jobs_on_one_file_by_different_hosts_exclude_each_other(rows: tuple[Row, Row]) -> None:
    images = [image_at(f"{folder}/a.raw".encode()) for folder in (EXPORTED, MOUNTED, AGAIN)]
    services.submit(ADMIN, "reclaim", images[0].pk, {"method": "copy"})
    for image in images[1:]:
        assert refused_as(services.submit, ADMIN, "reclaim", image.pk, {"method": "copy"}) == "busy"


def test_the_server_rewrites_an_image_in_its_own_folder_and_the_others_find_the_new_one(
    both: tuple[Machine, Machine], rows: tuple[Row, Row]
) -> None:
    server, client = both
    image = image_at(f"{EXPORTED}/a.raw".encode())
    before = server.run(f"sha256sum <{EXPORTED}/a.raw")
    assert refused_as(services.submit, ADMIN, "reclaim", image.pk, {"method": "in_place"}) == "unsupported_pool"
    succeeded(work("reclaim", image.pk, ADMIN, method="copy", undo_hours=0))
    number = server.run(f"stat -c %i {EXPORTED}/a.raw").strip()
    assert number != image.inode
    for folder in (MOUNTED, AGAIN):
        told = client.run(f"ls {folder} >/dev/null; exec <{folder}/a.raw; stat -Lc %i /dev/stdin; sha256sum")
        assert told.split() == [number, *before.split()]


def test_an_agent_knows_that_holes_were_punched_by_what_the_kernel_has_done(
    both: tuple[Machine, Machine], rows: tuple[Row, Row]
) -> None:
    pools = {pool.path: pool for pool in StoragePool.objects.all()}
    assert (pools[AGAIN].mount["holes"], pools[AGAIN].mount["reserves"]) == (False, False)
    both[1].run(f"fallocate -p -o 64K -l 64K {MOUNTED}/a.raw")
    scan(rows[1])
    assert reread(pools[MOUNTED]).mount["holes"] is True
