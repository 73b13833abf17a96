"""Signing in by a real OpenLDAP and a real OpenID Connect provider: groups decide, nobody takes an account over."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import environ
import pytest
from allauth.socialaccount.providers.oauth2.client import OAuth2Client
from axes.models import AccessAttempt
from django.http import HttpResponse
from django.test import Client
from pytest_django import Settings

from storage_admin.accounts import tries
from storage_admin.accounts.models import AuditEntry, Session, User
from storage_admin.directory_settings import ldap_settings
from tests.accounts.signing_in import PASSWORD, is_in, signed_in
from tests.factories import HostFactory, UserFactory
from tests.harness.directories import ADMIN, ADMIN_PASSWORD, SUFFIX, Directory, Provider
from tests.harness.oidc_site import CLIENT, SECRET
from tests.working import reread

pytestmark = [pytest.mark.services, pytest.mark.django_db]

CALLBACK = "http://testserver/login/sso/oidc/callback/"
BEGIN = "/login/sso/oidc/"
GROUPS = {"admins": {"role": "admin"}, "berlin": {"role": "operator", "hosts": ["hv1"]}, "all": {"role": "viewer"}}
PEOPLE: dict[str, dict[str, object]] = {
    "anna": {"groups": ["admins", "other"]}, "bob": {"groups": ["berlin", "all"]}, "eve": {"groups": ["other"]},
    "mallory": {"groups": ["admins"], "preferred_username": "root", "email": "root@example.org"},
    "odd": {"groups": {"admins": True}}, "swapped": {"groups": ["admins"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider(tmp_path_factory.mktemp("oidc"), CALLBACK, PEOPLE) as running:
        yield running


@pytest.fixture
def oidc(provider: Provider, settings: Settings) -> Provider:
    provider.tell(PEOPLE)
    settings.OIDC_URL, settings.OIDC_CLIENT_ID, settings.OIDC_CLIENT_SECRET = provider.url, CLIENT, SECRET
    settings.SIGN_IN_GROUPS = GROUPS
    return provider


def by_oidc(provider: Provider, name: str, **query: str) -> tuple[Client, HttpResponse]:
    """A new browser, and what it gets at the end of the way over the provider."""
    client = Client()
    asked: Any = client.get(BEGIN, query)
    answer: HttpResponse = client.get(provider.signed_in(asked["Location"], name))  # type: ignore[assignment]
    return client, answer


def test_groups_of_the_provider_give_role_and_hosts(oidc: Provider) -> None:
    assert "Sign in with single sign-on" in Client().get("/login/").content.decode()
    asked = parse_qs(urlsplit(Client().get(BEGIN)["Location"]).query)
    assert asked["code_challenge_method"] == ["S256"]
    client, answer = by_oidc(oidc, "bob", next="/images/")
    assert answer["Location"] == "/images/"
    bob = User.objects.get(username="bob")
    assert (bob.role, bob.hosts, bob.source, bob.has_usable_password()) == ("operator", ["hv1"], "oidc", False)
    entry = AuditEntry.objects.get(what="signed in")
    assert (entry.who, (entry.after or {})["with"]) == ("bob", ["socialaccount"])
    assert client.get("/users/").status_code == 403
    admin, _ = by_oidc(oidc, "anna")
    assert admin.get("/users/").status_code == 200


@pytest.mark.parametrize("name", ["eve", "odd"])
def test_whose_groups_map_to_nothing_is_not_let_in(oidc: Provider, name: str) -> None:
    client, answer = by_oidc(oidc, name)
    assert (answer.status_code, "None of your groups has access" in answer.content.decode()) == (403, True)
    assert not is_in(client)
    assert not User.objects.exists()
    assert AuditEntry.objects.filter(what="sign-in denied", refused=True).count() == 1


def test_rights_that_a_group_gave_are_gone_at_the_next_sign_in(oidc: Provider) -> None:
    before, _ = by_oidc(oidc, "anna")
    oidc.tell(PEOPLE | {"anna": {"groups": ["all"]}})
    after, _ = by_oidc(oidc, "anna")
    assert after.get("/users/").status_code == before.get("/users/").status_code == 403
    changed = AuditEntry.objects.get(what="user changed")
    assert (changed.before, changed.after) == ({"role": "admin", "hosts": []}, {"role": "viewer", "hosts": []})
    oidc.tell(PEOPLE | {"anna": {"groups": []}})
    last, answer = by_oidc(oidc, "anna")
    assert answer.status_code == 403
    assert not any(map(is_in, (before, after, last))), "the sessions that there were have ended"


def test_nobody_takes_a_local_account_over_by_its_name_or_its_address(oidc: Provider) -> None:
    root = UserFactory.create(username="root", role="admin", email="root@example.org")
    anna = UserFactory.create(username="local-anna", role="viewer", email="anna@example.org")
    client, answer = by_oidc(oidc, "mallory")
    assert (answer.status_code, is_in(client)) == (403, False)
    by_oidc(oidc, "anna")
    assert User.objects.get(username="anna").pk not in {root.pk, anna.pk}
    # Nor is an account joined to that of somebody who is signed in.
    both = Client()
    both.force_login(root, "django.contrib.auth.backends.ModelBackend")
    asked: Any = both.get(BEGIN, {"process": "connect"})
    both.get(oidc.signed_in(asked["Location"], "anna"))
    assert User.objects.get(pk=both.session["_auth_user_id"]).username == "anna"


def test_an_answer_that_was_not_asked_for_or_is_used_again_opens_nothing(oidc: Provider) -> None:
    asked: Any = Client().get(BEGIN)
    back = oidc.signed_in(asked["Location"], "anna")
    stranger = Client()
    assert stranger.get(back).status_code == 403
    assert not is_in(stranger)
    client = Client()
    asked = client.get(BEGIN)
    back = oidc.signed_in(asked["Location"], "anna")
    assert client.get(back).status_code == 302
    client.post("/logout/")
    assert client.get(back).status_code == 403
    assert not is_in(client)


def test_a_token_whose_signature_is_not_the_providers_opens_nothing(
    oidc: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forged(original: Any) -> Any:
        def work(*given: Any, **more: Any) -> Any:
            data = original(*given, **more)
            head, body, seal = data["id_token"].split(".")
            claims = json.loads(base64.urlsafe_b64decode(body + "=="))
            claims["groups"] = ["admins"]
            text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
            return data | {"id_token": f"{head}.{text}.{seal}"}

        return work

    monkeypatch.setattr(OAuth2Client, "get_access_token", forged(OAuth2Client.get_access_token))
    assert by_oidc(oidc, "bob")[1].status_code == 403
    assert not User.objects.exists()


def test_an_address_asks_the_provider_no_more_often_than_it_may_sign_in(oidc: Provider, settings: Settings) -> None:
    settings.SIGN_IN_TRIES_PER_MINUTE = 3
    tries.tries.forget()
    answers = [Client().get(BEGIN).status_code for _ in range(4)]
    tries.tries.forget()
    assert answers == [302, 302, 302, 429]


def test_who_was_deactivated_here_stays_out(oidc: Provider) -> None:
    client, _ = by_oidc(oidc, "anna")
    User.objects.filter(username="anna").update(is_active=False)
    assert by_oidc(oidc, "anna")[1].status_code == 403
    assert not is_in(client)


def test_a_provider_that_is_away_leaves_local_accounts_their_way_in(oidc: Provider, settings: Settings) -> None:
    settings.OIDC_URL = "http://127.0.0.1:9/o"
    UserFactory.create(username="root", role="admin")
    assert Client().get(BEGIN).status_code == 403
    assert is_in(signed_in("root"))
    settings.OIDC_URL = ""
    assert Client().get(BEGIN).status_code == 404


# --- LDAP -----------------------------------------------------------------------------------------------------------
def use(directory: Directory, settings: Settings) -> None:
    """Sets what the environment variables say, with TLS on the way."""
    for name, found in ldap_settings(environ.Env(), directory.url, ["uid", "entryUUID", "mail"]).items():
        setattr(settings, name, found)
    assert settings.AUTH_LDAP_START_TLS is True


@pytest.fixture
def directory(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Directory]:
    with Directory(tmp_path) as running:
        for name in ("anna", "bob", "eve", "root"):
            running.add_person(name, f"{name} in the directory")
        running.add_group("admins", ["anna", "root"])
        running.add_group("berlin", ["bob"])
        running.add_group("all", ["bob"])
        settings.LDAP_URL = running.url
        variables = {
            "LDAP_BIND_DN": ADMIN, "LDAP_BIND_PASSWORD": ADMIN_PASSWORD, "LDAP_CA": str(running.certificate),
            "LDAP_USER_BASE": f"ou=people,{SUFFIX}", "LDAP_GROUP_BASE": f"ou=groups,{SUFFIX}",
        }  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        use(running, settings)
        settings.AUTHENTICATION_BACKENDS = [
            *settings.AUTHENTICATION_BACKENDS, "storage_admin.accounts.ldap.LdapBackend",
        ]  # fmt: skip
        settings.SIGN_IN_GROUPS = GROUPS
        yield running


def by_password(name: str, password: str = "") -> tuple[Client, int]:
    client = Client()
    given = {"username": name, "password": password or f"{name} in the directory"}
    return client, client.post("/login/", given).status_code


def test_groups_of_ldap_give_role_and_hosts(directory: Directory) -> None:
    client, status = by_password("bob")
    assert (status, is_in(client)) == (302, True)
    bob = User.objects.get(username="bob")
    assert (bob.role, bob.hosts, bob.source, bob.email) == ("operator", ["hv1"], "ldap", "bob@example.org")
    assert not bob.has_usable_password()
    assert by_password("BOB")[0].get("/jobs/").status_code == 302, "another password"
    assert by_password("BOB", "bob in the directory")[1] == 302
    assert User.objects.count() == 1


def test_a_wrong_password_and_a_name_that_is_a_filter_open_nothing(directory: Directory) -> None:
    for name, password in (("bob", "wrong"), ("b*", "bob in the directory"), ("bob)(uid=*", "x"), ("bob", "")):
        client, _ = by_password(name, password or " ")
        assert not is_in(client), name
    assert not User.objects.exists()
    assert AccessAttempt.objects.filter(username="bob").exists()


def test_whose_groups_in_ldap_map_to_nothing_is_not_let_in_and_a_group_that_is_left_gives_nothing(
    directory: Directory,
) -> None:
    client, status = by_password("eve")
    assert (status, is_in(client)) == (403, False)
    assert not User.objects.exists()
    before, _ = by_password("anna")
    assert before.get("/users/").status_code == 200
    directory.leave("admins")
    after, status = by_password("anna")
    assert (status, is_in(after), is_in(before)) == (403, False, False)
    assert not Session.objects.filter(user__username="anna").exists()


def test_ldap_never_opens_a_local_account_of_the_same_name(directory: Directory) -> None:
    root = UserFactory.create(username="Root", role="viewer")
    for name in ("root", "Root"):
        client, _ = by_password(name, "root in the directory")
        assert not is_in(client)
    client, _ = by_password("Root", PASSWORD)
    assert is_in(client)
    assert (reread(root).source, root.role, User.objects.count()) == ("", "viewer", 1)


def test_a_name_that_is_given_to_somebody_else_does_not_bring_the_account_along(directory: Directory) -> None:
    by_password("bob")
    first = User.objects.get(username="bob")
    directory.remove_person("bob")
    directory.add_person("bob", "another bob")
    directory.add_group("newcomers-admins", ["bob"])
    client, status = by_password("bob", "another bob")
    assert (status, is_in(client)) == (403, False)
    assert User.objects.get() == first


def test_a_directory_that_is_away_says_so_locks_nobody_out_and_leaves_local_admins_their_way_in(
    directory: Directory,
) -> None:
    UserFactory.create(username="local-admin", role="admin")
    directory.stop()
    client, status = by_password("bob")
    assert (status, is_in(client)) == (503, False)
    assert not AccessAttempt.objects.exists()
    client, _ = by_password("local-admin", PASSWORD)
    assert client.get("/users/").status_code == 200


def test_a_password_that_is_kept_in_the_directory_is_changed_nowhere_here(directory: Directory) -> None:
    client, _ = by_password("bob")
    form = {"old_password": "bob in the directory", "new_password1": PASSWORD, "new_password2": PASSWORD}
    assert client.post("/password/", form)["Location"] == "/account/"
    bob = User.objects.get(username="bob")
    assert not bob.has_usable_password()
    HostFactory.create(slug="hv1")
    admin = UserFactory.create(role="admin")
    by_admin = Client()
    by_admin.force_login(admin, "django.contrib.auth.backends.ModelBackend")
    by_admin.post(f"/users/{bob.pk}/password/")
    refused = by_admin.post(f"/users/{bob.pk}/", {"role": "admin"})
    assert (reread(bob).role, bob.has_usable_password()) == ("operator", False)
    assert "come from directory groups" in refused.content.decode()


def test_a_directory_whose_certificate_nobody_vouches_for_gets_no_password(
    directory: Directory, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LDAP_CA")
    use(directory, settings)
    client, status = by_password("bob")
    assert (status, is_in(client)) == (503, False)
