"""Lists of jobs and guests with 100,000 rows, and a list of 100,000 images as CSV."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from django.test import Client
from django.utils import timezone

from images.models import ImageUse
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host
from storage_admin.jobs.models import Job
from tests.harness.services import ROOT
from tests.performance import pages
from tests.performance.report import Row, seconds

NOTES = (
    (
        "Lists: 100,000 jobs with the plans and results of a reclaim, and 100,000 guests with a disk each, asked as "
        "the list of images. CSV: the file of 100,000 images, a guest on every tenth, taken whole through the test "
        "client, each part dropped as it comes; memory is by how much the largest size of a process of its own grew "
        "that had answered a page of the list and a search before (its code loaded, SQLite's 32 MB of pages full). "
        "The ids are read first and then the rows, 1,000 at a time, so that a slow reader holds no transaction open "
        "and any number of rows needs hardly more memory."
    ),
)
COUNT = 100_000
#: By which the jobs made here are known from those that have measured something.
LABEL = "web-"
#: Beyond what the process had before.
MOST_MEMORY = 40 << 20

#: Jobs are four minutes apart; these thirty days are somewhere in the middle.
FROM = (timezone.now() - timedelta(days=150)).date()
TO = (timezone.now() - timedelta(days=120)).date()
LATELY = (timezone.now() - timedelta(days=2)).date()

#: Nearly every row, or its entry in an index, is looked at.
SLOWER = {"jobs, searched", "jobs, succeeded", "guests, searched"}
ADDRESSES = {
    "jobs, first": "/jobs/",
    "jobs, last page": f"/jobs/?page={COUNT // 50}",
    "jobs, by state and kind": "/jobs/?state=failed&kind=reclaim",
    "jobs, succeeded": "/jobs/?state=succeeded",
    "jobs, succeeded, of two days": f"/jobs/?state=succeeded&from={LATELY}",
    "jobs, by whom, in a month": f"/jobs/?by=policy&from={FROM}&to={TO}",
    "jobs, searched": "/jobs/?search=web-0123",
    "jobs, by kind": "/jobs/?ordering=kind",
    "guests, first": "/guests/",
    "guests, by host and state": "/guests/?state=running&kind=domain&ordering=host",
    "guests, searched": "/guests/?search=guest-0123",
}


def measure(_folder: Path, count: int = COUNT) -> list[Row]:
    """Time and queries of each address, then seconds and memory of the file."""
    client = pages.signed_in()
    pages.rows_up_to(count)
    hosts = list(Host.objects.filter(slug__startswith="bench-"))
    file = _file(count)
    _jobs(hosts, count)
    _guests(hosts, count)
    rows = [_page(client, what, address, count) for what, address in ADDRESSES.items()]
    rows += file
    jobs = Job.objects.filter(target_label__startswith=LABEL)
    for made in (ImageUse.objects, GuestDisk.objects, Guest.objects, jobs):
        # All at once: collected one by one with what hangs on them, 100,000 rows take minutes.
        made.all()._raw_delete("default")
    pages.clear()
    return rows


def _page(client: Client, what: str, address: str, count: int) -> Row:
    taken, asked = pages.median_of(client, address), pages.queries_of(client, address)
    limit = 0.2 if what in SLOWER else 0.1
    wanted = f"at most 15 queries, {limit * 1000:.0f} ms"
    return Row(
        f"list of {what}: {count:,} rows", seconds(taken), "", f"{asked} queries", wanted, taken < limit and asked <= 15
    )


def _file(count: int) -> list[Row]:
    told = subprocess.run(
        [sys.executable, "-m", "tests.performance.one_file"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    file = json.loads(told)
    if file["lines"] != count + 1:
        raise AssertionError(f"the file has {file['lines']} lines")
    return [
        Row(
            f"CSV of {count:,} images, {file['size'] / (1 << 20):.0f} MiB", seconds(file["taken"]), "",
            f"{count / file['taken']:,.0f} images a second", "at most 30 s", file["taken"] < 30,
        ),
        Row(
            "memory for that file", f"{file['grown'] / (1 << 20):.1f} MiB", "", "what the process grew by",
            f"at most {MOST_MEMORY >> 20} MiB", file["grown"] < MOST_MEMORY,
        ),
    ]  # fmt: skip


def _jobs(hosts: list[Host], count: int) -> None:
    now = timezone.now()
    plan = {"method": "compress", "commands": [["qemu-img", "convert", "x" * 200]] * 5, "warnings": ["y" * 200] * 3}
    result = {"before_bytes": 4 << 30, "after_bytes": 1 << 30, "freed_bytes": 3 << 30, "held_bytes": 0, "swapped": True}
    for start in range(0, count, 2000):
        Job.objects.bulk_create(
            Job(
                kind=("reclaim", "scan", "analyze", "sample", "check")[number % 5],
                state="failed" if number % 40 == 0 else "succeeded", host=hosts[number % len(hosts)],
                target_kind="image", target_id=number, target_label=f"{LABEL}{number:06}.qcow2", plan=plan,
                result=result,
                created_by="policy nights" if number % 3 else "admin",
                created=now - timedelta(minutes=4 * (count - number)), started=now, finished=now,
            )
            for number in range(start, min(start + 2000, count))
        )  # fmt: skip


def _guests(hosts: list[Host], count: int) -> None:
    now = timezone.now()
    there = Guest.objects.count()
    for start in range(there, count, 2000):
        made = Guest.objects.bulk_create(
            Guest(
                host=hosts[number % len(hosts)], kind="domain", uid=f"more-{number}", name=f"guest-{number:06}",
                state="running" if number % 3 else "shut off", last_seen=now,
            )
            for number in range(start, min(start + 2000, count))
        )  # fmt: skip
        GuestDisk.objects.bulk_create(
            GuestDisk(guest=guest, target="vda", path=f"/srv/{guest.uid}.qcow2", path_key=guest.uid) for guest in made
        )
