"""Deliveries to a real HTTP receiver: signed, retried with growing delays, given up and told, never redirected."""

import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from storage_admin.events import posting, sending, services, signing
from storage_admin.events.models import Alert, Delivery, Event
from tests.events.conftest import SECRET, hook_to, try_until_the_end
from tests.harness.processes import wait_until
from tests.harness.receiver import Receiver, receiver
from tests.jobs.test_claims import at_once
from tests.working import reread

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.sql]
DOCS = Path(__file__).parents[2] / "docs" / "alerts.md"


def emitted(count: int = 1) -> None:
    for number in range(count):
        services.emit(
            "job.finished", host="alpha", data={"id": number, "label": "Gr\N{LATIN SMALL LETTER O WITH DIAERESIS}ße"}
        )


def sent(*answers: int | str, **settings: Any) -> tuple[Receiver, Delivery]:
    """A receiver that an event was sent to, which answers so, and the delivery."""
    with receiver(*answers, **settings) as there:
        hook_to(there.url)
        emitted()
        sending.deliver()
    return there, Delivery.objects.get()


def as_documented() -> Any:
    """The function that the documentation gives to receivers."""
    [code] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["verified"]


def test_what_arrives_is_signed_as_the_documentation_verifies_it() -> None:
    there, delivery = sent()
    [got] = there.got
    assert (delivery.state, delivery.status_code, delivery.attempts, delivery.problem) == ("sent", 200, 1, "")
    assert got.headers["X-Storage-Admin-Event"] == "job.finished"
    assert got.headers["X-Storage-Admin-Delivery"] == str(delivery.pk)
    assert (got.json["event"], got.json["host"], got.json["data"]["id"]) == ("job.finished", "alpha", 0)
    verified = as_documented()
    header = got.headers["X-Storage-Admin-Signature"]
    assert verified(SECRET, header, got.body)
    assert not verified(SECRET, header, got.body + b" ")
    assert not verified("another secret", header, got.body)
    assert not verified(SECRET, header.replace("t=1", "t=2"), got.body)
    old = signing.signature([SECRET], int(timezone.now().timestamp()) - 3600, got.body)
    assert not verified(SECRET, old, got.body), "what was recorded is played again"


def test_an_error_is_tried_again_with_growing_delays_until_it_is_taken() -> None:
    with receiver(500, 503, 200, body=b"<b>not\nnow</b>") as there:
        hook_to(there.url)
        emitted()
        now = timezone.now()
        sending.deliver(now)
        delivery = Delivery.objects.get()
        assert (delivery.state, delivery.status_code) == ("due", 500)
        assert delivery.problem == "The server answered 500: <b>not now</b>"
        assert delivery.next_try == now + timedelta(seconds=10)
        sending.deliver(now + timedelta(seconds=9))
        assert len(there.got) == 1, "too early"
        sending.deliver(now + timedelta(seconds=10))
        assert reread(delivery).next_try == now + timedelta(seconds=10) + timedelta(minutes=1)
        sending.deliver(now + timedelta(minutes=2))
    assert (reread(delivery).state, delivery.attempts, delivery.problem) == ("sent", 3, "")
    assert len({got.body for got in there.got}) == 1, "the same event is the same body"
    assert len({got.headers["X-Storage-Admin-Delivery"] for got in there.got}) == 1


def test_after_the_last_try_it_is_given_up_and_an_alert_says_so_until_something_arrives() -> None:
    with receiver(500, body=b"") as there:
        hook = hook_to(there.url, events=["job.finished"])
        emitted()
        now = try_until_the_end()
        assert len(there.got) == len(sending.DELAYS) + 1
        assert Delivery.objects.get().state == "given_up"
        alert = Alert.objects.get(closed=None)
        assert (alert.kind, alert.target_id) == ("delivery_given_up", hook.pk)
        assert alert.title == "The webhook ops does not receive events"
        sending.deliver(now + timedelta(days=1))
        assert len(there.got) == len(sending.DELAYS) + 1, "given up means given up"
        there.answers = [204]
        emitted()
        sending.deliver(timezone.now() + timedelta(days=1))
    assert not Alert.objects.filter(closed=None).exists()


@pytest.mark.parametrize("elsewhere", ["/elsewhere", "http://["], ids=["an address", "no address"])
def test_a_redirect_is_not_followed(elsewhere: str) -> None:
    there, delivery = sent(302, elsewhere=elsewhere)
    assert [got.path for got in there.got] == ["/hook"]
    assert (delivery.status_code, delivery.problem[:27]) == (302, "The server redirected (302)")


def test_of_a_long_answer_little_is_kept() -> None:
    _, delivery = sent(500, body=b"\x1b[31m" + b"x" * 100_000)
    assert len(delivery.problem) == len("The server answered 500: ") + posting.KEPT
    assert "\x1b" not in delivery.problem


@pytest.mark.parametrize("answer", [200, 302, 307, 500])
def test_of_a_long_answer_little_is_taken(answer: int) -> None:
    there, delivery = sent(answer, body=bytes(64 << 20))
    assert (delivery.status_code, len(there.got)) == (answer, 1)
    assert there.sent < 16 << 20, "more than what the kernel holds on the way"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("hang", "No response within 0 seconds."),
        ("drip", "The response was not complete within 1 seconds."),
        ("close", "The connection failed: "),
    ],
)
def test_a_receiver_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, answer: str, said: str) -> None:
    monkeypatch.setattr(posting, "READ", 0.4)
    monkeypatch.setattr(posting, "WHOLE", 1.0)
    began = timezone.now()
    with receiver(answer) as there:
        hook_to(there.url)
        emitted(3)
        assert sending.deliver() == 0
        assert len(there.got) == 1, "who does not answer is asked for one thing a round"
    assert (timezone.now() - began).total_seconds() < 3
    tried = Delivery.objects.get(attempts=1)
    assert tried.problem.startswith(said)
    assert tried.status_code is None


def test_nobody_listens() -> None:
    with receiver() as there:
        pass
    hook_to(there.url)
    emitted()
    sending.deliver()
    assert Delivery.objects.get().problem == "Connection refused."


def test_a_name_that_leads_to_a_machines_own_link_is_not_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loopback stands in for the link here: what counts is the address that was connected to, not the name.
    monkeypatch.setattr(posting, "forbidden", lambda host: host == "127.0.0.1")
    with receiver() as there:
        hook_to(there.url.replace("127.0.0.1", "localhost"))
        emitted()
        sending.deliver()
    assert there.got == []
    assert Delivery.objects.get().problem == "The host name resolves to a link-local address, which is not allowed."


def test_the_address_does_not_stand_in_what_went_wrong() -> None:
    hook_to("http://127.0.0.1:9/hook?token=very-secret")
    hook_to("https://does-not-exist.invalid/?token=very-secret", name="other")
    emitted()
    sending.deliver()
    problems = list(Delivery.objects.values_list("problem", flat=True))
    assert len(problems) == 2
    assert all(problem and "very-secret" not in problem for problem in problems)


def test_a_slow_receiver_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "READ", 1.5)
    with receiver("hang") as slow, receiver() as quick:
        hook_to(slow.url, name="a slow one")
        hook_to(quick.url, name="quick")
        emitted(5)
        work = threading.Thread(target=at_once, args=(1, lambda _: sending.deliver()))
        work.start()
        wait_until(lambda: len(quick.got) == 5, 1, "the quick one has them all")
        assert work.is_alive()
        work.join(10)
    assert Delivery.objects.filter(webhook__name="quick", state="sent").count() == 5


def test_of_two_senders_at_once_each_delivery_is_sent_by_one() -> None:
    with receiver(slow=0.01) as there:
        hook_to(there.url)
        emitted(20)
        assert sum(at_once(4, lambda _: sending.deliver())) == 20
    assert sorted(got.json["data"]["id"] for got in there.got) == list(range(20))
    assert set(Delivery.objects.values_list("attempts", "state")) == {(1, "sent")}


def test_who_comes_late_does_not_overwrite_what_another_sender_has_written() -> None:
    hook_to("http://127.0.0.1:9/")
    emitted()
    now = timezone.now()
    ours, theirs = Delivery.objects.get(), Delivery.objects.get()
    assert sending.claim(ours, now)
    assert not sending.claim(theirs, now), "it is at work"
    assert sending.claim(reread(theirs), now + sending.LEASE), "whoever held it has died"
    sending.record(theirs, posting.Outcome(200), now)
    sending.record(ours, posting.Outcome(None, "too late"), now)
    assert Delivery.objects.get().state == "sent"


def test_what_is_old_is_forgotten_but_not_what_is_on_its_way() -> None:
    with receiver() as there:
        hook_to(there.url)
        emitted(2)
        sending.deliver()
        emitted()
        Event.objects.update(at=timezone.now() - timedelta(days=31))
        emitted()
    assert sending.forget(timezone.now(), timedelta(days=30)) == 2
    assert Event.objects.count() == 2


@pytest.mark.parametrize(
    "url", ["http://a..b/hook", f"http://{'x' * 64}.example.org/hook", "http://*.example.org/hook"]
)
def test_an_address_that_was_taken_and_cannot_be_one_is_a_failure_like_any_other(url: str) -> None:
    hook_to(url)
    emitted()
    try_until_the_end()
    delivery = Delivery.objects.get(event__name="job.finished")
    assert (delivery.state, delivery.status_code, delivery.problem) == ("given_up", None, "Invalid URL.")


def test_what_nobody_thought_of_holds_up_nothing_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    post = posting.post

    def failing(url: str, body: bytes, headers: dict[str, str]) -> posting.Outcome:
        if "bad" in url:
            raise RuntimeError("a bug, with what stands in it")
        return post(url, body, headers)

    monkeypatch.setattr(posting, "post", failing)
    with receiver() as there:
        hook_to("http://bad.invalid/", name="bad")
        hook_to(there.url, name="good")
        emitted()
        assert sending.deliver() == 1
        try_until_the_end(timezone.now() + timedelta(seconds=10))
    delivery = Delivery.objects.get(webhook__name="bad", event__name="job.finished")
    assert (delivery.state, delivery.attempts) == ("given_up", len(sending.DELAYS) + 1)
    assert delivery.problem == "The dashboard could not send the event: RuntimeError. See the worker's log."


def test_an_outcome_that_no_database_takes_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "post", lambda *_given: posting.Outcome(-1, "The server answered -1."))
    hook_to("http://127.0.0.1:9/")
    emitted()
    try_until_the_end()
    delivery = Delivery.objects.get(event__name="job.finished")
    assert (delivery.state, delivery.status_code) == ("given_up", None)
