"""``make screenshots``: every page, light and dark, of a real dashboard with the demo and a few real guests.

Needs root, as it starts a libvirtd of its own where none runs.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests.e2e.browser import Theme, chromium, tab
from tests.e2e.rest import Rest
from tests.harness.guests import Disk, Domains
from tests.harness.libvirtd import libvirtd
from tests.harness.services import Dashboard, running_dashboard
from tests.pictures import shrink

FOLDER = Path(__file__).resolve().parents[1] / "docs/screenshots"
#: What the plan for many images is shown with; the guest of one runs, and one is encrypted.
MANY = (
    "media-2M-clusters.qcow2", "web-02.qcow2", "scratch.raw", "database.raw", "desktop.vdi",
    "web-01.qcow2", "payroll-encrypted.qcow2",
)  # fmt: skip
THEMES: tuple[Theme, ...] = ("light", "dark")
#: Pages by their name: the address, with the ids of :func:`places` in it.
PAGES = {
    "overview": "/",
    "images": "/images/",
    "image": "/images/{leaf}/",
    "reclaim": "/images/{archive}/reclaim/",
    "flatten": "/images/{leaf}/flatten/",
    "convert": "/images/{leaf}/convert/",
    "check": "/images/{leaf}/check/",
    "orphans": "/orphans/?everywhere=true",
    "jobs": "/jobs/",
    "ledger": "/ledger/",
    "pool": "/pools/{pool}/",
    "hosts": "/hosts/",
    "host-add": "/hosts/add/",
    "guests": "/guests/",
    "views": "/images/?format=qcow2&ordering=-reclaimable_bytes",
    "policies": "/policies/",
    "policy": "/policies/{policy}/",
    "policy-change": "/policies/{policy}/change/",
    "policy-preview": "/policies/{policy}/preview/",
    "alerts": "/alerts/",
    "webhooks": "/webhooks/",
    "users": "/users/",
    "audit": "/audit/",
    "account": "/account/",
    "benchmarks": "/benchmarks/",
    "benchmark-start": "/benchmarks/start/?pool={pool}&kind=cluster_size",
    "benchmark": "/benchmarks/{matrix}/",
    "benchmark-fio": "/benchmarks/{fio}/",
    "benchmark-compare": "/benchmarks/compare/?ids={before},{matrix}&published=0",
    "benchmark-history": "/benchmarks/pools/{pool}/",
}
POLICY = {
    "name": "nightly compaction", "cron": "0 22 * * 1-5", "timezone": "Europe/Berlin", "min_reclaimable_bytes": 1 << 20,
    "min_age_hours": 168, "formats": ["qcow2"], "name_pattern": "!*-template*", "options": {"undo_hours": 24},
}  # fmt: skip
#: Small enough to be done in a minute: what they show is how figures look.
MATRIX = {"size_bytes": 16 << 20, "repetitions": 5}
FIO = {"size_bytes": 64 << 20, "seconds": 1}


def main() -> int:
    """Takes all pictures and prints where they are."""
    parser = argparse.ArgumentParser(prog="python -m tests.screenshots", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures go")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(PAGES)}")
    parser.add_argument("--whole", action="store_true", help="whole pages, not only what fits into a window")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with (
        _place() as folder,
        libvirtd() as uri,
        Domains(uri, folder) as domains,
        running_dashboard(folder / "data") as dashboard,
        chromium() as browser,
    ):
        dashboard.manage("demo", "--path", str(folder / "images"))
        _guests(domains, folder / "images")
        _take(browser, dashboard, given.folder, given.only, whole=given.whole)
    for picture in sorted(given.folder.glob("*.png")):
        shrink(picture)
        print(f"{picture} {picture.stat().st_size // 1024} KiB")
    return 0


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    folder = Path("/var/tmp/storage-admin")  # its name is on the pictures
    folder.mkdir(mode=0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _guests(domains: Domains, images: Path) -> None:
    """Three guests: one runs on an overlay of the shared base, two are off."""
    domains.run([Disk(images / "web-01.qcow2")], "web-01")
    domains.define([Disk(images / "mail.qcow2")], "mail")
    domains.define(
        [
            Disk(images / "database.raw", "raw", cache="writeback", discard="ignore"),
            Disk(images / "desktop.vdi", "vdi"),
        ],
        "database",
    )


def _take(browser: Browser, dashboard: Dashboard, folder: Path, only: list[str], *, whole: bool) -> None:
    rest = Rest(dashboard, name="automation")
    rest.scan()
    rest.quiet()
    _views(rest)
    if not only:
        _work(rest)
    places: dict[str, object] = {**_places(rest)}
    if not only or any("benchmark" in name for name in only):
        places |= _measured(rest, places["pool"])
    cookies = folder / ".cookies"
    with tab(browser, dashboard.url) as opened:
        opened.log_in("admin", dashboard.password)
        opened.page.context.storage_state(path=cookies)
    try:
        if not only:
            _shoot_work(rest, browser, dashboard, folder, cookies)
        for name, address in PAGES.items():
            for theme in THEMES if name in (only or PAGES) else ():
                _shoot(browser, dashboard, folder, name, address.format(**places), theme, cookies, whole=whole)
    finally:
        cookies.unlink()


def _shoot_work(rest: Rest, browser: Browser, dashboard: Dashboard, folder: Path, cookies: Path) -> None:
    """A job at work, and what is no page by its address alone."""
    slow = _reclaim(rest, "vm-104-disk-0.qcow2", bandwidth_bytes_sec=1024 * 1024)
    for theme in THEMES:
        _shoot(browser, dashboard, folder, "job", f"/jobs/{slow['id']}/", theme, cookies, settle=3000)
    rest.finished(slow)
    rest.quiet()
    for theme in THEMES:
        _shoot(browser, dashboard, folder, "bulk", "/images/", theme, cookies, then=_choose_many)
        _shoot(browser, dashboard, folder, "login", "/login/", theme, None)


def _views(rest: Rest) -> None:
    """Views that are offered to everybody."""
    for name, query in (
        ("qcow2, most to win", "format=qcow2&ordering=-reclaimable_bytes"),
        ("Long chains", "min_chain_depth=3"),
        ("Orphans", "orphan=true"),
    ):
        rest.post("views/", {"page": "images", "name": name, "query": query, "shared": True}, expect=201)


def _work(rest: Rest) -> None:
    """Some jobs that have ended, so that there is a history: one won for good, one that can be undone."""
    done = rest.finished(_reclaim(rest, "ci-runner.qcow2"))
    rest.finished(rest.post(f"jobs/{done['id']}/discard-undo/"))
    rest.finished(_reclaim(rest, "mail.qcow2"))


def _reclaim(rest: Rest, name: str, **options: object) -> dict[str, object]:
    return dict(rest.post("jobs/", {"kind": "reclaim", "image": rest.image(name)["id"], "options": options}))


def _measured(rest: Rest, pool: object) -> dict[str, object]:
    """Benchmarks that have ended: a matrix several times, and fio; their ids."""
    runs = []
    for kind, options in [("fio", FIO)] + [("cluster_size", MATRIX)] * 5:
        run = rest.post("benchmarks/", {"kind": kind, "pool": pool, "options": options})
        rest.finished({"id": run["job"]}, 300)
        runs.append(run["id"])
    rest.quiet()
    return {"before": runs[-2], "matrix": runs[-1], "fio": runs[0]}


def _places(rest: Rest) -> dict[str, int]:
    return {
        "leaf": rest.image("web-02-hotfix.qcow2")["id"],
        "archive": rest.image("media-2M-clusters.qcow2")["id"],
        "pool": next(pool["id"] for pool in rest.get("pools/")["results"] if pool["name"] == "demo"),
        "policy": rest.post("policies/", POLICY, expect=201)["id"],
    }


def _choose_many(page: Page) -> None:
    for name in MANY:
        page.get_by_label(f"Select {name}", exact=True).check()
    page.get_by_role("button", name="Reclaim selected…").click()
    page.get_by_role("heading", name=f"Reclaim {len(MANY)} images").wait_for()


def _shoot(
    browser: Browser, dashboard: Dashboard, folder: Path, name: str, address: str, theme: Theme, cookies: Path | None,
    settle: int = 300, then: Callable[[Page], None] | None = None,
    *, whole: bool = False,
) -> None:  # fmt: skip
    with tab(browser, dashboard.url, theme, cookies) as opened:
        opened.open(address)
        if then is not None:
            then(opened.page)
        opened.page.wait_for_load_state("load")
        opened.page.wait_for_timeout(settle)
        opened.page.screenshot(path=folder / f"{name}-{theme}.png", full_page=whole)
        assert not opened.complaints, f"{name}: {opened.complaints}"


if __name__ == "__main__":
    sys.exit(main())
