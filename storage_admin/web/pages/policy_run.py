"""A policy's run: its jobs, what it left out and why; all of it as CSV."""

from typing import Any
from urllib.parse import urlencode

from django.core.paginator import Paginator
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from images.models import PolicyPick, PolicyRun
from images.policies import selectors, services
from images.policies.scope import policy_for
from images.policies.shape import Rules
from storage_admin.accounts.models import Role
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import NotFoundError
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

#: Picks of each list on one page: those that have a job or wait for one, and those that were left out.
JOBS_PER_PAGE, PICKS_PER_PAGE = 100, 100


@require_safe
@page()
def policy_run(request: PageRequest, policy_id: int, run_id: int) -> HttpResponseBase:
    """A run: its jobs, what it left out and why, what it was to win and has won.

    The two lists have pages of their own, ``jobs`` and ``page``.
    """
    run = _run(request, policy_id, run_id)
    # What the address says stays while the part that is live asks for itself, and in the links of that part.
    asked = {name: request.GET.get(name, "") for name in ("code", "page", "jobs")}
    asked = {name: text for name, text in asked.items() if text}
    code, url = asked.get("code", ""), reverse("policy_run", args=[policy_id, run_id])
    context = {
        "run": run, "policy": run.policy, "sums": selectors.sums_of([run])[run.pk], **_jobs(run, asked),
    }  # fmt: skip
    every = "2s" if run.finished is None else ""
    live_url = f"{url}?{urlencode(asked)}" if asked else url
    if wants_fragment(request) and "v" in request.GET:
        return live(request, "policies/run.html#work", context, url=live_url, every=every)
    body, version = live_body(request, "policies/run.html#work", context)
    context |= {
        "section": "policies",
        "left_out": selectors.skips_of([run], limited=request.actor.hosts is not None)[run.pk],
        "rows": paginated(request, selectors.picks_of(run, left_out=True, code=code), PICKS_PER_PAGE),
        "code": code,
        "rules": Rules.from_json(run.rules),
    } | live_context(body, version, url=live_url, every=every)
    return render(request, "policies/run.html", context)


def _jobs(run: PolicyRun, asked: dict[str, str]) -> dict[str, Any]:
    """This page of the picks that have a job or wait for one, and the links to the pages beside it."""
    jobs = Paginator(selectors.picks_of(run, left_out=False), JOBS_PER_PAGE).get_page(asked.get("jobs"))
    beside = {}
    if jobs.has_previous():
        beside["before"] = jobs.previous_page_number()
    if jobs.has_next():
        beside["behind"] = jobs.next_page_number()
    links = {name: "?" + urlencode(asked | {"jobs": str(number)}) for name, number in beside.items()}
    return {"jobs": jobs, "links": links}


#: A pick as CSV.
CSV_COLUMNS: Columns = {
    "id": "pk",
    "place": "place",
    "image_id": "image_id",
    "name": "label",
    "host": lambda pick: pick.host.name if pick.host else None,
    "pool": lambda pick: pick.pool.name if pick.pool else None,
    "state": "state",
    "code": "code",
    "reason": "reason",
    "job": "job_id",
    "predicted_bytes": "predicted_bytes",
    "won_bytes": lambda pick: _of_job(pick, "freed_bytes"),
    "held_bytes": lambda pick: _of_job(pick, "undo_bytes"),
}


def _of_job(pick: PolicyPick, name: str) -> object:
    return getattr(pick.job, name) if pick.job else None


@require_safe
@page()
def policy_run_csv(request: PageRequest, policy_id: int, run_id: int) -> HttpResponseBase:
    """All that a run looked at: the chosen in their order, then those left out by name."""
    run = _run(request, policy_id, run_id)
    return csv_answer(f"policy-run-{run.pk}", CSV_COLUMNS, selectors.picks_of(run))


@require_POST
@page(Role.OPERATOR)
def policy_run_stop(request: PageRequest, policy_id: int, run_id: int) -> HttpResponseBase:
    """Ends a run early."""
    run = _run(request, policy_id, run_id)
    attempt(
        request,
        lambda: services.stop(request.actor, run),
        _("The run was stopped. Running jobs continue until they finish."),
    )
    return redirect("policy_run", policy_id, run_id)


def _run(request: PageRequest, policy_id: int, run_id: int) -> PolicyRun:
    row = policy_for(request.actor, policy_id)
    run = selectors.runs_of(request.actor, row).filter(pk=run_id).first()
    if run is None:
        raise NotFoundError(_("There is no run {run} of this policy.").format(run=run_id))
    return run
