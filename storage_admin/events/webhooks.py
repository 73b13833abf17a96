"""Writes: webhooks, their secrets, tests, deliveries that are sent once more. For admins who are limited to no host."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin import sealing
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.errors import Faults, InvalidError, of_field, require_right
from storage_admin.events import addresses, sending, signing, tasks
from storage_admin.events.models import Delivery, Event, Webhook
from storage_admin.events.services import NAMES, close_alert

#: After a rotation, signatures are made with the secret before it too for so long.
BOTH = timedelta(hours=24)
TEST = "test"
LONGEST_NAME = 100


def create(
    actor: Actor, name: str, url: str, *, events: Iterable[str] = (), enabled: bool = True
) -> tuple[Webhook, str]:
    """Makes a webhook.

    Args:
        events: names of events; none means all of them.

    Returns:
        The webhook and its secret, which cannot be shown again.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: values cannot be taken; it names all of them.
    """
    actor.require_everywhere(Role.ADMIN)
    secret = signing.new_secret()
    with transaction.atomic():
        values = _checked({"name": name, "url": url, "events": events}, None)
        hook = Webhook.objects.create(
            **values, enabled=enabled, secret_locked=sealing.lock(secret), created_by=actor.name
        )
        audit(actor, "webhook created", hook.name, after=_told(hook))
    return hook, secret


def update(
    actor: Actor,
    hook: Webhook,
    *,
    name: str | None = None,
    url: str | None = None,
    events: Iterable[str] | None = None,
    enabled: bool | None = None,
) -> Webhook:
    """Changes a webhook; ``None`` leaves a value as it is, and so does the address as it is shown.

    What is due to one that is switched off is given up.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: values cannot be taken; it names all of them.
    """
    actor.require_everywhere(Role.ADMIN)
    with transaction.atomic():
        before, before_url = _told(hook), hook.url
        if url is not None and addresses.stands_for(url, hook.url):
            url = None
        for column, value in _checked({"name": name, "url": url, "events": events}, hook).items():
            setattr(hook, column, value)
        if enabled is not None:
            hook.enabled = enabled
        hook.save(update_fields=["name", "url", "events", "enabled"])
        if not hook.enabled:
            _give_up(hook)
        after = _told(hook)
        if hook.url != before_url and after["url"] == before["url"]:
            after["url"] += " (another one, in what is not shown)"
        if after != before:
            audit(actor, "webhook changed", hook.name, before=before, after=after)
    return hook


def rotate(actor: Actor, hook: Webhook) -> str:
    """Gives a webhook another secret. For ``BOTH`` from now on, what is sent is signed with the one before it too.

    Returns:
        The secret, which cannot be shown again.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
    """
    actor.require_everywhere(Role.ADMIN)
    secret = signing.new_secret()
    with transaction.atomic():
        hook.old_secret_locked, hook.old_secret_until = bytes(hook.secret_locked), timezone.now() + BOTH
        hook.secret_locked = sealing.lock(secret)
        hook.save(update_fields=["secret_locked", "old_secret_locked", "old_secret_until"])
        audit(actor, "webhook secret rotated", hook.name, after={"old_until": hook.old_secret_until.isoformat()})
    return secret


def remove(actor: Actor, hook: Webhook) -> None:
    """Takes a webhook away, with the history of its deliveries.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
    """
    actor.require_everywhere(Role.ADMIN)
    with transaction.atomic():
        audit(actor, "webhook deleted", hook.name, before=_told(hook))
        close_alert(sending.given_up_key(Delivery(webhook_id=hook.pk)))
        hook.delete()


def send_test(actor: Actor, hook: Webhook) -> Delivery:
    """Sends one webhook an event ``test``; how it went stands in the delivery soon.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: the webhook is switched off.
    """
    actor.require_everywhere(Role.ADMIN)
    if not hook.enabled:
        raise InvalidError(
            _("{hook} is disabled: enable it first.").format(hook=hook.name), {"enabled": _("The webhook is disabled.")}
        )
    with transaction.atomic():
        delivery = Delivery.objects.create(event=_test(actor), webhook=hook)
        audit(actor, "webhook tested", hook.name)
        tasks.ring()
    return delivery


def send_test_mail(actor: Actor) -> list[Delivery]:
    """Sends every address of ``ALERT_EMAILS`` a test.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: there is no address.
    """
    actor.require_everywhere(Role.ADMIN)
    if not settings.ALERT_EMAILS:
        raise InvalidError(
            _("Mail is not configured. Set ALERT_EMAILS and EMAIL_URL (docs/alerts.md), then restart the dashboard.")
        )
    with transaction.atomic():
        event = _test(actor)
        sent = [Delivery.objects.create(event=event, recipients=[address]) for address in settings.ALERT_EMAILS]
        audit(actor, "mail tested", ", ".join(settings.ALERT_EMAILS))
        tasks.ring()
    return sent


def resend(actor: Actor, delivery: Delivery) -> Delivery:
    """Sends a delivery once more, at once, whether it had arrived or was given up.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
        InvalidError: it is on its way, its webhook is switched off, or its address is told of nothing any more.
    """
    actor.require_everywhere(Role.ADMIN)
    if sending.is_for_nobody(delivery):
        raise InvalidError(
            _(
                "Mail is no longer sent to {recipients}, because the address is not in ALERT_EMAILS. Add it there "
                "first."
            ).format(recipients=delivery.recipients[0])
        )
    if delivery.webhook is not None and not delivery.webhook.enabled:
        raise InvalidError(_("{webhook} is disabled: enable it first.").format(webhook=delivery.webhook.name))
    if delivery.state == Delivery.State.DUE and not delivery.attempts:
        raise InvalidError(_("The delivery is already pending."))
    with transaction.atomic():
        sending.put_again(Delivery.objects.filter(pk=delivery.pk), timezone.now())
        audit(actor, "delivery sent again", delivery.webhook or delivery.recipients[0], after={"delivery": delivery.pk})
        tasks.ring()
    delivery.refresh_from_db()
    return delivery


def _test(actor: Actor) -> Event:
    return Event.objects.create(
        name=TEST,
        data={"title": "Test message from Storage Admin", "detail": f"{actor.name} sent this test."},
    )


def _give_up(hook: Webhook) -> None:
    due = Delivery.objects.filter(webhook=hook, state=Delivery.State.DUE)
    due.update(state=Delivery.State.GIVEN_UP, problem="The webhook was disabled before the delivery succeeded.")
    close_alert(sending.given_up_key(Delivery(webhook_id=hook.pk)))


def _checked(given: dict[str, Any], hook: Webhook | None) -> dict[str, Any]:
    """The values that were given as they are kept; ``None`` gives none. Raises InvalidError, which names all faults."""
    checks: dict[str, Callable[[Any], Any]] = {
        "name": lambda name: _named(name, hook), "url": addresses.checked, "events": _known,
    }  # fmt: skip
    values, faults = dict[str, Any](), Faults()
    for column, value in given.items():
        with faults:
            if value is not None:
                values[column] = checks[column](value)
    require_right(faults)
    return values


def _named(name: str, hook: Webhook | None) -> str:
    name = name.strip()
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise of_field("name", _("Enter a name of at most {longest} visible characters.").format(longest=LONGEST_NAME))
    if Webhook.objects.filter(name=name).exclude(pk=hook.pk if hook else 0).exists():
        raise of_field("name", _("A webhook named {name} already exists. Choose another name.").format(name=name))
    return name


def _known(events: Iterable[str]) -> list[str]:
    wanted = set(events)
    if unknown := sorted(wanted - NAMES.keys()):
        sentence = _("There is no event {unknown!r}. Available events: {names}.")
        raise of_field("events", sentence.format(unknown=unknown[0], names=", ".join(NAMES)))
    return sorted(wanted)


def _told(hook: Webhook) -> dict[str, Any]:
    """A webhook as the audit trail knows it."""
    return {"name": hook.name, "url": addresses.shown(hook.url), "events": hook.events, "enabled": hook.enabled}
