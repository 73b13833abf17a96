"""The addresses of the provider of ``oidc_site.py``, and what it tells about people. Needs its settings."""

import json
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.views import LoginView
from django.urls import include, path
from oauth2_provider.oauth2_validators import OAuth2Validator

urlpatterns = [
    path("login/", LoginView.as_view()),
    path("o/", include("oauth2_provider.urls", namespace="oauth2_provider")),
]


class Validator(OAuth2Validator):  # type: ignore[misc]
    """Tells the groups as they are at that moment."""

    oidc_claim_scope = None

    def get_additional_claims(self, request: Any) -> dict[str, Any]:
        name = request.user.username
        people = Path(settings.DATABASES["default"]["NAME"]).with_name("people.json")
        told: dict[str, Any] = json.loads(people.read_text())[name]
        return {"preferred_username": name, "email": f"{name}@example.org"} | told
