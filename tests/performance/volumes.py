"""10,000 logical volumes: first scan and rescan beside ``lvs`` by itself."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from images.models import Image
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.services import ensure_local_host
from tests.performance.jobs import run_job
from tests.performance.report import Row, seconds
from tests.performance.site import median, timed

NOTES = (
    (
        "Volumes: a volume group on a loop device with 10,000 thick volumes of one extent, none of them active, whose "
        "metadata vgcfgrestore wrote; real LVM answers, asked as the scan asks it: `vgs`, which takes most of it, "
        "and `lvs`. The scan writes the rows besides; "
        "first scan: median of 3 into an empty inventory, rescan: median of 5. Ceph's answers are not measured."
    ),
)
COUNT = 10_000
#: Seconds for either scan.
MOST = 5.0
GROUP = "sa-bench"
_VOLUME = """vm-{0}-disk-0 {{
id = "{1}"
status = ["READ", "WRITE", "VISIBLE"]
segment_count = 1
segment1 {{
start_extent = 0
extent_count = 1
type = "striped"
stripe_count = 1
stripes = ["pv0", {0}]
}}
}}
"""


@contextmanager
def group(folder: Path, count: int) -> Iterator[None]:
    """That volume group, while it is needed."""
    disk = folder / "volumes.raw"
    with disk.open("wb") as file:
        file.truncate((count + 100) << 22)
    loop = _said("losetup", "-f", "--show", str(disk))
    try:
        _said("pvcreate", "-q", "--metadatasize", "64m", loop)
        _said("vgcreate", "-q", GROUP, loop)
        saved = folder / "metadata"
        _said("vgcfgbackup", "-f", str(saved), GROUP)
        text = saved.read_text()
        volumes = "".join(_VOLUME.format(number, _id(number)) for number in range(count))
        end = text.rindex("}")
        saved.write_text(f"{text[:end]}logical_volumes {{\n{volumes}}}\n{text[end:]}")
        _said("vgcfgrestore", "-f", str(saved), GROUP)
        yield
    finally:
        subprocess.run(["vgremove", "-q", "-f", "-f", "-y", GROUP], capture_output=True)
        subprocess.run(["losetup", "-d", loop], check=True)
        disk.unlink()


def _id(number: int) -> str:
    """An id of LVM's form: six characters, five times four, and six."""
    return re.sub(r"(.{6})(.{4})(.{4})(.{4})(.{4})(.{4})(.{6})", r"\1-\2-\3-\4-\5-\6-\7", f"{number:032d}")


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


def measure(folder: Path, count: int = COUNT) -> list[Row]:
    """First scan and rescan."""
    host = ensure_local_host()
    with tempfile.TemporaryDirectory(dir=folder) as place, group(Path(place), count):

        def first_scan() -> float:
            Image.every.all().delete()
            return run_job("scan", host.pk)[1]

        first_scan()
        told = json.loads(_said("lvs", "--reportformat", "json", "--units", "b", "-o", "lv_name,lv_size", GROUP))
        sizes = {one["lv_name"]: int(one["lv_size"].rstrip("B")) for one in told["report"][0]["lv"]}
        assert dict(Image.objects.values_list("name", "allocated_size")) == sizes
        assert len(sizes) == count
        lvm = median(lambda: timed("vgs") + timed("lvs", "--reportformat", "json", "-a", "-o", "+lv_all"), 3)
        first = median(first_scan, 3)
        rescan = median(lambda: run_job("scan", host.pk)[1], 5)
    Image.every.all().delete()
    StoragePool.objects.filter(name=GROUP).delete()
    return [
        Row(
            f"{work} of {count:,} logical volumes", seconds(took), f"vgs and lvs by themselves: {seconds(lvm)}",
            f"{took / lvm:.1f} times the time", "under 5 s", took < MOST,
        )
        for work, took in (("first scan", first), ("rescan", rescan))
    ]  # fmt: skip
