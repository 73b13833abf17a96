"""A host is added by ssh through the pages, its key compared, and a container's priority set on it."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.browser import Tab
from tests.e2e.rest import Rest
from tests.harness.openvz import OpenVZHost
from tests.harness.sshd import Sshd, sshd

pytestmark = pytest.mark.browser

CONF = Path("/etc/vz/conf")


@pytest.fixture
def vz(tmp_path: Path) -> Iterator[OpenVZHost]:
    """A host with OpenVZ; its configurations are where OpenVZ has them, as long as the test lasts."""
    host = OpenVZHost(tmp_path / "vz")
    made = not CONF.parent.exists()
    CONF.parent.mkdir(exist_ok=True)
    assert not CONF.exists(), f"{CONF} is there: this machine has OpenVZ"
    CONF.symlink_to(host.conf)
    yield host
    CONF.unlink()
    if made:
        CONF.parent.rmdir()


@pytest.fixture
def server(tmp_path: Path, vz: OpenVZHost) -> Iterator[Sshd]:
    """That host's SSH server."""
    with sshd(tmp_path / "sshd", environment={"PATH": f"{vz.bin}:{os.defpath}:/usr/sbin:/sbin"}) as running:
        yield running


def test_a_host_is_added_by_ssh_and_a_containers_priority_set_on_it(
    seen: Tab, page: Page, rest: Rest, server: Sshd, vz: OpenVZHost
) -> None:
    vz.add("101", 'HOSTNAME="shop"\nIOPRIO="3"\n', state="running")
    seen.open("/hosts/")
    page.get_by_role("link", name="Add host…").click()
    page.get_by_label("Display name", exact=True).fill("old-vz")
    page.get_by_label("Hostname or IP address", exact=True).fill("-oProxyCommand=x")
    expect(page.get_by_label("Private key (without a passphrase)")).to_be_hidden()
    page.get_by_label("Use an existing private key").check()
    page.get_by_label("Private key (without a passphrase)").fill(server.private_key)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#address-wrong")).to_contain_text("Enter only a hostname or an IP address")
    assert len(seen.complaints) == 1  # the browser says that the answer was 400
    seen.complaints.clear()
    page.get_by_label("Hostname or IP address", exact=True).fill("127.0.0.1")
    page.get_by_label("SSH port", exact=True).fill(str(server.port))
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("pre.shell").first).to_have_text(re.compile("^SHA256:"))
    seen.assert_accessible()
    page.get_by_role("button", name="Fingerprint matches, add host").click()
    expect(page).to_have_url(re.compile(r"/hosts/$"))
    expect(page.get_by_text("old-vz is added")).to_be_visible()
    seen.assert_accessible()

    host = next(row for row in rest.get("hosts/", limit=100)["results"] if row["name"] == "old-vz")
    assert (host["kind"], host["transport"], host["port"]) == ("ssh", "ssh", server.port)
    seen.open("/guests/?search=shop")
    seen.reload_until(page.get_by_role("cell", name=re.compile("shop")))
    expect(page.locator("tbody")).to_contain_text("priority 3")
    page.get_by_role("link", name="I/O limits…").click()
    page.get_by_label(re.compile("I/O priority of containers")).fill("7")
    page.get_by_role("button", name="Show plan").click()
    expect(page.locator("tbody")).to_contain_text("vzctl set 101 --ioprio 7 --save")
    seen.assert_accessible()
    seen.confirm("Apply to 1 guest")
    seen.assert_accessible()
    assert b'IOPRIO="7"' in (vz.conf / "101.conf").read_bytes()
    seen.open("/guests/?search=shop")
    expect(page.locator("tbody")).to_contain_text("priority 7")

    seen.open("/hosts/")
    page.get_by_text("Remove old-vz").click()
    page.get_by_label("Type “old-vz” to confirm").fill("old-vz")
    page.get_by_role("button", name="Remove host").click()
    expect(page.get_by_text("Nothing on it was changed")).to_be_visible()


def test_a_host_is_added_with_a_created_key_pair_in_five_clicks(
    seen: Tab, page: Page, rest: Rest, server: Sshd
) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.add_init_script(
        "addEventListener('click', () => sessionStorage.clicks = +(sessionStorage.clicks || 0) + 1, true)"
    )
    seen.open("/")
    page.get_by_role("link", name="Hosts", exact=True).first.click()
    page.get_by_role("link", name="Add host…").click()
    expect(page.get_by_label("Create a key pair")).to_be_checked()
    page.get_by_label("Display name", exact=True).fill("created")
    page.get_by_label("Hostname or IP address", exact=True).fill("127.0.0.1")
    page.get_by_label("SSH port", exact=True).fill(str(server.port))
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#public-key")).to_have_text(re.compile("^ssh-ed25519 [^ ]+ storage-admin@[^ ]+$"))
    expect(page.get_by_text(re.compile("^SHA256:"))).to_be_visible()
    page.get_by_role("button", name="Copy").first.click()
    public = page.locator("#public-key").inner_text()
    deadline = time.monotonic() + 30
    while page.evaluate("navigator.clipboard.readText()") != public:
        assert time.monotonic() < deadline, "the public key is not on the clipboard"
        page.wait_for_timeout(100)
    server.authorize(public)
    page.get_by_role("button", name="Fingerprint matches, add host").click()
    expect(page.get_by_text("created is added")).to_be_visible()
    assert page.evaluate("sessionStorage.clicks") == "5"
    host = next(row for row in rest.get("hosts/", limit=100)["results"] if row["name"] == "created")
    assert (host["kind"], host["transport"]) == ("ssh", "ssh")

    seen.open(f"/hosts/{host['id']}/connection/")
    page.get_by_label("Create a new key pair").focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Test and save").press("Enter")
    expect(page.locator("#public-key")).not_to_have_text(public)
    page.get_by_text("Alternatively, restrict the key to the agent").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#forced-line")).to_have_text(re.compile('^restrict,command="/[^ ]+" ssh-ed25519 '))
    seen.assert_accessible()
    server.authorize(page.locator("#public-key").inner_text())
    page.get_by_role("button", name="Test and save").press("Enter")
    expect(page).to_have_url(re.compile(r"/hosts/$"))
    rest.quiet()
    page.get_by_text("Remove created").click()
    page.get_by_label("Type “created” to confirm").fill("created")
    page.get_by_role("button", name="Remove host").click()
    expect(page.get_by_text("Nothing on it was changed")).to_be_visible()
