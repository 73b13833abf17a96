"""Many images on a few hosts, one of which says nothing: looked at on the spot, and planned."""

import contextlib
import statistics
import time
from pathlib import Path

from images.models import Image
from images.rewrite.space import Admitted
from images.scan import look
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.services import add_pool
from storage_admin.jobs import kinds
from storage_admin.web.pages import reclaim_many
from tests.harness.sshd import sshd
from tests.performance.fleet import hangs, row_of
from tests.performance.inventory import make_images
from tests.performance.jobs import run_job
from tests.performance.report import Row, seconds

HOSTS, IMAGES, ROUNDS, LIMIT = 5, 100, 5, 3.0
NOTES = (
    (
        f"The look: {HOSTS} hosts by ssh with {IMAGES} images each, one of which takes the connection and says nothing "
        f"by the time that they are planned. The median of {ROUNDS} rounds."
    ),
)


def measure(folder: Path) -> list[Row]:
    """From the selection of all images to their plans."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for number in range(HOSTS):
            server = stack.enter_context(sshd(folder / f"look-sshd-{number}"))
            hosts.append(row_of(900 + number, server.port, server.host_key, server.private_key))
            pool = folder / f"look-{number}"
            pool.mkdir()
            make_images(pool, IMAGES)
            add_pool(hosts[-1], bytes(pool), StoragePool.Source.ADMIN)
            run_job("scan", hosts[-1].pk)
        hosts[0].port = stack.enter_context(hangs())
        hosts[0].save(update_fields=["port"])
        rows = Image.objects.filter(host__in=hosts).select_related("host", "pool")
        if rows.count() != HOSTS * IMAGES:
            raise AssertionError(rows.count())
        options = kinds.get("reclaim").clean({})
        took, answered, own = [], [], []
        for _ in range(ROUNDS):
            begin, used = time.monotonic(), time.process_time()
            answered.append(len(look.at(rows)))
            reclaim_many.planned(SYSTEM, list(rows.all()), options, Admitted())
            took.append(time.monotonic() - begin)
            own.append(time.process_time() - used)
    median = statistics.median(took)
    return [
        Row(
            f"{HOSTS * IMAGES} images on {HOSTS} hosts, one of them silent, looked at and planned", seconds(median),
            f"slowest of {ROUNDS}: {seconds(max(took))}; {seconds(statistics.median(own))} processor time here",
            f"{min(answered)} to {max(answered)} hosts answered within their second",
            "at most 3 s", median <= LIMIT,
        )
    ]  # fmt: skip
