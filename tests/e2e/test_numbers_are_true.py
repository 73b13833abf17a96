import re
import subprocess
from pathlib import Path

import pytest

from images.demo.recipes import RECIPES
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest
from tests.harness.services import Dashboard
from tests.working import info

pytestmark = pytest.mark.browser

NAMES = sorted({name for recipe in RECIPES for name in recipe.names} - {"damaged.qcow2", "point-of-sale-flat.vmdk"})


@pytest.mark.parametrize("name", NAMES)
def test_what_rest_says_of_an_image_is_what_qemu_img_and_stat_say(rest: Rest, dashboard: Dashboard, name: str) -> None:
    path = dashboard.demo / name
    row, facts, status = rest.image(name), info(path), path.stat()
    assert row["format"] == facts["format"]
    assert row["virtual_size"] == facts["virtual-size"]
    assert row["allocated_size"] == facts["actual-size"]
    assert row["file_size"] == status.st_size
    assert (row["backing_file"] or None) == facts.get("backing-filename")
    assert (row["backing_format"] or None) == facts.get("backing-filename-format")
    assert bool(row["encrypted"]) == bool(facts.get("encrypted"))
    if "cluster-size" in facts and facts["format"] == "qcow2":
        assert row["cluster_size"] == facts["cluster-size"]
    told = [(snapshot["name"], snapshot["size"]) for snapshot in row["snapshots"]]
    assert told == [(snapshot["name"], snapshot["vm-state-size"]) for snapshot in facts.get("snapshots", [])]


def test_what_cannot_be_read_is_unknown_and_not_0(rest: Rest) -> None:
    damaged = rest.image("damaged.qcow2")
    assert (damaged["state"], damaged["format"], damaged["virtual_size"]) == ("unreadable", "qcow2", None)
    assert "cluster size" in damaged["state_detail"]
    assert damaged["reclaimable_bytes"] is None


def test_states_and_depths_are_those_of_the_files(rest: Rest) -> None:
    state = {row["name"]: row["state"] for row in rest.get("images/", limit=1000)["results"]}
    assert state["shop.qcow2"] == "chain_broken"
    assert state["cycle-a.qcow2"] == state["cycle-b.qcow2"] == "chain_cycle"
    assert rest.image("web-02-hotfix.qcow2")["chain_depth"] == 4
    assert rest.image("debian-12-base.qcow2")["overlays_count"] == 2
    assert rest.image("uploaded-by-customer.img")["declared_format"] in {"", None}
    assert "point-of-sale-flat.vmdk" not in state


def test_the_list_shows_the_exact_bytes_of_each_image(seen: Tab, dashboard: Dashboard) -> None:
    seen.open("/images/?search=demo")
    for name in ("mail.qcow2", "database.raw", "web-02.qcow2", "desktop.vdi"):
        row = seen.page.locator("tbody tr", has=seen.page.get_by_role("link", name=name, exact=True))
        titles = [title.get_attribute("title") or "" for title in row.locator("td.n span[title]").all()]
        shown = [int(re.sub(r"\D", "", title)) for title in titles]
        facts = info(dashboard.demo / name)
        assert shown[:2] == [facts["actual-size"], facts["virtual-size"]], name


def test_the_pool_counts_each_file_once(rest: Rest, dashboard: Dashboard) -> None:
    demo = dashboard.demo
    (pool,) = [pool for pool in rest.get("pools/")["results"] if pool["path"] == str(demo)]
    images = [path.stat() for path in demo.iterdir() if not path.name.startswith(".")]
    files = {status.st_ino: status.st_blocks * 512 for status in images}
    assert pool["allocated_bytes"] == sum(files.values())
    there = subprocess.run(["stat", "-f", "-c", "%b %S", str(demo)], capture_output=True, text=True, check=True).stdout
    blocks, size = map(int, there.split())
    assert pool["capacity_bytes"] == blocks * size


def test_an_estimate_is_close_to_what_a_reclaim_wins(rest: Rest, dashboard: Dashboard, tmp_path: Path) -> None:
    for name in ("mail.qcow2", "debian-12-base.qcow2", "vm-104-disk-0.qcow2"):
        path, small = dashboard.demo / name, tmp_path / name
        row = rest.image(name)
        after_a_job(row["reclaimable_method"], path, small)
        won = (path.stat().st_blocks - small.stat().st_blocks) * 512
        assert row["reclaimable_bytes"] == pytest.approx(won, rel=0.05), name
        assert row["reclaimable_low"] <= row["reclaimable_bytes"] <= row["reclaimable_high"]


def after_a_job(method: str, path: Path, small: Path) -> None:
    """Makes what a job by this method would leave of an image."""
    if method == "in_place":
        subprocess.run(["cp", "--sparse=never", str(path), str(small)], check=True)
        subprocess.run(["fallocate", "--dig-holes", str(small)], check=True)
        return
    squeeze = ["-c", "-o", "compression_type=zstd"] if method == "compress" else []
    subprocess.run(["qemu-img", "convert", *squeeze, "-O", "qcow2", str(path), str(small)], check=True)
