"""What holds for every request of somebody who is signed in in a browser."""

import logging
from collections.abc import Callable

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts import refusals, second_factor, sessions
from storage_admin.accounts.addresses import address_of
from storage_admin.accounts.authentication import sends_token
from storage_admin.accounts.directory import DeniedError
from storage_admin.accounts.ldap import DirectoryAwayError
from storage_admin.accounts.models import User
from storage_admin.accounts.tries import TooManyTriesError
from storage_admin.moments import zone_named

#: The browser's time zone, which its script tells (static/storage_admin/js/app.js).
ZONE_COOKIE = "timezone"
#: A page that refreshes itself says so with this header: nobody did anything.
REFRESH = "SA-Refresh"
TOO_MANY_REQUESTS = 429
AWAY = _("The directory does not answer, so your password was not checked. Try again later, or use a local account.")
log = logging.getLogger(__name__)
CHANGE_FIRST = _("You signed in with a one-time password. Choose a new one.")
SET_UP_FIRST = _("Your role requires a second factor. Set one up first.")


class SessionRules:
    """Ends sessions that are over, notes when somebody was here last, and has a one-time password changed and a second
    factor set up where a role needs it.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        # Whoever sends no session, such as automation with its token, costs no query here.
        if settings.SESSION_COOKIE_NAME in request.COOKIES and isinstance(request.user, User):
            now = timezone.now()
            if why := sessions.ended(request, now):
                request.session.flush()
                request.user = AnonymousUser()
                messages.info(request, why)
            elif (first := _to_do_first(request)) and (answer := _sent_there(request, *first)):
                return answer
            elif REFRESH not in request.headers:
                sessions.seen(request, now)
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """The page for who is not let in, or tries too often; REST has its own (``storage_admin/rest/errors.py``)."""
        if isinstance(error, DeniedError):
            refusals.refused(refusals.NOBODY, "sign-in denied", "", address=address_of(request), why=str(error))
            return render(request, "accounts/denied.html", {"sentence": str(error)}, status=403)
        if isinstance(error, DirectoryAwayError):
            log.warning("%s", error)
            return render(request, "accounts/denied.html", {"sentence": AWAY}, status=503)
        if not isinstance(error, TooManyTriesError):
            return None
        context = {"sentence": error.detail, "seconds": error.seconds}
        page = render(request, "accounts/too_many.html", context, status=TOO_MANY_REQUESTS)
        page["Retry-After"] = str(error.seconds)
        return page


class ReadersZone:
    """Has pages show times in the zone that the user has chosen, else in that of the browser, else in UTC."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        if request.path_info.startswith("/api/"):
            return self.get_response(request)
        chosen = request.user.time_zone if isinstance(request.user, User) else ""
        with timezone.override(zone_named(chosen) or zone_named(request.COOKIES.get(ZONE_COOKIE, ""))):
            return self.get_response(request)


def _to_do_first(request: HttpRequest) -> tuple[str, str, str] | None:
    """What somebody has to do before anything else: the page, the code and the sentence for it."""
    if isinstance(request.user, User) and request.user.must_change_password:
        return reverse("password"), "password_change_needed", str(CHANGE_FIRST)
    if request.session.get(second_factor.FIRST):
        return reverse("mfa_index"), "second_factor_needed", str(SET_UP_FIRST)
    return None


def _sent_there(request: HttpRequest, place: str, code: str, sentence: str) -> HttpResponse | None:
    """The answer to somebody who has to do something else first; ``None`` for the pages that this takes."""
    if request.path.startswith(place) or request.path in {reverse("logout"), reverse("login")}:
        return None
    if request.path_info.startswith("/api/"):
        if sends_token(request):
            return None
        return JsonResponse({"code": code, "detail": sentence, "fields": {}}, status=403)
    if request.headers.get("HX-Request") == "true":
        return HttpResponse(headers={"HX-Redirect": place})
    return redirect(place)
