"""What holds for every request of somebody who is signed in in a browser."""

from collections.abc import Callable

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone

from storage_admin.accounts import sessions
from storage_admin.accounts.authentication import sends_token
from storage_admin.accounts.models import User

#: A page that refreshes itself says so with this header: nobody did anything.
REFRESH = "SA-Refresh"
CHANGE_FIRST = "Choose a password of your own first: yours was made for one use."


class SessionRules:
    """Ends sessions that are over, notes when somebody was here last, and has a one-time password changed."""

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
            elif request.user.must_change_password and (answer := _change_first(request)):
                return answer
            elif REFRESH not in request.headers:
                sessions.seen(request, now)
        return self.get_response(request)


def _change_first(request: HttpRequest) -> HttpResponse | None:
    """The answer to somebody who still has a one-time password; ``None`` for what that takes."""
    place = reverse("password")
    if request.path in {place, reverse("logout"), reverse("login")}:
        return None
    if request.path_info.startswith("/api/"):
        if sends_token(request):
            return None
        return JsonResponse({"code": "password_change_needed", "detail": CHANGE_FIRST, "fields": {}}, status=403)
    if request.headers.get("HX-Request") == "true":
        return HttpResponse(headers={"HX-Redirect": place})
    return redirect(place)
