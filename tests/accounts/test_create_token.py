"""``manage.py create_token``."""

from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from rest_framework.test import APIClient

from storage_admin.accounts.models import Token
from tests.factories import HostFactory

pytestmark = pytest.mark.django_db


def run(*words: str) -> str:
    out = StringIO()
    call_command("create_token", *words, stdout=out)
    return out.getvalue()


def test_prints_the_token_alone_and_it_opens_the_api() -> None:
    for slug in ("local", "other"):
        HostFactory.create(slug=slug)
    printed = run("nightly", "--role", "operator", "--hosts", "local", "other", "--expires-days", "7")
    assert printed.count("\n") == 1
    assert APIClient().get("/api/v1/hosts/", HTTP_AUTHORIZATION=f"Bearer {printed.strip()}").status_code == 200
    token = Token.objects.get()
    assert (token.name, token.role, token.hosts) == ("nightly", "operator", ["local", "other"])
    assert token.expires is not None


def test_a_token_is_a_viewers_unless_told_otherwise() -> None:
    run("looker")
    assert (Token.objects.get().role, Token.objects.get().hosts, Token.objects.get().expires) == ("viewer", [], None)


@pytest.mark.parametrize(
    "words",
    [["a"], [" "], ["b", "--expires-days", "0"], ["b", "--expires-days", "-1"], ["b", "--expires-days", "9" * 12]],
)
def test_says_what_is_wrong_and_makes_nothing(words: list[str]) -> None:
    run("a")
    with pytest.raises(CommandError, match=r"name|expiry|days"):
        run(*words)
    assert Token.objects.count() == 1
