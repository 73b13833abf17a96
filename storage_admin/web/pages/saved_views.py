"""Saving, changing and deleting views of lists. Each leads back to the list that it came from."""

from django.contrib import messages
from django.http.response import HttpResponseBase, HttpResponseRedirect
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from storage_admin.accounts import saved_views
from storage_admin.accounts.models import SavedView
from storage_admin.errors import NotFoundError
from storage_admin.web.page import PageRequest, page


@require_POST
@page()
def view_save(request: PageRequest) -> HttpResponseBase:
    """Keeps the filters of the list that it was asked from."""
    given = request.POST
    try:
        view, new = saved_views.save(
            request.actor, given.get("page", ""), given.get("name", ""), given.get("query", ""),
            shared="shared" in given, default="default" in given,
        )  # fmt: skip
    except ValueError as error:
        messages.error(request, _("{error} Nothing was saved.").format(error=error))
        return _back(given.get("page", ""), given.get("query", ""))
    messages.success(
        request,
        _("“{view}” is saved.").format(view=view.name)
        if new
        else _("The filters of “{view}” were updated.").format(view=view.name),
    )
    return _back(view.page, view.query)


@require_POST
@page()
def view_change(request: PageRequest, view_id: int) -> HttpResponseBase:
    """Its name, who sees it, and whether the page opens with it. Of another's only the last."""
    view = _view(request, view_id)
    given = request.POST
    try:
        if saved_views.may_change(request.actor, view):
            view = saved_views.change(request.actor, view, name=given.get("name"), shared="shared" in given)
        saved_views.set_default(request.actor, view, on="default" in given)
    except ValueError as error:
        messages.error(request, _("{error} Nothing was changed.").format(error=error))
    else:
        messages.success(request, _("“{view}” was changed.").format(view=view.name))
    return _back(view.page, given.get("query", ""))


@require_POST
@page()
def view_delete(request: PageRequest, view_id: int) -> HttpResponseBase:
    """Takes it away. The list itself is not touched."""
    view = _view(request, view_id)
    saved_views.delete(request.actor, view)
    messages.success(request, _("The view “{view}” is deleted.").format(view=view.name))
    return _back(view.page, request.POST.get("query", ""))


def _view(request: PageRequest, view_id: int) -> SavedView:
    view = saved_views.views_for(request.actor).filter(pk=view_id).first()
    if view is None:
        raise NotFoundError(_("There is no view {view}.").format(view=view_id))
    return view


def _back(page_name: str, query: str) -> HttpResponseRedirect:
    """The list with these filters; what is no list's goes to the first page."""
    known = saved_views.pages().get(page_name)
    if known is None:
        return redirect("overview")
    try:
        cleaned = known.clean(query)
    except ValueError:
        cleaned = ""
    return HttpResponseRedirect(f"{reverse(known.name)}?{cleaned or 'view=all'}")
