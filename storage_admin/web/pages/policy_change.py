"""Policies are made and changed in a form that shows the choice and the next windows as it is filled in."""

from typing import Any

from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from images.models import Policy
from images.policies import services
from images.policies.preview import preview
from images.policies.scope import hosts_of, policy_for, require_reach
from images.policies.shape import Rules
from images.policies.validation import clean
from storage_admin.accounts.models import ForbiddenError, Role
from storage_admin.errors import InvalidError
from storage_admin.web.forms import Form, Wrong, status_of, wrong_of
from storage_admin.web.page import PageRequest, page, wants_fragment
from storage_admin.web.pages.policy_form import FIELDS, MIB, choices_of, least_gain, of_its_kind, texts_of, values_of

#: So many of each list are shown beside the form.
SHOWN = 8


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def policy_add(request: PageRequest) -> HttpResponseBase:
    """A new policy: GET shows the form, and the choice by what it holds; POST makes it."""
    start = Policy(cron="0 22 * * *", min_age_hours=24 * 7)
    start.min_reclaimable_bytes = int(least_gain(start.kind)) * MIB
    return _form(request, start, reverse("policy_add"))


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def policy_change(request: PageRequest, policy_id: int) -> HttpResponseBase:
    """The same for one that is there."""
    row = policy_for(request.actor, policy_id)
    return _form(request, row, reverse("policy_change", args=[row.pk]))


def _form(request: PageRequest, row: Policy, address: str) -> HttpResponseBase:
    given = request.POST if request.method == "POST" else request.GET
    asked: QueryDict = given if "cron" in given else texts_of(row)
    form = asked if row.pk else of_its_kind(asked)
    if request.method == "POST":
        sent, unread = Form(request, FIELDS), dict[str, str]()
        values = values_of(form, row, unread)
        for name, sentence in unread.items():
            sent.wrong(name, sentence)
        if saved := sent.save(
            lambda: _save(request, row, values), _("The policy {name} is saved.").format(name=values["name"])
        ):
            return redirect("policy", saved.pk)
    fresh = Policy.objects.get(pk=row.pk) if row.pk else Policy(clock=row.clock)
    context = {"section": "policies", "policy": fresh, "form": form, "address": address}
    context |= choices_of(form, request.actor, fresh) | _choice(request, fresh, form)
    if (refused := wrong_of(request)) is not None:
        context["problems"] = refused
    context["another_gain"] = form is not asked
    template = "policies/form.html"
    if wants_fragment(request) and request.method != "POST":
        # While somebody types into the options they stay as they are.
        others = form.get("options_of") != form.get("kind")
        template += "#answer_with_options" if others else "#answer"
    return render(request, template, context, status=status_of(request))


def _save(request: PageRequest, row: Policy, values: dict[str, Any]) -> Policy:
    if row._state.adding:
        return services.create(request.actor, values)
    return services.change(request.actor, row, values)


def _choice(request: PageRequest, row: Policy, form: QueryDict) -> dict[str, Any]:
    """What the policy would do if it were kept like this, or why that cannot be said."""
    wrong: dict[str, str] = {}
    try:
        draft = Policy(pk=row.pk, clock=row.clock, **values_of(form, row, wrong))
        unnamed = not draft.name
        draft.name = draft.name or "unnamed"
        draft = clean(draft, request.actor)
        require_reach(request.actor, draft, Role.ADMIN)
    except InvalidError as error:
        wrong = {FIELDS.get(name, name): text for name, text in error.fields.items()} | wrong
        return {"problems": Wrong(error.detail, wrong)}
    except ForbiddenError as error:
        return {"problems": Wrong(str(error), {"hosts": str(error)})}
    if wrong:
        return {"problems": Wrong("", wrong)}
    rules, seen = Rules.of(draft), hosts_of(request.actor)
    return {
        "preview": preview(rules, timezone.now(), limit=SHOWN, hosts=seen), "target_kind": rules.target_kind,
        "unnamed": unnamed, "timezone": draft.timezone,
    }  # fmt: skip
