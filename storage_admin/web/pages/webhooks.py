"""For admins: who is told of events, and how that went."""

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http.response import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from storage_admin.accounts.models import Role
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import NotFoundError
from storage_admin.events import addresses, selectors
from storage_admin.events import webhooks as writes
from storage_admin.events.models import Delivery, Webhook
from storage_admin.events.services import NAMES
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.page import (
    PageRequest,
    attempt,
    live,
    live_body,
    live_context,
    page,
    paginated,
    wants_fragment,
)

PER_PAGE = 50
#: Mails whose course is shown.
MAILS = 20


def _problem(delivery: Delivery) -> str:
    return addresses.without(delivery.webhook.url, delivery.problem) if delivery.webhook else delivery.problem


#: Of the address its server alone: in its path, many a receiver has its secret.
CSV_COLUMNS: Columns = {
    "id": "id",
    "name": "name",
    "server": lambda hook: addresses.server(hook.url),
    "events": lambda hook: hook.events or "everything",
    "enabled": "enabled",
    "on_their_way": "on_their_way",
    "failing": "failing",
    "given_up": "given_up",
    "last_sent": "last_sent",
    "created": "created",
    "created_by": "created_by",
}
DELIVERY_CSV_COLUMNS: Columns = {
    "id": "id",
    "webhook": lambda delivery: delivery.webhook.name if delivery.webhook else None,
    "mail_to": "recipients",
    "event": "event.name",
    "at": "event.at",
    "host": "event.host",
    "state": "state",
    "attempts": "attempts",
    "tried": "tried",
    "next_try": lambda delivery: delivery.next_try if delivery.state == Delivery.State.DUE else None,
    "status_code": "status_code",
    "problem": _problem,
    "sent": "sent",
}


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def webhooks(request: PageRequest) -> HttpResponseBase:
    """All webhooks, and mail; POST makes a webhook and shows its secret, this once."""
    request.actor.require_everywhere(Role.ADMIN)
    context: dict[str, Any] = {"section": "webhooks", "names": NAMES.items()}
    if request.method == "POST":
        form, events = Form(request), request.POST.getlist("events")
        made = form.save(lambda: writes.create(request.actor, form.text("name"), form.text("url"), events=events))
        if made is not None:
            context["hook"], context["secret"] = made
    context |= {
        "form": typed(request, request.path, {"name": "", "url": "", "events": []}),
        "hooks": [{"hook": hook, "url": addresses.shown(hook.url)} for hook in selectors.webhooks()],
        "addresses": settings.ALERT_EMAILS,
        "mails": selectors.deliveries().filter(webhook=None)[:MAILS],
    }
    return _not_kept(render(request, "webhooks/list.html", context, status=status_of(request)))


@require_safe
@page(Role.ADMIN, everywhere=True)
def webhooks_csv(_request: PageRequest) -> HttpResponseBase:
    """The whole list, without secrets."""
    return csv_answer("webhooks", CSV_COLUMNS, selectors.webhooks().defer("secret_locked", "old_secret_locked"))


@require_safe
@page(Role.ADMIN, everywhere=True)
def deliveries_csv(_request: PageRequest) -> HttpResponseBase:
    """What was sent to all webhooks and by mail, or is to be."""
    return csv_answer("deliveries", DELIVERY_CSV_COLUMNS, selectors.deliveries())


def _not_kept(answer: HttpResponse) -> HttpResponse:
    answer["Cache-Control"] = "no-store"
    return answer


def _hook(request: PageRequest, webhook_id: int) -> Webhook:
    request.actor.require_everywhere(Role.ADMIN)
    hook = selectors.webhooks().filter(pk=webhook_id).first()
    if hook is None:
        raise NotFoundError(_("There is no webhook {webhook}.").format(webhook=webhook_id))
    return hook


@require_safe
@page(Role.ADMIN)
def webhook(request: PageRequest, webhook_id: int) -> HttpResponseBase:
    """One webhook: its settings, and its deliveries as they go."""
    return _shown(request, _hook(request, webhook_id))


@require_safe
@page(Role.ADMIN)
def webhook_deliveries_csv(request: PageRequest, webhook_id: int) -> HttpResponseBase:
    """What was sent to one webhook, or is to be."""
    rows = selectors.deliveries().filter(webhook=_hook(request, webhook_id))
    return csv_answer("deliveries", DELIVERY_CSV_COLUMNS, rows)


def _shown(request: PageRequest, hook: Webhook, **more: Any) -> HttpResponse:
    rows = paginated(request, selectors.deliveries().filter(webhook=hook), PER_PAGE)
    url = f"/webhooks/{hook.pk}/?page={rows.number}"
    context: dict[str, Any] = {"hook": hook, "rows": rows}
    every = "2s" if any(row.state == Delivery.State.DUE for row in rows) else "10s"
    if wants_fragment(request):
        return live(request, "webhooks/webhook.html#deliveries", context, url=url, every=every)
    body, version = live_body(request, "webhooks/webhook.html#deliveries", context)
    kept = {"name": hook.name, "url": addresses.shown(hook.url), "events": hook.events, "enabled": hook.enabled}
    context |= {"section": "webhooks", "names": NAMES.items()} | more
    context["form"] = typed(request, reverse("webhook_change", args=[hook.pk]), kept)
    context |= live_context(body, version, url=url, every=every)
    return _not_kept(render(request, "webhooks/webhook.html", context, status=status_of(request)))


@require_POST
@page(Role.ADMIN)
def webhook_change(request: PageRequest, webhook_id: int) -> HttpResponseBase:
    """Changes a webhook."""
    hook, form = _hook(request, webhook_id), Form(request)
    saved = form.save(
        lambda: writes.update(
            request.actor, hook, name=form.text("name"), url=form.text("url"), events=request.POST.getlist("events"),
            enabled="enabled" in request.POST,
        ),
        _("The webhook was saved."),
    )  # fmt: skip
    return _shown(request, _hook(request, webhook_id)) if saved is None else redirect("webhook", webhook_id)


@require_POST
@page(Role.ADMIN)
def webhook_secret(request: PageRequest, webhook_id: int) -> HttpResponseBase:
    """Gives a webhook another secret and shows it, this once."""
    hook = _hook(request, webhook_id)
    return _shown(request, hook, secret=writes.rotate(request.actor, hook))


@require_POST
@page(Role.ADMIN)
def webhook_test(request: PageRequest, webhook_id: int) -> HttpResponseBase:
    """Sends a test."""
    hook = _hook(request, webhook_id)
    attempt(request, lambda: writes.send_test(request.actor, hook), _("The test is pending; its result appears below."))
    return redirect("webhook", webhook_id)


@require_POST
@page(Role.ADMIN)
def webhook_delete(request: PageRequest, webhook_id: int) -> HttpResponseBase:
    """Takes a webhook away."""
    hook = _hook(request, webhook_id)
    writes.remove(request.actor, hook)
    messages.success(request, _("The webhook {hook} is deleted and receives no more events.").format(hook=hook.name))
    return redirect("webhooks")


@require_POST
@page(Role.ADMIN)
def delivery_resend(request: PageRequest, delivery_id: int) -> HttpResponseBase:
    """Sends a delivery once more."""
    request.actor.require_everywhere(Role.ADMIN)
    delivery = selectors.deliveries().filter(pk=delivery_id).first()
    if delivery is None:
        raise NotFoundError(_("There is no delivery {delivery}.").format(delivery=delivery_id))
    attempt(request, lambda: writes.resend(request.actor, delivery), _("The delivery is pending again."))
    return redirect("webhook", delivery.webhook_id) if delivery.webhook_id else redirect("webhooks")


@require_POST
@page(Role.ADMIN)
def mail_test(request: PageRequest) -> HttpResponseBase:
    """Sends every address a test."""
    attempt(
        request, lambda: writes.send_test_mail(request.actor), _("The test mail is pending; its result appears below.")
    )
    return redirect("webhooks")
