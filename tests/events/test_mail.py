"""Alerts by mail, to a real mail server."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.alert_rules.looking import look
from storage_admin.accounts.models import SYSTEM, Actor, ForbiddenError, Role
from storage_admin.errors import InvalidError
from storage_admin.events import mailing, sending, services, webhooks
from storage_admin.events.models import Alert, Delivery, Event
from storage_admin.events.services import Trouble
from tests.events.conftest import try_until_the_end
from tests.harness.mailbox import mailbox
from tests.harness.processes import free_port

pytestmark = pytest.mark.django_db
FULL = Trouble("pool_over_threshold:1", "danger", "a / images is over\nits threshold", "96 % used: 96 of 100 GiB.", "a")
ANN, BOB = "ann@example.org", "bob@example.org"


@pytest.fixture(autouse=True)
def _mail(settings: Any) -> None:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", free_port()
    settings.ALERT_EMAILS = [ANN, BOB]
    settings.DEFAULT_FROM_EMAIL = "Storage Admin <sa@example.org>"
    settings.PUBLIC_URL = "https://storage.example.org"


def test_an_alert_and_its_end_are_told_by_mail(settings: Any) -> None:
    with mailbox() as box:
        settings.EMAIL_PORT = box.port
        services.raise_alert(FULL)
        assert sending.deliver() == 2
        services.close_alert(FULL.key)
        assert sending.deliver() == 2
    assert [recipients for recipients, _ in box.got] == [[ANN], [BOB], [ANN], [BOB]]
    opened, closed = box.got[0][1], box.got[2][1]
    assert opened["Subject"] == "[Storage Admin] Danger: a / images is over its threshold"
    assert closed["Subject"] == "[Storage Admin] Resolved: a / images is over its threshold"
    text = opened.get_content()
    assert "96 % used: 96 of 100 GiB." in text
    assert f"https://storage.example.org/alerts/{Alert.objects.get().pk}/" in text
    assert "Until: " in closed.get_content()
    assert len({message["Message-ID"] for _, message in box.got}) == 4
    assert box.got[0][1]["From"] == "Storage Admin <sa@example.org>"


def test_a_mail_server_that_is_away_is_tried_again(settings: Any) -> None:
    services.raise_alert(FULL)
    now = timezone.now()
    sending.deliver(now)
    tried = Delivery.objects.get(attempts=1)
    assert tried.problem.startswith("The mail server cannot be used: ")
    assert tried.next_try == now + timedelta(seconds=10)
    assert Delivery.objects.filter(attempts=0).count() == 1, "nobody answers there: one try a round is enough"
    with mailbox(later=1) as box:
        settings.EMAIL_PORT = box.port
        sending.deliver(now + timedelta(seconds=11))
        assert sorted(Delivery.objects.values_list("state", "status_code")) == [("due", 451), ("sent", None)]
        sending.deliver(now + timedelta(minutes=5))
    assert set(Delivery.objects.values_list("state", flat=True)) == {"sent"}
    assert sorted(recipients[0] for recipients, _ in box.got) == [ANN, BOB]


def test_an_address_that_is_refused_does_not_keep_the_others_from_theirs(settings: Any) -> None:
    with mailbox(refused={ANN}) as box:
        settings.EMAIL_PORT = box.port
        services.raise_alert(FULL)
        try_until_the_end()
    assert [recipients for recipients, _ in box.got] == [[BOB]]
    given_up = Delivery.objects.get(state="given_up")
    assert (given_up.recipients, given_up.status_code) == ([ANN], 550)
    assert given_up.problem == "The mail server rejected the address: no such user"
    assert Alert.objects.get(kind="delivery_given_up").title == f"{ANN} does not receive events"


def test_the_test_mail_goes_to_everybody(settings: Any) -> None:
    with mailbox() as box:
        settings.EMAIL_PORT = box.port
        webhooks.send_test_mail(SYSTEM)
        sending.deliver()
    assert [message["Subject"] for _, message in box.got] == ["[Storage Admin] Test message from Storage Admin"] * 2
    with pytest.raises(ForbiddenError):
        webhooks.send_test_mail(Actor("op", Role.OPERATOR))
    settings.ALERT_EMAILS = []
    with pytest.raises(InvalidError, match="ALERT_EMAILS"):
        webhooks.send_test_mail(SYSTEM)


@pytest.mark.parametrize("name", ["a\r\nBcc: eve@example.org", "a\u2028b", "a\x00b", "=?utf-8?q?x?=", "\x0b\x85"])
def test_a_hostile_name_makes_no_header_and_holds_up_nothing(settings: Any, name: str) -> None:
    settings.ALERT_EMAILS = [ANN]
    told = {"title": name, "detail": name, "severity": "danger"}
    event = Event(pk=7, name=services.ALERT_OPENED, host=name, data=told)
    with mailbox() as box:
        settings.EMAIL_PORT = box.port
        outcome = mailing.send(Delivery(pk=3, event=event, recipients=[ANN]))
    assert outcome.problem == ""
    [(recipients, message)] = box.got
    assert recipients == [ANN]
    assert message["Bcc"] is None
    assert "\n" not in message["Subject"]


def test_what_no_mail_can_carry_is_a_failure_like_any_other(settings: Any) -> None:
    event = Event(pk=7, name=services.ALERT_OPENED, data={"title": "\udc80"})
    with mailbox() as box:
        settings.EMAIL_PORT = box.port
        outcome = mailing.send(Delivery(pk=3, event=event, recipients=[ANN]))
    assert outcome.problem.startswith("The event cannot be sent as mail")
    assert box.got == []


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request", b"\x00\x15\x03\x01", b"012 hello", b"-12"])
def test_what_answers_without_being_a_mail_server_is_given_up_like_one_that_is_away(settings: Any, says: bytes) -> None:
    settings.ALERT_EMAILS = [ANN]
    services.raise_alert(FULL)
    now = timezone.now()
    with mailbox(greeting=says) as box:
        settings.EMAIL_PORT = box.port
        for delay in (timedelta(0), *sending.DELAYS):
            now += delay
            assert sending.deliver(now) == 0
    delivery = Delivery.objects.get(event__data__title=FULL.title)
    assert (delivery.state, delivery.status_code, delivery.attempts) == ("given_up", None, 7)
    assert delivery.problem.startswith("The server does not respond like a mail server: ")
    assert "\x00" not in delivery.problem + Alert.objects.get(kind="delivery_given_up").detail


def test_no_control_characters_of_what_a_mail_server_says_are_kept(settings: Any) -> None:
    settings.ALERT_EMAILS = [ANN]
    services.raise_alert(FULL)
    with mailbox(greeting=b"554 go\x00 \x1b[31maway") as box:
        settings.EMAIL_PORT = box.port
        sending.deliver()
    delivery = Delivery.objects.get()
    assert (delivery.status_code, delivery.problem) == (554, "The mail server answered 554: go [31maway")


def test_an_address_that_is_told_of_nothing_any_more_has_no_open_alert_and_gets_nothing(settings: Any) -> None:
    with mailbox(refused={ANN, BOB}) as box:
        settings.EMAIL_PORT = box.port
        services.raise_alert(FULL)
        now = try_until_the_end()
    keys = Alert.objects.filter(kind="delivery_given_up", closed=None).values_list("key", flat=True)
    assert set(keys.all()) == {f"delivery_given_up:mail:{ANN}", f"delivery_given_up:mail:{BOB}"}
    settings.ALERT_EMAILS = [BOB]
    look(now)
    assert list(keys.all()) == [f"delivery_given_up:mail:{BOB}"]
    with mailbox() as box:
        settings.EMAIL_PORT = box.port
        sending.deliver(now + timedelta(hours=1))
    assert {recipients[0] for recipients, _ in box.got} == {BOB}
    dropped = Delivery.objects.filter(problem="Its address is no longer in ALERT_EMAILS.")
    assert {(one.recipients[0], one.state) for one in dropped} == {(ANN, "given_up")}
    old = Delivery.objects.get(recipients=[ANN], event__data__title=FULL.title)
    with pytest.raises(InvalidError, match=f"no longer sent to {ANN}"):
        webhooks.resend(SYSTEM, old)
    settings.ALERT_EMAILS = [ANN, BOB]
    assert webhooks.resend(SYSTEM, old).state == "due"
