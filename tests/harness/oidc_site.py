"""A real OpenID Connect provider (django-oauth-toolkit) in a process of its own: discovery, PKCE, signed ID tokens.

``python -m tests.harness.oidc_site FOLDER PORT CALLBACK``; users and their groups stand in ``FOLDER/people.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

PASSWORD = "their password there"
CLIENT, SECRET = "storage-admin", "the client's secret"


def main(folder: Path, port: int, callback: str) -> None:
    """Serves until it is ended."""
    _configure(folder)
    import django

    django.setup()
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application

    call_command("migrate", verbosity=0)
    _fill(folder, callback)
    with make_server("127.0.0.1", port, get_wsgi_application(), handler_class=_Quiet) as server:
        print("ready", flush=True)
        server.serve_forever()


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        """Nothing."""


def _configure(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from django.conf import settings

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    settings.configure(
        SECRET_KEY="x", ALLOWED_HOSTS=["*"], ROOT_URLCONF="tests.harness.oidc_urls", USE_TZ=True, LOGIN_URL="/login/",
        SESSION_COOKIE_NAME="provider", CSRF_COOKIE_NAME="providercsrf",
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "provider.sqlite3"}},
        INSTALLED_APPS=[
            "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions", "oauth2_provider",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
                    ],
                    "loaders": [
                        (
                            "django.template.loaders.locmem.Loader",
                            {"registration/login.html": '<form method="post">{% csrf_token %}{{ form }}</form>'},
                        ),
                        "django.template.loaders.app_directories.Loader",
                    ],
                },
            }
        ],
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True, "OIDC_RSA_PRIVATE_KEY": key.decode(), "PKCE_REQUIRED": True,
            "OAUTH2_VALIDATOR_CLASS": "tests.harness.oidc_urls.Validator",
            "SCOPES": {"openid": "", "profile": "", "email": ""},
        },
    )  # fmt: skip
    settings.TEMPLATES[0].pop("APP_DIRS")


def _fill(folder: Path, callback: str) -> None:
    from django.contrib.auth import get_user_model
    from oauth2_provider.models import get_application_model

    for name in json.loads((folder / "people.json").read_text()):
        get_user_model().objects.create_user(name, f"{name}@example.org", PASSWORD)
    application = get_application_model()
    application.objects.create(
        name="dashboard", client_id=CLIENT, client_secret=SECRET, hash_client_secret=False, redirect_uris=callback,
        client_type=application.CLIENT_CONFIDENTIAL, skip_authorization=True, algorithm=application.RS256_ALGORITHM,
        authorization_grant_type=application.GRANT_AUTHORIZATION_CODE,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
