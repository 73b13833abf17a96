"""Sessions: who is signed in where, and what ends it."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from storage_admin.accounts import sessions, tasks, users
from storage_admin.accounts.models import Actor, AuditEntry, Role, Session, User
from tests.accounts.signing_in import PASSWORD, signed_in
from tests.factories import HostFactory, JobFactory, UserFactory

FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


def move(seconds: float, **which: str) -> None:
    """Has a session's times lie further back."""
    for row in Session.objects.all():
        data = row.get_decoded()
        for name in which or {"since": "", "seen": ""}:
            moved = timezone.datetime.fromisoformat(data[sessions.ABOUT][name]) - timedelta(seconds=seconds)  # type: ignore[attr-defined]
            data[sessions.ABOUT][name] = moved.isoformat()
        store = sessions.SessionStore(row.session_key)
        store.update(data)
        store.save()


def test_a_session_says_whose_it_is_and_from_where(bob: User) -> None:
    client = signed_in(REMOTE_ADDR="192.0.2.7", HTTP_USER_AGENT=FIREFOX)
    row = Session.objects.get()
    assert (row.user, row.address, row.browser) == (bob, "192.0.2.7", "Firefox on Linux")
    assert row.since is not None
    entry = AuditEntry.objects.get(what="signed in")
    assert (entry.who, entry.address) == ("bob", "192.0.2.7")
    assert entry.after == {"browser": "Firefox on Linux", "with": ["password"]}
    client.post("/logout/")
    assert AuditEntry.objects.filter(what="signed out", who="bob", address="192.0.2.7").count() == 1
    assert not Session.objects.filter(user=bob).exists()


def test_a_session_is_not_written_at_each_request(bob: User) -> None:
    client = signed_in()
    first = Session.objects.get().seen
    client.get("/jobs/count/")
    assert Session.objects.get().seen == first
    move(90, seen="")
    client.get("/jobs/count/")
    assert Session.objects.get().seen > first - timedelta(seconds=60)  # type: ignore[operator]


def test_a_page_that_refreshes_itself_keeps_nobody_signed_in(bob: User, settings: Settings) -> None:
    settings.SESSION_IDLE = timedelta(minutes=5)
    client = signed_in()
    for _ in range(3):
        move(120)
        answer = client.get("/jobs/count/", headers={"SA-Refresh": "1"})
    assert answer.status_code == 302
    shown = client.get(answer["Location"])
    assert "Your session expired after inactivity" in shown.content.decode()


def test_who_does_something_stays_signed_in_until_the_end_of_the_session(bob: User, settings: Settings) -> None:
    settings.SESSION_IDLE, settings.SESSION_LIFETIME = timedelta(minutes=5), timedelta(minutes=9)
    client = signed_in()
    answers = []
    for _ in range(4):
        move(170)
        answers.append(client.get("/jobs/count/").status_code)
    assert answers == [200, 200, 200, 302]


def test_role_and_hosts_hold_at_the_next_request(bob: User, admin: Actor) -> None:
    mine, other = HostFactory.create(slug="mine"), HostFactory.create(slug="other")
    job = JobFactory.create(target=other)
    client = signed_in()
    assert client.get(f"/jobs/{job.pk}/").status_code == 200
    assert client.get("/tokens/").status_code == 403
    users.change_user(admin, bob, role=Role.ADMIN)
    assert client.get("/tokens/").status_code == 200
    users.change_user(admin, bob, hosts=["mine"])
    assert client.get(f"/jobs/{job.pk}/").status_code == 404
    assert client.get("/tokens/").status_code == 403
    assert [row["id"] for row in client.get("/api/v1/hosts/").json()["results"]] == [mine.pk]


def test_who_is_deactivated_is_out_everywhere_at_once(bob: User, admin: Actor) -> None:
    here, there = signed_in(), signed_in()
    users.change_user(admin, bob, is_active=False)
    assert not Session.objects.filter(user=bob).exists()
    for client in (here, there):
        assert client.get("/").status_code == 302
        assert client.get("/api/v1/hosts/").status_code == 401
    assert Client().post("/login/", {"username": "bob", "password": PASSWORD}).status_code == 200
    users.change_user(admin, bob, is_active=True)
    assert here.get("/").status_code == 302


def test_a_one_time_password_has_to_be_changed_before_anything_else(bob: User, admin: Actor) -> None:
    before = signed_in()
    password = users.reset_password(admin, bob)
    assert before.get("/").status_code == 302
    client = signed_in(password=password)
    assert client.get("/jobs/")["Location"] == "/password/"
    assert client.get("/jobs/count/", headers={"HX-Request": "true"})["HX-Redirect"] == "/password/"
    refused = client.get("/api/v1/hosts/")
    assert (refused.status_code, refused.json()["code"]) == (403, "password_change_needed")
    same = {"old_password": password, "new_password1": password, "new_password2": password}
    assert "must differ from the current one" in client.post("/password/", same).content.decode()
    other = same | {"new_password1": "a much better one", "new_password2": "a much better one"}
    assert client.post("/password/", other)["Location"] == "/"
    assert client.get("/jobs/").status_code == 200
    assert not User.objects.get(pk=bob.pk).must_change_password


def test_one_session_is_ended_and_the_others_go_on(bob: User, admin: Actor) -> None:
    here, there = signed_in(), signed_in()
    uid = Session.objects.get(session_key=there.cookies["sessionid"].value).uid
    assert users.end_session(admin, bob, uid)
    assert not users.end_session(admin, bob, uid)
    assert (here.get("/").status_code, there.get("/").status_code) == (200, 302)
    assert AuditEntry.objects.filter(what="session ended", who="root", target="bob").count() == 1


def test_ones_own_sessions_end_on_ones_own_page_and_nobody_elses(bob: User) -> None:
    here, there = signed_in(), signed_in()
    other = signed_in(UserFactory.create(username="eve").username)
    theirs = Session.objects.get(session_key=other.cookies["sessionid"].value).uid
    assert here.post(f"/account/sessions/{theirs}/end/").status_code == 404
    page = here.get("/account/").content.decode()
    assert "this session" in page
    assert here.cookies["sessionid"].value not in page
    here.post("/account/sign-out/")
    assert (here.get("/").status_code, there.get("/").status_code, other.get("/").status_code) == (200, 302, 200)


def test_no_answer_shows_the_key_of_a_session(bob: User) -> None:
    root = signed_in(UserFactory.create(username="root", role="admin").username)
    key = signed_in(HTTP_USER_AGENT=FIREFOX).cookies["sessionid"].value
    for address in (f"/users/{bob.pk}/", "/users/", f"/api/v1/users/{bob.pk}/sessions/"):
        answer = root.get(address)
        assert answer.status_code == 200
        assert key not in answer.content.decode()
    (row,) = root.get(f"/api/v1/users/{bob.pk}/sessions/").json()["results"]
    assert (row["browser"], row["address"]) == ("Firefox on Linux", "127.0.0.1")


def test_sessions_that_are_over_are_forgotten(bob: User) -> None:
    signed_in()
    Session.objects.update(expire_date=timezone.now() - timedelta(seconds=1))
    tasks.tidy()
    assert not Session.objects.exists()


@pytest.mark.parametrize(
    ("agent", "word"),
    [(FIREFOX, "Firefox on Linux"), ("", "another browser"),
     ("Mozilla/5.0 (Windows NT 10.0; Win64; x64) Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
     ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) Version/18.0 Safari/604.1", "Safari on iOS"),
     ("<script>alert(1)</script>", "another browser")],
)  # fmt: skip
def test_a_browser_is_named_in_short(agent: str, word: str) -> None:
    assert sessions.browser_of(agent) == word
