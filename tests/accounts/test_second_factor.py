"""A second factor: set up, asked for, lost, required of a role; nothing of it concerns tokens."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import format_hotp_value, hotp_value
from axes.models import AccessAttempt
from django.core.management import CommandError, call_command
from django.http import HttpResponse
from django.test import Client
from pytest_django import Settings

from storage_admin.accounts import second_factor, selectors, users
from storage_admin.accounts.models import Actor, AuditEntry, ForbiddenError, Role, Session, User
from storage_admin.errors import InvalidError
from tests.accounts.signing_in import PASSWORD, is_in, sign_in, signed_in
from tests.factories import TokenFactory
from tests.web.html import inline_code
from tests.working import fails_as

OWN = "/account/second-factor/"
#: A secret, and recovery codes.
Protected = tuple[str, list[str]]
SetUp = Callable[[Client], Protected]


class Clock:
    """Time as the codes see it: each step is one in which no code was used yet."""

    def __init__(self) -> None:
        self.now = time.time()

    def next_code(self, secret: str) -> str:
        self.now += 30
        return self.code(secret)

    def code(self, secret: str) -> str:
        return str(format_hotp_value(hotp_value(secret, int(self.now) // 30)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("allauth.mfa.totp.internal.auth.time.time", lambda: found.now)
    return found


@pytest.fixture
def set_up(clock: Clock, django_capture_on_commit_callbacks: Callable[..., Any]) -> SetUp:
    """Sets an authenticator app up for who is signed in: its secret, and the recovery codes."""

    def work(client: Client) -> Protected:
        asked = client.get(f"{OWN}app/")
        assert asked["Location"].startswith(f"{OWN}confirm/")
        assert client.post(asked["Location"], {"password": PASSWORD})["Location"] == f"{OWN}app/"
        page = client.get(f"{OWN}app/")
        secret: str = page.context["form"].secret
        assert secret in page.content.decode()
        with django_capture_on_commit_callbacks(execute=True):
            done = client.post(f"{OWN}app/", {"code": clock.next_code(secret)})
        assert done["Location"] == f"{OWN}codes/"
        return secret, list(client.get(f"{OWN}codes/").context["unused_codes"])

    return work


@pytest.fixture
def protected(bob: User, set_up: SetUp) -> Protected:
    """The secret and the recovery codes of bob, who has set up an app."""
    return set_up(signed_in())


def second_step(client: Client, code: str) -> HttpResponse:
    answer: Any = client.post("/login/second-step/", {"code": code})
    return answer  # type: ignore[no-any-return]


def test_a_password_alone_no_longer_opens_and_a_code_does_once(protected: Protected, clock: Clock) -> None:
    secret, _ = protected
    client = Client()
    assert sign_in(client, next="/images/") == "/login/second-step/"
    assert not is_in(client)
    assert client.get("/api/v1/hosts/").status_code == 401
    assert not AuditEntry.objects.filter(what="signed in").count() > 1
    assert second_step(client, "000000").status_code == 200
    code = clock.next_code(secret)
    assert second_step(client, code)["Location"] == "/images/"
    assert is_in(client)
    entry = AuditEntry.objects.filter(what="signed in").latest("id")
    assert (entry.who, (entry.after or {})["with"]) == ("bob", ["password", "authenticator app"])
    again = signed_in()
    assert second_step(again, code).status_code == 200, "a code that was used opens nothing"
    assert not is_in(again)


def test_a_recovery_code_opens_once(protected: Protected) -> None:
    _, codes = protected
    assert len(set(codes)) == 10
    for expected in (True, False):
        client = signed_in()
        second_step(client, codes[0])
        assert is_in(client) is expected
    assert codes[0] not in Client().get("/login/").content.decode()


def test_wrong_codes_lock_the_name_out_as_wrong_passwords_do(protected: Protected, clock: Clock) -> None:
    client = signed_in()
    answers = [second_step(client, "000000").status_code for _ in range(6)]
    assert answers == [200] * 5 + [429]
    assert second_step(client, clock.next_code(protected[0])).status_code == 429
    assert not is_in(client)
    assert Client().post("/login/", {"username": "bob", "password": PASSWORD}).status_code == 429
    tried = AuditEntry.objects.filter(what="sign-in failed", refused=True)
    assert [(one.target, (one.after or {})["why"]) for one in tried] == [("bob", "right password, wrong second factor")]


def test_a_right_password_does_not_forget_wrong_codes(protected: Protected) -> None:
    client = Client()
    for _ in range(5):
        sign_in(client)
        second_step(client, "000000")
    assert sum(AccessAttempt.objects.values_list("failures_since_start", flat=True)) == 5


def test_nobody_reaches_the_second_step_without_the_first(bob: User) -> None:
    client = Client()
    for answer in (client.get("/login/second-step/"), second_step(client, "123456")):
        assert (answer.status_code, answer["Location"].partition("?")[0]) == (302, "/login/")


def test_secrets_are_sealed_in_the_database(protected: Protected) -> None:
    secret, codes = protected
    kept = str(list(Authenticator.objects.values("data")) + list(AuditEntry.objects.values()))
    assert secret not in kept
    assert not any(code in kept for code in codes)


def test_setting_up_making_codes_anew_and_removing_stand_in_the_trail(
    protected: Protected, clock: Clock, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    secret, codes = protected
    client = signed_in()
    second_step(client, clock.next_code(secret))
    client.post(f"{OWN}confirm/", {"password": PASSWORD})
    with django_capture_on_commit_callbacks(execute=True):
        client.post(f"{OWN}codes/new/")
    assert not set(codes) & set(client.get(f"{OWN}codes/").context["unused_codes"])
    assert client.post(f"{OWN}app/remove/")["Location"] == OWN
    assert not Authenticator.objects.exists(), "recovery codes go with the last factor"
    trail = AuditEntry.objects.filter(who="bob").exclude(what="signed in").order_by("id")
    assert list(trail.values_list("what", "after")) == [
        ("second factor added", {"kind": "authenticator app"}),
        ("second factor added", {"kind": "recovery codes"}),
        ("recovery codes made anew", {"kind": "recovery codes"}),
        ("second factor removed", {"kind": "authenticator app"}),
        ("second factor removed", {"kind": "recovery codes"}),
    ]
    assert sign_in(Client()) == "/"


def test_a_stolen_session_changes_no_second_factor_without_the_password(bob: User) -> None:
    client = signed_in()
    for place in ("app/", "passkeys/add/", "codes/new/"):
        for answer in (client.get(OWN + place), client.post(OWN + place, {"code": "123456"})):
            assert answer["Location"].startswith(f"{OWN}confirm/"), place
    wrong = [client.post(f"{OWN}confirm/", {"password": "wrong"}).status_code for _ in range(6)]
    assert wrong == [200] * 5 + [429]
    assert not Authenticator.objects.exists()
    tried = AuditEntry.objects.get(what="sign-in failed")
    assert (tried.who, tried.after) == ("bob", {"why": "wrong password, given to confirm it"})


@pytest.mark.django_db(transaction=True)
def test_a_role_that_needs_one_gets_nowhere_without_it(bob: User, admin: Actor, root: User, set_up: SetUp) -> None:
    before = signed_in()
    second_factor.require_for(admin, [Role.OPERATOR])
    assert not is_in(before), "who has none is signed out"
    client = signed_in()
    assert client.get("/jobs/")["Location"] == OWN
    rest = client.get("/api/v1/hosts/")
    assert (rest.status_code, rest.json()["code"]) == (403, "second_factor_needed")
    fragment = client.get("/jobs/count/", headers={"HX-Request": "true"})
    assert fragment["HX-Redirect"] == OWN
    TokenFactory.create(secret="sa_x")
    assert client.get("/api/v1/hosts/", headers={"Authorization": "Bearer sa_x"}).status_code == 200
    page = client.get(OWN).content.decode()
    assert "Your role requires a second factor" in page
    assert inline_code(page) == []
    set_up(client)
    assert is_in(client)
    client.post(f"{OWN}app/remove/")
    assert Authenticator.objects.filter(type="totp").exists(), "the last one stays"
    assert sign_in(Client(), "root") == "/"
    entry = AuditEntry.objects.get(what="second factor required")
    assert (entry.before, entry.after) == ({"roles": []}, {"roles": ["operator"]})


def test_settings_require_one_too_and_a_new_role_counts_at_once(bob: User, admin: Actor, settings: Settings) -> None:
    settings.SECOND_FACTOR_ROLES = ["admin"]
    client = signed_in()
    assert is_in(client)
    users.change_user(admin, bob, role=Role.ADMIN)
    assert not is_in(client)
    sign_in(client)
    assert client.get("/jobs/")["Location"] == OWN


def test_a_one_time_password_is_changed_first_and_the_factor_set_up_then(admin: Actor, settings: Settings) -> None:
    settings.SECOND_FACTOR_ROLES = ["viewer"]
    _, password = users.add_user(admin, "eve", Role.VIEWER)
    client = signed_in("eve", password)
    assert client.get(OWN)["Location"] == "/password/"
    client.post("/password/", {"old_password": password, "new_password1": PASSWORD, "new_password2": PASSWORD})
    assert client.get("/jobs/")["Location"] == OWN


def test_an_admin_requires_nothing_that_locks_out_themselves(admin: Actor, root: User) -> None:
    with fails_as(InvalidError, "own_account"):
        second_factor.require_for(admin, [Role.ADMIN])
    assert second_factor.required_roles() == frozenset()


def test_an_admin_takes_a_lost_one_away(protected: Protected, bob: User, admin: Actor, limited: Actor) -> None:
    with pytest.raises(ForbiddenError):
        second_factor.reset(limited, bob)
    assert Session.objects.filter(user=bob).exists()
    assert second_factor.reset(admin, bob) == ["authenticator app", "recovery codes"]
    assert not Session.objects.filter(user=bob).exists()
    entry = AuditEntry.objects.get(what="second factor reset")
    assert (entry.who, entry.target, entry.after) == ("root", "bob", {"sessions_ended": 1})
    assert sign_in(Client()) == "/"
    with fails_as(InvalidError, "own_account"):
        second_factor.reset(admin, User.objects.get(username="root"))


def test_the_last_admin_gets_in_again_by_a_command(
    root: User, set_up: SetUp, capsys: pytest.CaptureFixture[str]
) -> None:
    client = signed_in("root")
    set_up(client)
    assert sign_in(Client(), "root") == "/login/second-step/"
    call_command("reset_second_factor", "root")
    assert capsys.readouterr().out.strip() == "root had: authenticator app, recovery codes. All of it is removed."
    assert sign_in(Client(), "root") == "/"
    assert AuditEntry.objects.filter(who="system", what="second factor reset", target="root").exists()
    with pytest.raises(CommandError, match="There is no user nobody-here"):
        call_command("reset_second_factor", "nobody-here")


def deactivated_for_a_while(admin: Actor, user: User) -> None:
    users.change_user(admin, user, is_active=False)
    users.change_user(admin, user, is_active=True)


@pytest.mark.parametrize("end", [users.end_sessions, users.reset_password, deactivated_for_a_while])
def test_what_ends_sessions_ends_a_sign_in_that_waits_for_its_second_step(
    protected: Protected, bob: User, admin: Actor, end: Callable[[Actor, User], object]
) -> None:
    client = signed_in()
    end(admin, bob)
    assert second_step(client, protected[1][0])["Location"] == "/login/"
    assert not is_in(client)
    assert not Session.objects.filter(user=bob).exists()


def test_who_waits_for_the_second_step_is_not_told_of_as_signed_in(
    protected: Protected, bob: User, admin: Actor
) -> None:
    signed_in()
    assert selectors.sessions_of(bob).count() == 1
    row: Any = selectors.users_listed().get(username="bob")
    assert row.open_sessions == 1
    assert users.end_sessions(admin, bob) == 1


@pytest.mark.parametrize("change", [{"is_active": False}, {"password": "another"}])
def test_who_is_deactivated_or_has_another_password_between_the_steps_is_not_let_in(
    protected: Protected, bob: User, clock: Clock, change: dict[str, Any]
) -> None:
    client = signed_in()
    User.objects.filter(pk=bob.pk).update(**change)
    assert second_step(client, clock.next_code(protected[0])).status_code == 403
    User.objects.filter(pk=bob.pk).update(is_active=True)
    assert not is_in(client)
    assert AuditEntry.objects.filter(what="signed in").count() == 1, "that of who set it up"


@pytest.mark.parametrize(
    "address", ["/accounts/signup/", "/signup/", "/account/email/", "/password/reset/", "/accounts/"]
)
def test_nobody_signs_up_and_no_password_goes_by_mail(bob: User, address: str) -> None:
    assert signed_in().get(address).status_code == 404
