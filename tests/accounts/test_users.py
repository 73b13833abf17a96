"""Adding users and changing what they may do: who may, what is recorded, and how nobody locks everybody out."""

from typing import Any

import pytest
from django.contrib.auth import authenticate
from django.test import RequestFactory

from storage_admin.accounts import users
from storage_admin.accounts.models import Actor, AuditEntry, ForbiddenError, Role, Token, User
from storage_admin.accounts.services import create_token
from storage_admin.errors import InvalidError
from storage_admin.hosts.registration import remove_host
from tests.factories import HostFactory, TokenFactory, UserFactory
from tests.working import fails_as, invalid_fields


def last() -> AuditEntry:
    return AuditEntry.objects.order_by("-id")[0]


def test_adds_a_user_with_a_one_time_password_that_opens_and_stands_nowhere(admin: Actor) -> None:
    HostFactory.create(slug="a")
    user, password = users.add_user(admin, "bob", Role.OPERATOR, hosts=["a"], email="bob@example.org")
    assert authenticate(RequestFactory().post("/"), username="bob", password=password) == user
    assert (user.role, user.hosts, user.must_change_password) == ("operator", ["a"], True)
    assert (last().what, last().target) == ("user added", "bob")
    assert last().after == {"role": "operator", "hosts": ["a"], "email": "bob@example.org"}
    assert password not in str(list(AuditEntry.objects.values())) + str(list(User.objects.values()))


@pytest.mark.parametrize(
    ("wanted", "field"),
    [({"username": "ROOT"}, "username"), ({"username": ""}, "username"), ({"username": "a b"}, "username"),
     ({"username": "system"}, "username"), ({"username": "x" * 151}, "username"),
     ({"username": "bob", "hosts": ["nowhere"]}, "hosts"), ({"username": "bob", "email": "no address"}, "email")],
)  # fmt: skip
def test_a_user_that_makes_no_sense_is_not_added(admin: Actor, wanted: dict[str, Any], field: str) -> None:
    assert list(invalid_fields(users.add_user, admin, role=Role.VIEWER, **wanted)) == [field]
    assert User.objects.count() == 1


def test_what_changes_is_recorded_before_and_after_and_nothing_else(admin: Actor) -> None:
    HostFactory.create(slug="a")
    bob = UserFactory.create(username="bob", role="viewer")
    users.change_user(admin, bob, role=Role.OPERATOR, hosts=["a"], email="")
    assert (last().before, last().after) == ({"role": "viewer", "hosts": []}, {"role": "operator", "hosts": ["a"]})
    count = AuditEntry.objects.count()
    users.change_user(admin, bob, role=Role.OPERATOR)
    users.change_user(admin, bob, username="boss", must_change_password=True)
    assert AuditEntry.objects.count() == count
    assert User.objects.get(pk=bob.pk).username == "bob"


@pytest.mark.parametrize("change", [{"role": Role.OPERATOR}, {"is_active": False}, {"hosts": ["a"]}])
def test_the_last_active_admin_of_all_hosts_stays(root: User, change: dict[str, Any]) -> None:
    HostFactory.create(slug="a")
    UserFactory.create(role="admin", hosts=["a"])
    UserFactory.create(role="admin", is_active=False)
    token = TokenFactory.create(role="admin").actor
    with fails_as(InvalidError, "last_admin"):
        users.change_user(token, root, **change)
    other = UserFactory.create(role="admin")
    users.change_user(token, root, **change)
    with pytest.raises(InvalidError):
        users.change_user(token, other, is_active=False)


@pytest.mark.parametrize("change", [{"role": Role.VIEWER}, {"is_active": False}, {"hosts": ["a"]}])
def test_nobody_takes_away_their_own_rights(root: User, admin: Actor, change: dict[str, Any]) -> None:
    HostFactory.create(slug="a")
    UserFactory.create(role="admin")
    with fails_as(InvalidError, "own_account"):
        users.change_user(admin, root, **change)
    with pytest.raises(InvalidError):
        users.reset_password(admin, root)
    assert users.change_user(admin, root, email="root@example.org").email == "root@example.org"


def test_an_admin_who_is_limited_to_hosts_decides_about_nobody(limited: Actor) -> None:
    bob = UserFactory.create()
    for work in (
        lambda: users.add_user(limited, "x", Role.VIEWER),
        lambda: users.change_user(limited, bob, role=Role.ADMIN),
        lambda: users.reset_password(limited, bob),
        lambda: users.end_sessions(limited, bob),
        lambda: create_token(limited, "x", Role.VIEWER),
    ):
        with pytest.raises(ForbiddenError):
            work()
    assert not AuditEntry.objects.exists()


def test_who_is_limited_to_a_host_that_is_removed_is_not_let_everywhere(admin: Actor) -> None:
    host = HostFactory.create(slug="gone", kind="ssh")
    token, _ = create_token(admin, "nightly", Role.VIEWER, hosts=["gone"])
    bob = UserFactory.create(hosts=["gone"])
    remove_host(admin, host)
    for row in (Token.objects.get(pk=token.pk), User.objects.get(pk=bob.pk)):
        assert row.hosts == ["gone (removed)"]
        assert row.actor.hosts is not None
        HostFactory.create(slug=f"gone-{row.pk}")
        assert not row.actor.sees("gone")
    HostFactory.create(slug="gone")
    assert not User.objects.get(pk=bob.pk).actor.sees("gone")
    # What they are limited to can be kept as it is, and changed.
    users.change_user(admin, bob, hosts=["gone (removed)"], email="bob@example.org")
    assert users.change_user(admin, bob, hosts=["gone"]).actor.sees("gone")


def test_a_token_for_a_host_that_is_not_there_is_not_made(admin: Actor) -> None:
    with pytest.raises(InvalidError, match="There is no host typo"):
        create_token(admin, "nightly", Role.VIEWER, hosts=["typo"])
