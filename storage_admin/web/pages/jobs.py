"""Jobs: the list, and one job as it works."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from images import backups, selectors, uploads
from images.models import Image
from storage_admin.accounts.models import Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.agent import protocol
from storage_admin.agent.protocol import RefusedError
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.selectors import hosts_for
from storage_admin.jobs import kinds, sealed, services
from storage_admin.jobs.filters import JobListFilters
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import LastBackup
from storage_admin.jobs.selectors import jobs_for
from storage_admin.web import forms
from storage_admin.web.forms import refusal_message
from storage_admin.web.lists import Filtered, as_choices, columns, filtered
from storage_admin.web.page import (
    PageRequest,
    attempt,
    live,
    live_body,
    live_context,
    looked_plan,
    page,
    paginated,
    shown_as,
    wants_fragment,
)
from storage_admin.web.sidebar import active_jobs
from storage_admin.web.templatetags.job_words import replaces
from storage_admin.words import words

PER_PAGE = 50
LOG_LINES = 500
STATES = (("", "all"), ("active", "active"), *((state.value, str(state.label).lower()) for state in Job.State))

#: Columns: what they are ordered by, their word, the order that a first click gives.
COLUMNS = (
    ("kind", gettext_noop("Job"), ""),
    ("state", gettext_noop("State"), ""),
    ("on", gettext_noop("On"), ""),
    (None, gettext_noop("Freed"), ""),
    ("by", gettext_noop("By"), ""),
    ("id", gettext_noop("Queued"), "-"),
    (None, gettext_noop("Duration"), ""),
)
PAGE = list_page("jobs", gettext_noop("Jobs"), JobListFilters.base_filters)


def _listed(request: PageRequest) -> Filtered[Job]:
    """The jobs that the query string asks for, the newest first unless it says otherwise."""
    return filtered(request, JobListFilters, jobs_for(request.actor).defer("plan", "commands", "options"))


@require_safe
@page()
def jobs(request: PageRequest) -> HttpResponseBase:
    """Jobs by filters. The rows refresh while a job of them is active, and look for new ones otherwise."""
    found = _listed(request)
    rows = paginated(request, selectors.Matches(found.rows), PER_PAGE)
    url = f"{reverse('jobs')}?{_without(request, 'v')}"
    values = found.values
    context = {"rows": rows, "titles": kinds.titles(), "here": url, "filtered": bool(values), "ignored": found.ignored}
    context |= {"columns": columns(COLUMNS, values.get("ordering", "-id"))}
    every = "2s" if any(job.active for job in rows) else "10s"
    if wants_fragment(request):
        return live(request, "jobs/list.html#rows", context, url=url, every=every)
    body, version = live_body(request, "jobs/list.html#rows", context)
    context |= {
        "section": "jobs",
        "states": STATES,
        "values": values,
        # What the tabs and the heads of the table, or a link to this list, have set.
        "kept": [(name, values[name]) for name in ("state", "ordering", "image", "pool", "guest") if name in values],
        "kinds": as_choices(sorted(kinds.titles().items(), key=itemgetter(1)), values.get("kind", "")),
        "hosts": as_choices(hosts_for(request.actor).values_list("pk", "name"), values.get("host", "")),
    } | live_context(body, version, url=url, every=every)
    return render(request, "jobs/list.html", context)


def _result(name: str) -> Callable[[Job], object]:
    return lambda job: (job.result or {}).get(name)


def _seconds(job: Job) -> float | None:
    return (job.finished - job.started).total_seconds() if job.finished and job.started else None


#: A line of the list as CSV.
CSV_COLUMNS: Columns = {
    "id": "pk",
    "kind": "kind",
    "state": "state",
    "host": "host.name",
    "on": "target_kind",
    "on_id": "target_id",
    "on_name": "target_label",
    "by": "created_by",
    "created": "created",
    "started": "started",
    "finished": "finished",
    "seconds": _seconds,
    "error_code": "error_code",
    "error_detail": "error_detail",
    **{
        name: _result(name)
        for name in ("before_bytes", "predicted_after_bytes", "after_bytes", "held_bytes", "freed_bytes", "freed_at")
    },
    "undo": "undo_state",
    "undo_expires": "undo_expires",
}


@require_safe
@page()
def jobs_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered and ordered."""
    return csv_answer("jobs", CSV_COLUMNS, _listed(request).exact())


@require_safe
@page()
def jobs_count(request: PageRequest) -> HttpResponseBase:
    """How many jobs are active, for the sidebar; 204 as long as these are the ones that the page has (``n``).

    Else whatever on the page shows what jobs change is told to refresh itself.
    """
    counts = active_jobs(request, request.actor)
    if request.GET.get("n") == counts["active_jobs_are"]:
        return HttpResponse(status=204)
    answer = render(request, "jobs/count.html", counts)
    answer["HX-Trigger"] = "jobs-changed"
    return answer


def _without(request: PageRequest, name: str) -> str:
    query = request.GET.copy()
    query.pop(name, None)
    return query.urlencode()


def _job(request: PageRequest, job_id: int) -> Job:
    job = jobs_for(request.actor).filter(pk=job_id).first()
    if job is None:
        raise NotFoundError(_("There is no job {job}.").format(job=job_id))
    return job


def status_of(job: Job) -> dict[str, Any]:
    """What ``jobs/status.html`` needs."""
    image = Image.objects.filter(pk=job.target_id).first() if job.target_kind == "image" else None
    title = kinds.titles().get(job.kind, job.kind)
    result = job.result or {}
    before, after = result.get("before_bytes"), result.get("after_bytes")
    return {
        "job": job,
        "title": title,
        "image": image,
        "virtual_size": image.virtual_size if image else None,
        "result": result,
        "won_bytes": None if before is None or after is None else before - after,
        "original_kept": result.get("swapped") is False and replaces(job),
        "plan": job.plan or {},
        # Beside the button that discards its undo copy.
        "backups": _backups(job, image),
        "stands": _stands(job),
        "tens": int(job.progress // 10 * 10),
    }


def _backups(job: Job, image: Image | None) -> tuple[LastBackup, ...]:
    if image is None or not job.undo_available or not job.host.runs_proxmox:
        return ()
    return backups.of_image(image)


def _stands(job: Job) -> str:
    """What a job that did not succeed, and may have changed something, can say: of itself, not of the image."""
    if job.state == Job.State.SUCCEEDED or not (job.rewrites or job.needs_recovery):
        return ""
    said = kinds.unsuccessful(job)
    if job.needs_recovery:
        return _("{cut_off} A recovery job starts automatically and cleans up what the job left behind.").format(
            cut_off=_(said.cut_off)
        )
    if job.started is None:
        return _("This job did not start and changed nothing.")
    if job.error_code == protocol.BOTH_KEPT:
        name = f".sa-{job.uid}.orig" if job.target_kind == "image" else _("a file named .sa-…orig")
        return _("The new file now has the image's name. The original is kept beside it as {name}.").format(name=name)
    if job.error_code == protocol.STRANGERS_KEPT:
        return _("Other files were given the image's name. All files are kept, some under names that begin with .sa-.")
    # What is refused or stopped is put back; where the host itself fails in the last moment, nobody is sure of that.
    failed = job.state == Job.State.FAILED and job.error_code not in protocol.REFUSALS
    left_open = failed and said.open_from in {"", job.stage}
    if left_open:
        return _("{cut_off} Scan the host to find out.").format(cut_off=_(said.cut_off))
    return said.ended and _(said.ended)


@require_safe
@page()
def job(request: PageRequest, job_id: int) -> HttpResponseBase:
    """One job: what it does now, its log as it comes, what it ran, what came of it."""
    return _shown(request, _job(request, job_id))


def _shown(request: PageRequest, row: Job, error: InvalidError | None = None) -> HttpResponseBase:
    context = status_of(row)
    url, every = reverse("job_status", args=[row.pk]), "1s" if row.active else ""
    body, version = live_body(request, "jobs/status.html", context)
    lines = row.log_lines.order_by("-id")
    shown = list(lines if "all" in request.GET else lines[:LOG_LINES])[::-1]
    context |= {"section": "jobs", "lines": shown, "earlier": lines.count() - len(shown)}
    context |= {"last": shown[-1].pk if shown else 0, "awaits_file": uploads.awaits(row), "error": error}
    context |= {"awaits_secrets": [(name, words(name).capitalize()) for name in sealed.awaited(row)]}
    context |= live_context(body, version, url=url, every=every)
    return render(request, "jobs/job.html", context, status=forms.status_of(request))


@require_safe
@page()
def job_status(request: PageRequest, job_id: int) -> HttpResponseBase:
    """The part of a job's page that changes while it works. When the job has ended, it is sent a last time."""
    row = _job(request, job_id)
    url = reverse("job_status", args=[row.pk])
    every = "1s" if row.active else ""
    return live(request, "jobs/status.html", status_of(row), url=url, every=every, beside="jobs/job.html#beside")


@require_safe
@page()
def job_log(request: PageRequest, job_id: int) -> HttpResponseBase:
    """The lines after ``?after=``, and what asks for those that follow."""
    row = _job(request, job_id)
    after = request.GET.get("after", "")
    after = after if after.isascii() and after.isdecimal() and len(after) < 20 else "0"
    lines = list(row.log_lines.filter(pk__gt=int(after))[:LOG_LINES])
    if not lines and row.active:
        return HttpResponse(status=204)
    context = {"job": row, "lines": lines, "last": lines[-1].pk if lines else after}
    # One more look after the end: the last lines are written together with it.
    context |= {"more": row.active or bool(lines)}
    return render(request, "jobs/job.html#log", context)


@require_POST
@page(Role.OPERATOR)
def job_secrets(request: PageRequest, job_id: int) -> HttpResponseBase:
    """Takes the passphrases that a job waits for; a new one has to be typed twice."""
    row = _job(request, job_id)
    given = {name: request.POST.get(name, "") for name in sealed.awaited(row)}
    try:
        again = {f"{name}_again": _("It differs from the first one.") for name in given if _differs(request, name)}
        if again:
            raise InvalidError(_("Enter the passphrase twice."), again)
        services.tell_secrets(request.actor, row, given)
    except InvalidError as error:
        return _shown(request, row, error)
    except RefusedError as error:
        messages.error(request, refusal_message(error))
    return redirect("job", row.pk)


def _differs(request: PageRequest, name: str) -> bool:
    return name.startswith("new_") and request.POST.get(f"{name}_again") != request.POST.get(name)


@require_POST
@page(Role.OPERATOR)
def job_cancel(request: PageRequest, job_id: int) -> HttpResponseBase:
    """Cancels, and goes back to the list where that was asked from it."""
    row = _job(request, job_id)
    back = request.POST.get("next", "")
    from_list = url_has_allowed_host_and_scheme(back, allowed_hosts=None) and back.startswith(reverse("jobs") + "?")
    done = _("Job {job} is cancelled.") if row.state == Job.State.QUEUED else _("Job {job} is being cancelled.")
    attempt(
        request,
        lambda: services.cancel(request.actor, row),
        done.format(job=row.pk) if from_list else "",
    )
    return redirect(back) if from_list else redirect("job", row.pk)


@require_POST
@page(Role.OPERATOR)
def job_retry(request: PageRequest, job_id: int) -> HttpResponseBase:
    row = _job(request, job_id)
    again = attempt(request, lambda: services.retry(request.actor, row))
    return redirect("job", again.pk if again else row.pk)


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.OPERATOR)
def job_undo(request: PageRequest, job_id: int) -> HttpResponseBase:
    """The plan of putting the original back; POST starts it. With ``force`` (admin) also over what was written since,
    when the job is named.
    """
    row = _job(request, job_id)
    if request.method != "POST":
        return _undo_plan(request, row)
    form, force = forms.Form(request), "force" in request.POST

    def begin() -> Job:
        if force:
            form.confirmed(f"job {row.pk}")
        return services.undo(request.actor, row, force=force)

    undo = form.save(begin)
    return redirect("job", undo.pk) if undo else _undo_plan(request, row)


@require_POST
@page(Role.ADMIN)
def job_discard_undo(request: PageRequest, job_id: int) -> HttpResponseBase:
    """Removes the undo copy for good, when the job is named; with ``force`` also where it may be all that is left."""
    row, form = _job(request, job_id), forms.Form(request)

    def begin() -> Job:
        form.confirmed(f"job {row.pk}")
        return services.discard_undo(request.actor, row, force="force" in request.POST)

    discard = form.save(begin)
    return redirect("job", discard.pk) if discard else _shown(request, row)


def _undo_plan(request: PageRequest, row: Job) -> HttpResponseBase:
    """What an undo would do; for htmx what a look at the image on its host changes of that."""
    options = {"force": "force" in (request.POST if request.method == "POST" else request.GET)}
    look = wants_fragment(request)
    plan = attempt(request, lambda: services.plan(request.actor, "undo", row.pk, options, look=look))
    if plan is None:
        return redirect("job", row.pk)
    context = {"section": "jobs", "job": row, "plan": plan, "image": Image.every.get(pk=row.target_id), **options}
    context["shown"] = shown_as(request, plan)
    if look:
        return looked_plan(request, "jobs/undo.html", context)
    return render(request, "jobs/undo.html", context, status=forms.status_of(request))
