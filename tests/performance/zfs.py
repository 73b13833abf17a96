"""1,000 volumes of ZFS in a virtual machine: first scan and rescan beside ``zfs list`` by itself."""

import contextlib
import time
from pathlib import Path
from unittest.mock import patch

from images.models import Image
from storage_admin.agent.host import zfs
from storage_admin.hosts import asking
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.jobs import runner
from tests.factories import HostFactory
from tests.machines.lab import Machine, machine
from tests.machines.nfs import load_agents
from tests.performance.jobs import run_job
from tests.performance.report import Row, seconds
from tests.performance.site import median

NOTES = (
    (
        "ZFS: a pool with 1,000 sparse zvols in a virtual machine (`make machines`), whose processor is imitated by "
        "this one's programs (TCG) and many times slower: what counts is how long a scan takes beside the same "
        "questions by themselves (`zpool list` twice, `zfs list`), medians of 3. Of 10,000, `zfs list` takes there "
        "longer than the three minutes after which the agent gives up a list. The zvols have no devices "
        "(`volmode=none`), since udev would take hours there."
    ),
)
COUNT = 1_000
#: So many are made by one program, by ZFS's own library: thousands of `zfs create` would take an hour there.
_PIECE = 1000
_CREATE = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
core, pairs = ctypes.CDLL("libzfs_core.so.3"), ctypes.CDLL("libnvpair.so.3")
pairs.fnvlist_alloc.restype = ctypes.c_void_p
size = ctypes.c_void_p(pairs.fnvlist_alloc())
pairs.fnvlist_add_uint64(size, b"volsize", ctypes.c_uint64(64 << 20))
assert core.libzfs_core_init() == 0
with ThreadPoolExecutor(16) as pool:
    names = (b"bench/vm-%d-disk-0" % number for number in range(*map(int, sys.argv[1:])))
    assert set(pool.map(lambda name: core.lzc_create(name, 3, size, None, 0), names)) == {0}
"""
_ASKED = (
    f"zpool list -Hp -o {','.join(zfs.POOLS)}; zpool list -HpvP -o name; "
    f"zfs list -t filesystem,volume,snapshot -Hp -o {','.join(zfs.DATASETS)}"
)


def measure(folder: Path, count: int = COUNT) -> list[Row]:
    """First scan and rescan, as the factor of what ZFS takes."""
    with machine() as own:
        load_agents(own, folder)
        _make(own, count)
        command = own.command("python3 /root/agent.pyz")
        with (
            patch.object(runner, "agent_command", lambda *_: contextlib.nullcontext(command)),
            patch.object(asking, "agent_command", lambda *_: contextlib.nullcontext(command)),
            patch.object(reader, "read", lambda host: LibvirtFacts(domains=())),
        ):
            host = HostFactory.create(slug="far", kind="ssh", transport="forced", last_seen=None, capabilities={})

            def first_scan() -> float:
                Image.every.filter(host=host).delete()
                return run_job("scan", host.pk)[1]

            first_scan()
            assert Image.objects.filter(host=host, virtual_size=64 << 20).count() == count
            alone = median(lambda: _timed(own, f"({_ASKED}) >/dev/null"), 3)
            first = median(first_scan, 3)
            rescan = median(lambda: run_job("scan", host.pk)[1], 3)
            host.delete()
    return [
        Row(
            f"{work} of {count:,} ZFS volumes in a virtual machine", seconds(took),
            f"zpool list and zfs list by themselves: {seconds(alone)}", f"{took / alone:.1f} times the time",
            "at most 1.5 times", took <= 1.5 * alone,
        )
        for work, took in (("first scan", first), ("rescan", rescan))
    ]  # fmt: skip


def _make(own: Machine, count: int) -> None:
    own.run("modprobe zfs; truncate -s 4G /root/zd; zpool create -O volmode=none -O mountpoint=none bench /root/zd")
    for begin in range(0, count, _PIECE):
        own.run(f"python3 - {begin} {min(begin + _PIECE, count)}", _CREATE.encode())
    own.run("zpool sync")


def _timed(own: Machine, line: str) -> float:
    begin = time.perf_counter()
    own.run(line)
    return time.perf_counter() - begin
