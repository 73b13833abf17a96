"""A password that was made for one use lets nobody around it, and the page that changes one is no place to guess it."""

import pytest
from axes.models import AccessAttempt
from django.test import Client

from storage_admin.accounts import lockouts, users
from storage_admin.accounts.models import Actor, AuditEntry, User
from tests.accounts.signing_in import PASSWORD, signed_in
from tests.factories import TokenFactory
from tests.working import reread

WANTED = "another long enough one"


def change(client: Client, old: str, new: str = WANTED) -> int:
    return client.post("/password/", {"old_password": old, "new_password1": new, "new_password2": new}).status_code


@pytest.mark.parametrize("header", ["x", "Basic eDp5", "bearer-x y", "Bearerx", ""])
def test_no_header_lets_a_session_with_a_one_time_password_into_the_api(bob: User, admin: Actor, header: str) -> None:
    client = signed_in(password=users.reset_password(admin, bob))
    answer = client.get("/api/v1/hosts/", headers={"Authorization": header})
    assert (answer.status_code, answer.json()["code"]) == (403, "password_change_needed")
    assert client.get("/jobs/", headers={"Authorization": "Bearer x"})["Location"] == "/password/"


@pytest.mark.parametrize("address", ["", "hosts/", "overview/", "automation/", "schema/", "docs/", "nothing/"])
def test_a_token_that_opens_nothing_never_falls_back_to_the_session(bob: User, address: str) -> None:
    client = signed_in()
    for header in ("Bearer x", "bearer", "BEARER  x", "Bearer x, Basic y"):
        assert client.get(f"/api/v1/{address}", headers={"Authorization": header}).status_code == 401
    assert client.get(f"/api/v1/{address}").status_code in {200, 404}


def test_a_token_works_beside_a_session_with_a_one_time_password(bob: User, admin: Actor) -> None:
    client = signed_in(password=users.reset_password(admin, bob))
    TokenFactory.create(secret="sa_x")
    assert client.get("/api/v1/hosts/", headers={"Authorization": "Bearer sa_x"}).status_code == 200


def test_wrong_passwords_on_the_page_that_changes_it_lock_out_as_at_sign_in(bob: User) -> None:
    client = signed_in(REMOTE_ADDR="192.0.2.7")
    assert [change(client, f"guess-{number}") for number in range(7)] == [200] * 5 + [429] * 2
    assert change(client, PASSWORD) == 429
    assert reread(bob).check_password(PASSWORD)
    assert [(one.username, one.address) for one in lockouts.lockouts()] == [("bob", "192.0.2.7")]
    assert Client(REMOTE_ADDR="192.0.2.7").post("/login/", {"username": "bob", "password": PASSWORD}).status_code == 429
    refused = AuditEntry.objects.filter(refused=True)
    assert list(refused.order_by("id").values_list("who", "what", "target", "address")) == [
        ("bob", "sign-in failed", "bob", "192.0.2.7"), ("nobody", "locked out", "bob", "192.0.2.7"),
    ]  # fmt: skip


def test_no_password_that_was_typed_there_is_kept(bob: User) -> None:
    change(signed_in(), "my-old-secret", "my-new-secret")
    kept = str([*AccessAttempt.objects.values(), *AuditEntry.objects.values()])
    assert AccessAttempt.objects.count() == 1
    assert "secret" not in kept


def test_a_new_password_does_not_tell_whether_it_is_the_one_of_now(bob: User) -> None:
    client = signed_in()
    for old in ("", "wrong"):
        form = {"old_password": old, "new_password1": PASSWORD, "new_password2": PASSWORD}
        assert "must differ from the current one" not in client.post("/password/", form).content.decode()


def test_a_right_password_forgets_the_wrong_ones_before_it(bob: User) -> None:
    client = signed_in()
    for _ in range(5):
        change(client, "wrong")
    assert change(client, PASSWORD) == 302
    assert change(client, "wrong") == 200
    assert lockouts.lockouts() == []
