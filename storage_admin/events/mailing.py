"""One event as a mail to one address, by Django's mail (``EMAIL_URL``)."""

import smtplib
from datetime import datetime

from django.conf import settings
from django.core.mail import EmailMessage

from storage_admin.events.models import Delivery, Event
from storage_admin.events.posting import Outcome, quoted

_OPENED, _WORSE, _CLOSED = "alert.opened", "alert.worse", "alert.closed"


def send(delivery: Delivery) -> Outcome:
    """Sends it. The message has the delivery's number in its ``Message-ID``: one that comes twice is the same."""
    subject, text = composed(delivery.event)
    domain = settings.DEFAULT_FROM_EMAIL.rpartition("@")[2].strip(" >") or "localhost"
    message = EmailMessage(
        subject, text, settings.DEFAULT_FROM_EMAIL, delivery.recipients,
        headers={
            "Message-ID": f"<storage-admin-{delivery.event_id}-{delivery.pk}@{domain}>",
            "Auto-Submitted": "auto-generated",
        },
    )  # fmt: skip
    try:
        message.send()
    except smtplib.SMTPResponseException as error:
        return _answered(error.smtp_code, f"The mail server answered {error.smtp_code}", error.smtp_error)
    except smtplib.SMTPRecipientsRefused as error:
        code, words = next(iter(error.recipients.values()))
        return _answered(code, "The mail server rejected the address", words)
    except (OSError, smtplib.SMTPException) as error:
        return Outcome(problem=f"The mail server cannot be used: {quoted(str(error)) or type(error).__name__}")
    except ValueError as error:
        # A text that no mail can carry is given up like any other failure, and holds up no mail after it.
        return Outcome(problem=f"The event cannot be sent as mail: {type(error).__name__}.")
    return Outcome()


def _answered(code: int, meaning: str, words: str | bytes) -> Outcome:
    """What an answer comes to. ``smtplib`` has -1 for one without a code; a mail server gives one (RFC 5321, 4.2)."""
    if 100 <= code <= 999:
        return Outcome(code, f"{meaning}: {quoted(words)}")
    return Outcome(problem=f"The server does not respond like a mail server: {quoted(words)}")


def composed(event: Event) -> tuple[str, str]:
    """Subject and text of the mail about an event."""
    data = event.data
    title = " ".join(str(data.get("title") or event.name).split())
    word = {_OPENED: str(data.get("severity", "")).capitalize(), _WORSE: "Severity raised", _CLOSED: "Resolved"}.get(
        event.name, ""
    )
    lines = [title, ""]
    if detail := str(data.get("detail") or "").strip():
        lines += [detail, ""]
    for name, value in (
        ("Host", event.host),
        ("Since", _when(data.get("opened"))),
        ("Until", _when(data.get("closed"))),
    ):
        if value:
            lines.append(f"{name}: {value}")
    if data.get("acknowledged_by"):
        lines.append(f"Acknowledged by: {data['acknowledged_by']}")
    if settings.PUBLIC_URL and data.get("url"):
        lines.append(f"{settings.PUBLIC_URL}{data['url']}")
    return f"[Storage Admin] {word}: {title}" if word else f"[Storage Admin] {title}", "\n".join(lines) + "\n"


def _when(moment: object) -> str:
    return f"{datetime.fromisoformat(str(moment)):%Y-%m-%d %H:%M} UTC" if moment else ""
