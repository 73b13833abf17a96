"""Nodes of Proxmox VE are added by the page, and what their API tells of their images is shown once."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e.browser import Tab, Theme
from tests.e2e.rest import Rest
from tests.harness.proxmox.cluster import cluster
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import SECRET, TOKEN_ID

pytestmark = pytest.mark.browser


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[ProxmoxServer, ProxmoxServer]]:
    with cluster(tmp_path) as running:
        yield running


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.night)])
def test_every_form_is_accessible_and_reached_by_keyboard(admin_tab: Callable[[Theme], Tab], theme: Theme) -> None:
    seen = admin_tab(theme)
    seen.open("/hosts/add/")
    kind = seen.page.get_by_label("Connection type")
    for way, field in (
        ("proxmox", "API token ID"), ("libvirt-tls", "Client certificate (clientcert.pem)"),
        ("libvirt-ssh", "Create a key pair"), ("ssh", "Create a key pair"),
    ):  # fmt: skip
        kind.focus()
        kind.select_option(way)
        expect(seen.page.locator("#form input[name=kind]")).to_have_value(way)
        expect(seen.page.get_by_label(field, exact=True)).to_be_visible()
        expect(kind).to_be_focused()
        seen.assert_accessible()


def test_nothing_can_be_typed_into_a_form_that_is_about_to_be_exchanged(seen: Tab, page: Page) -> None:
    seen.open("/hosts/add/")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/hosts/add/?kind=*", hold)
    page.get_by_label("Connection type").select_option("proxmox")
    expect(page.get_by_label("Hostname or IP address", exact=True)).to_be_disabled()
    expect(page.get_by_role("button", name="Continue")).to_be_disabled()
    for _ in range(500):
        if held:
            break
        page.wait_for_timeout(20)  # the route is told a moment after the request has begun
    held[0].continue_()
    page.get_by_label("Hostname or IP address", exact=True).fill("pve1.example.org")
    expect(page.get_by_label("API token ID", exact=True)).to_be_enabled()
    expect(page.get_by_label("Hostname or IP address", exact=True)).to_have_value("pve1.example.org")


def test_the_nodes_of_a_cluster_are_added_and_their_shared_images_listed_once(
    seen: Tab, page: Page, rest: Rest, nodes: tuple[ProxmoxServer, ProxmoxServer]
) -> None:
    first, _second = nodes
    seen.open("/hosts/add/")
    page.get_by_label("Connection type").select_option("proxmox")
    page.get_by_label("Hostname or IP address", exact=True).fill("127.0.0.1")
    page.get_by_label("API port", exact=True).fill(str(first.port))
    page.get_by_label("API token ID", exact=True).fill(TOKEN_ID)
    page.get_by_label("API token secret").fill(SECRET)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("pre.shell").first).to_have_text(first.fingerprint)
    assert SECRET not in page.content()
    seen.assert_accessible()
    page.get_by_role("button", name="Fingerprint matches, continue").click()
    expect(page.get_by_label("pve1", exact=True)).to_be_checked()
    expect(page.get_by_label("Address of pve2")).to_have_value("127.0.0.2")
    seen.assert_accessible()
    page.get_by_role("button", name="Test and add selected nodes").click()
    expect(page.get_by_text("pve1, pve2 are added")).to_be_visible()
    rest.quiet()
    seen.open("/images/?search=mnt/pve/nfs")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="vm-502-disk-0.qcow2").first.click()
    expect(page.get_by_text("without an agent").first).to_be_visible()
    expect(seen.fact("File size")).to_have_text("unknown")
    seen.assert_accessible()

    page.set_viewport_size({"width": 1400, "height": 900})
    seen.open("/hosts/")
    expect(page.get_by_text("API token privileges").first).to_be_visible()
    for table in page.locator(".wide").all():
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth + 1"), table.inner_text()[:200]
    seen.assert_accessible()
    for name in ("pve1", "pve2"):
        page.get_by_text(f"Remove {name}").click()
        page.get_by_label(f"Type “{name}” to confirm").fill(name)
        page.get_by_role("button", name="Remove host").locator("visible=true").click()
        expect(page.get_by_text("Nothing on it was changed")).to_be_visible()
    assert not [row for row in rest.get("hosts/", limit=100)["results"] if re.match("pve", row["name"])]
