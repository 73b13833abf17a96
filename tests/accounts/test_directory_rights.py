"""What groups give: the highest role, on the hosts of the groups that give it; a mistake gives nothing."""

from typing import Any

import environ
import pytest
from django.core.exceptions import ImproperlyConfigured
from pytest_django import Settings

from storage_admin.accounts import directory, second_factor, users
from storage_admin.accounts.directory import DeniedError, Rights
from storage_admin.accounts.models import Actor, Role, Session, User
from storage_admin.directory_settings import ldap_settings, require_tls
from storage_admin.errors import InvalidError
from tests.working import reread

GROUPS = {
    "admins": {"role": "admin"}, "admins-hv1": {"role": "admin", "hosts": ["hv1"]},
    "admins-hv2": {"role": "admin", "hosts": ["hv2", "hv1"]}, "all": {"role": "viewer"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def mapped(settings: Settings) -> None:
    settings.SIGN_IN_GROUPS = GROUPS


@pytest.mark.parametrize(
    ("groups", "rights"),
    [
        ([], None),
        (["unknown", "ALL", "admin"], None),
        (["all", "unknown"], Rights(Role.VIEWER)),
        (["all", "admins-hv1"], Rights(Role.ADMIN, ("hv1",))),
        (["admins-hv1", "admins-hv2"], Rights(Role.ADMIN, ("hv1", "hv2"))),
        (["admins-hv1", "admins"], Rights(Role.ADMIN)),
    ],
)
def test_groups_give_the_highest_role_on_the_hosts_of_those_that_give_it(
    groups: list[str], rights: Rights | None
) -> None:
    assert directory.rights_of(groups) == rights


@pytest.mark.parametrize(
    "setting",
    [
        [], "admins", {"a": "admin"}, {"a": {}}, {"a": {"role": "root"}}, {"a": {"role": "admin", "hosts": []}},
        {"a": {"role": "admin", "hosts": "hv1"}}, {"a": {"role": "admin", "hosts": [1]}},
        {"a": {"role": "admin", "host": ["hv1"]}},
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_understood_lets_nobody_in(settings: Settings, setting: Any) -> None:
    settings.SIGN_IN_GROUPS = setting
    with pytest.raises(ImproperlyConfigured):
        directory.rights_of(["a", "admins"])


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["system", "nobody", "a b", "", "x" * 151, "ROOT"])
def test_a_name_that_cannot_be_one_here_or_is_taken_is_not_let_in(root: User, name: str) -> None:
    with pytest.raises(DeniedError):
        directory.admit(directory.LDAP, "1", name, ["admins"])
    assert User.objects.count() == 1


@pytest.mark.django_db
def test_an_account_of_one_source_is_not_one_of_another() -> None:
    first = directory.admit(directory.LDAP, "1", "anna", ["all"])
    assert directory.admit(directory.LDAP, "1", "renamed", ["all"]) == first
    with pytest.raises(DeniedError):
        directory.admit(directory.OIDC, "1", "anna", ["admins"])
    assert (reread(first).username, first.role) == ("anna", "viewer")


@pytest.mark.django_db
def test_a_local_admin_of_all_hosts_remains_beside_those_of_the_directory(root: User) -> None:
    directory.admit(directory.OIDC, "1", "anna", ["admins"])
    with pytest.raises(InvalidError) as refused:
        users.change_user(Actor(name="x", role=Role.ADMIN), root, is_active=False)
    assert refused.value.code == "last_admin"


@pytest.mark.django_db
def test_a_second_factor_that_a_role_needs_is_asked_of_ldap_and_not_of_a_provider(settings: Settings) -> None:
    settings.SECOND_FACTOR_ROLES = ["admin"]
    by_ldap = directory.admit(directory.LDAP, "1", "anna", ["admins"])
    by_provider = directory.admit(directory.OIDC, "1", "bob", ["admins"])
    assert (second_factor.is_missing(by_ldap), second_factor.is_missing(by_provider)) == (True, False)
    assert not Session.objects.exists()


@pytest.mark.parametrize("url", ["http://idp.example.org", "ldap://dc.example.org", "http://127.0.0.1.example.org"])
def test_passwords_and_tokens_go_over_no_network_in_clear(url: str) -> None:
    with pytest.raises(ImproperlyConfigured):
        require_tls("URL", url)
    require_tls("URL", url.replace("http:", "https:").replace("ldap:", "ldaps:"))
    require_tls("URL", "http://127.0.0.1:8080/o")


def test_ldap_without_tls_is_refused_and_starts_it_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environ.Env()
    with pytest.raises(ImproperlyConfigured, match="LDAP_USER_BASE"):
        ldap_settings(env, "ldaps://dc.example.org", [])
    monkeypatch.setenv("LDAP_USER_BASE", "dc=x")
    monkeypatch.setenv("LDAP_GROUP_BASE", "dc=x")
    assert ldap_settings(env, "ldap://dc.example.org", [])["AUTH_LDAP_START_TLS"] is True
    assert ldap_settings(env, "ldaps://dc.example.org", [])["AUTH_LDAP_START_TLS"] is False
    monkeypatch.setenv("LDAP_START_TLS", "")  # as a stack has it where nobody says anything of it
    assert ldap_settings(env, "ldap://dc.example.org", [])["AUTH_LDAP_START_TLS"] is True
    monkeypatch.setenv("LDAP_START_TLS", "0")
    with pytest.raises(ImproperlyConfigured, match="ldaps://"):
        ldap_settings(env, "ldap://dc.example.org", [])
    monkeypatch.setenv("LDAP_GROUP_TYPE", "other")
    with pytest.raises(ImproperlyConfigured, match="groupOfNames"):
        ldap_settings(env, "ldaps://dc.example.org", [])
