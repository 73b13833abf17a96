"""Policies: the list, one with its history, what it would do now; the switch for all automation."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http.response import HttpResponseBase, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from images.models import Policy, PolicyRun
from images.policies import selectors, services
from images.policies.preview import WINDOWS, preview
from images.policies.reasons import NOT_MEANT
from images.policies.scope import hosts_of, policies_for, policy_for
from images.policies.shape import Rules
from storage_admin.accounts.models import Actor, Role
from storage_admin.csv_export import Columns, csv_answer, in_parts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import automation, kinds
from storage_admin.web.page import PageRequest, attempt, local, page, paginated, wants_fragment

RUNS_PER_PAGE, SHOWN = 20, 25


def _of_run(name: str, line: dict[str, Any]) -> object:
    return getattr(line["run"], name) if line["run"] else None


def _of_sums(name: str, line: dict[str, Any]) -> object:
    return getattr(line["sums"], name) if line["sums"] else None


def _counted(state: str, line: dict[str, Any]) -> object:
    return line["sums"].counts.get(state, 0) if line["sums"] else None


CSV_COLUMNS: Columns = {
    "id": lambda line: line["policy"].pk,
    "name": lambda line: line["policy"].name,
    "kind": lambda line: line["policy"].kind,
    "options": lambda line: line["policy"].options or None,
    "enabled": lambda line: line["policy"].enabled,
    "cron": lambda line: line["policy"].cron,
    "timezone": lambda line: line["policy"].timezone,
    "window_minutes": lambda line: line["policy"].window_minutes,
    "opens_next": lambda line: line["next"].opens if line["next"] else None,
    "last_run": partial(_of_run, "pk"),
    "last_run_due": partial(_of_run, "due"),
    "last_run_state": partial(_of_run, "state"),
    "last_run_detail": partial(_of_run, "detail"),
    "jobs": partial(_of_sums, "jobs"),
    "failed": partial(_counted, "failed"),
    "predicted_bytes": partial(_of_sums, "predicted"),
    "won_bytes": partial(_of_sums, "won"),
    "held_bytes": partial(_of_sums, "held"),
    "created": lambda line: line["policy"].created,
    "created_by": lambda line: line["policy"].created_by,
}


@require_safe
@page()
def policies(request: PageRequest) -> HttpResponseBase:
    """All policies: when each opens next, and what its last run won."""
    context = {"section": "policies", "lines": _listed(request.actor), "switch": automation.state()}
    return render(request, "policies/list.html", context)


@require_safe
@page()
def policies_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list."""
    return csv_answer("policies", CSV_COLUMNS, _listed(request.actor))


def _listed(actor: Actor) -> list[dict[str, Any]]:
    rows = list(policies_for(actor))
    last = selectors.last_runs(actor, rows)
    sums = selectors.sums_of(last.values())
    now = timezone.now()
    lines = []
    for policy in rows:
        run = last.get(policy.pk)
        coming, problem = selectors.coming(policy, now, 1)
        lines.append(
            {
                "policy": policy, "title": kinds.get(policy.kind).titled(policy.options),
                "next": coming[0] if coming else None, "problem": problem,
                "run": run, "sums": sums[run.pk] if run else None,
            }
        )  # fmt: skip
    return lines


@require_safe
@page()
def policy(request: PageRequest, policy_id: int) -> HttpResponseBase:
    """One policy: its rules, its next windows, its runs."""
    row = policy_for(request.actor, policy_id)
    coming, problem = selectors.coming(row, timezone.now(), WINDOWS)
    runs = paginated(request, selectors.runs_of(request.actor, row), RUNS_PER_PAGE)
    sums = selectors.sums_of(runs.object_list)
    kind = kinds.get(row.kind)
    context = {
        "section": "policies",
        "policy": row,
        "kind": kind,
        "switches": [(word, getattr(row, name)) for name, word in kind.policy_switches.items()],
        "options": _told(row),
        "hosts": Host.objects.filter(pk__in=row.hosts),
        "pools": StoragePool.objects.filter(pk__in=row.pools).select_related("host"),
        "windows": coming,
        "problem": problem,
        "rows": runs,
        "runs": [(run, sums[run.pk]) for run in runs.object_list],
    }
    return render(request, "policies/policy.html", context)


RUNS_CSV: Columns = {
    "id": lambda line: line["run"].pk,
    "due": lambda line: line["run"].due,
    "ends": lambda line: line["run"].ends,
    "by": lambda line: line["run"].by,
    "state": partial(_of_run, "state"),
    "detail": partial(_of_run, "detail"),
    "started": partial(_of_run, "started"),
    "finished": partial(_of_run, "finished"),
    "jobs": partial(_of_sums, "jobs"),
    "failed": partial(_counted, "failed"),
    "left_out": partial(_counted, "skipped"),
    "predicted_bytes": partial(_of_sums, "predicted"),
    "won_bytes": partial(_of_sums, "won"),
    "held_bytes": partial(_of_sums, "held"),
}


@require_safe
@page()
def policy_runs_csv(request: PageRequest, policy_id: int) -> HttpResponseBase:
    """All runs of a policy, the latest first."""
    runs = selectors.runs_of(request.actor, policy_for(request.actor, policy_id))
    return csv_answer(f"policy-{policy_id}-runs", RUNS_CSV, _with_sums(runs))


def _with_sums(runs: QuerySet[PolicyRun]) -> Iterator[dict[str, Any]]:
    for part in in_parts(runs):
        sums = selectors.sums_of(part)
        # A window that was missed looked at nothing: 0 would say that it had.
        yield from ({"run": run, "sums": None if run.state == PolicyRun.State.MISSED else sums[run.pk]} for run in part)


def _told(row: Policy) -> list[tuple[str, Any]]:
    """The options that are not as the kind's defaults have them."""
    defaults = kinds.get(row.kind).properties
    return [(name, value) for name, value in row.options.items() if value != defaults.get(name, {}).get("default")]


@require_safe
@page(Role.OPERATOR)
def policy_preview(request: PageRequest, policy_id: int) -> HttpResponseBase:
    """Today's choice, and everything that is left out."""
    row = policy_for(request.actor, policy_id)
    rules, code = Rules.of(row), request.GET.get("code", "")
    begin = {name: _whole(request.GET.get(name)) for name in ("chosen", "skipped")}
    found = preview(
        rules, timezone.now(), limit=SHOWN, chosen_from=begin["chosen"], skipped_from=begin["skipped"],
        code=code, hosts=hosts_of(request.actor),
    )  # fmt: skip
    context = {
        "section": "policies", "policy": row, "preview": found, "code": code, "begin": begin,
        "strangers": code in NOT_MEANT, "target_kind": rules.target_kind, "per_page": SHOWN,
        "address": reverse("policy_preview", args=[row.pk]),
        "running": row.runs.filter(state=PolicyRun.State.RUNNING).exists(),
        "to": {
            "chosen": begin["chosen"] + len(found.chosen),
            "skipped": begin["skipped"] + len(found.skipped),
        },
    }  # fmt: skip
    template = "policies/preview.html" + ("#choice" if wants_fragment(request) else "")
    return render(request, template, context)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 10 else 0


@require_POST
@page(Role.OPERATOR)
def policy_run_now(request: PageRequest, policy_id: int) -> HttpResponseBase:
    """Begins a run by hand."""
    row = policy_for(request.actor, policy_id)
    run = attempt(request, lambda: services.run_now(request.actor, row))
    return redirect("policy_run", row.pk, run.pk) if run else redirect("policy", row.pk)


@require_POST
@page(Role.ADMIN)
def policy_remove(request: PageRequest, policy_id: int) -> HttpResponseBase:
    """Deletes a policy with its history."""
    row = policy_for(request.actor, policy_id)
    services.remove(request.actor, row)
    messages.success(request, _("The policy {row} was deleted. Its jobs stay in the job list.").format(row=row.name))
    return redirect("policies")


@require_POST
@page(Role.ADMIN, everywhere=True)
def automation_switch(request: PageRequest) -> HttpResponseBase:
    """Pauses all automation, or lets it go on."""
    paused = request.POST.get("paused") == "true"
    automation.switch(request.actor, paused=paused, reason=request.POST.get("reason", "").strip())
    messages.success(request, _("Automation is paused.") if paused else _("Automation is resumed."))
    return HttpResponseRedirect(local(request.POST.get("next", ""), reverse("policies")))
