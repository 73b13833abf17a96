"""Addresses of webhooks: many are secrets, which stand nowhere once they were given."""

import ipaddress
from typing import Any

import pytest

from storage_admin.accounts.models import SYSTEM, AuditEntry
from storage_admin.errors import InvalidError
from storage_admin.events import addresses, posting, sending, services, webhooks
from storage_admin.events.models import Alert, Delivery
from tests.events.conftest import hook_to
from tests.harness.receiver import receiver
from tests.working import client_as

SLACK = "https://hooks.slack.example/services/T0PATHSECRET/B0PATHSECRET"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.org", "https://example.org"),
        ("https://example.org/", "https://example.org/"),
        ("http://[::1]:9/x", "http://[::1]:9/…"),
        (SLACK, "https://hooks.slack.example/…"),
        ("https://example.org/?SECRETTOKEN", "https://example.org/?…"),
        ("https://example.org?U0VDUkVU==", "https://example.org?…"),
        ("https://example.org/a?room=1&SECRET&key=a=b&SECRET=", "https://example.org/…?room=…&…&key=…&…"),
    ],
)
def test_of_an_address_nothing_is_shown_that_may_be_a_secret(url: str, shown: str) -> None:
    assert addresses.shown(url) == shown
    assert addresses.stands_for(shown, url)
    assert addresses.stands_for(f" {url}", url)


@pytest.mark.parametrize(
    "told", ["https://example.com/…", "https://example.org/…?key=…", "https://example.org", "", "*", "…" * 400 + "!"]
)
def test_another_address_is_none_that_is_not_shown_in_full(told: str) -> None:
    assert not addresses.stands_for(told, "https://example.org/hook")


METADATA, FAR = "169.254.169.254", "192.0.2.7"


def forms_of(ipv4: str) -> list[str]:
    """Every way in which an address of IPv6 leads to one of IPv4."""
    a, b, c, d = (f"{octet:02x}" for octet in ipaddress.IPv4Address(ipv4).packed)
    turned = ipaddress.IPv4Address(int(ipaddress.IPv4Address(ipv4)) ^ 0xFFFF_FFFF)
    return [
        f"::{ipv4}", f"::ffff:{ipv4}", f"::ffff:0:{ipv4}", f"64:ff9b::{ipv4}", f"64:ff9b:1::{ipv4}",
        f"64:ff9b:1:{a}{b}:{c}:{d}00::", f"64:ff9b:1:{a}:{b}:{c}{d}::", f"64:ff9b:1:0:{a}:{b}{c}:{d}00:0",
        f"2002:{a}{b}:{c}{d}::1", f"2001:0:{a}{b}:{c}{d}:0:0:3fff:fdd2", f"2001:0:c000:201::{turned}",
        f"2001:db8::5efe:{ipv4}", f"fd00::200:5efe:{ipv4}", f"fe80::5efe:{ipv4}",
    ]  # fmt: skip


@pytest.mark.parametrize("ipv4", [METADATA, "100.100.100.200", "224.0.0.1", "0.0.0.0"])
def test_no_form_of_ipv6_leads_to_an_address_of_ipv4_that_is_refused(ipv4: str) -> None:
    assert [form for form in forms_of(ipv4) if not addresses.forbidden(form)] == []
    with pytest.raises(InvalidError):
        addresses.checked(f"http://[64:ff9b::{ipv4}]/")


def test_ipv6_that_leads_to_other_addresses_is_taken() -> None:
    link_local = f"fe80::5efe:{FAR}"
    assert [form for form in forms_of(FAR) if addresses.forbidden(form)] == [link_local]
    others = ["2001:db8::1", "::1", "2001:db8::a9fe:a9fe", "2a00::5eff:a9fe:a9fe", "10.0.0.1", "127.0.0.1"]
    assert [one for one in others if addresses.forbidden(one)] == []


@pytest.mark.django_db
def test_pages_rest_and_the_trail_tell_the_same_of_an_address() -> None:
    hook, _ = webhooks.create(SYSTEM, "chat", f"{SLACK}?key=QUERYSECRET")
    client = client_as(role="admin")
    for address in ("/webhooks/", f"/webhooks/{hook.pk}/", "/audit/", "/audit/export.csv", "/webhooks/export.csv"):
        answer: Any = client.get(address)
        text = (b"".join(answer.streaming_content) if answer.streaming else answer.content).decode()
        assert "hooks.slack.example" in text, address
        assert "SECRET" not in text, address
    for address in ("/api/v1/webhooks/", f"/api/v1/webhooks/{hook.pk}/", "/api/v1/audit/"):
        answer = client.get(address)
        assert "https://hooks.slack.example/…?key=…" in answer.content.decode(), address
        assert "SECRET" not in answer.content.decode(), address


@pytest.mark.django_db
def test_a_change_of_what_is_not_shown_is_audited_and_half_an_address_is_refused() -> None:
    hook, _ = webhooks.create(SYSTEM, "chat", SLACK)
    webhooks.update(SYSTEM, hook, url=addresses.shown(SLACK))
    assert hook.url == SLACK
    webhooks.update(SYSTEM, hook, url=f"{SLACK}2")
    assert hook.url == f"{SLACK}2"
    entry = AuditEntry.objects.get(what="webhook changed")
    assert (entry.after or {})["url"] == "https://hooks.slack.example/… (another one, in what is not shown)"
    with pytest.raises(InvalidError, match="Enter the complete URL"):
        webhooks.update(SYSTEM, hook, url="https://elsewhere.example/…")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "answer",
    ["Cannot POST /hook/T0PATHSECRET", "no \\/T0PATHSECRET here", "x" * 190 + " /hook/T0PATHSECRET is unknown"],
)
def test_an_answer_that_repeats_the_address_is_told_without_it(answer: str) -> None:
    with receiver(404, body=answer.encode()) as there:
        hook_to(f"{there.url}/T0PATHSECRET")
        services.emit("job.finished", data={})
        sending.deliver()
    problem = Delivery.objects.get().problem
    assert problem.startswith("The server answered 404: ")
    assert "PATHSEC" not in problem
    assert len(problem) <= len("The server answered 404: ") + posting.KEPT
    assert not Alert.objects.exists()
