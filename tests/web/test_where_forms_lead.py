"""Where a form leads to next is an address of the dashboard, whatever the form says, and never an error."""

from urllib.parse import urljoin

from django.test import Client

from tests.factories import AlertFactory, JobFactory, UserFactory
from tests.web.conftest import Filled

HERE = "http://testserver/"
HOSTILE = [
    "https://evil.example/", "//evil.example/", "///evil.example/", "/\\evil.example/", "\\\\evil.example\\",
    "javascript:alert(1)", "data:text/html,x", "nonsense", "a b", "", "/\tx", "/%0d%0aSet-Cookie:x=1",
    "/a\r\nSet-Cookie: x=1", "http:evil.example", "https:///evil.example", "policies:x",
    "storage_admin.web.pages.users", "/\u202eevil", "//[::1", "/" * 3000,
]  # fmt: skip


def is_here(where: str) -> bool:
    """Whether a browser that is led there stays; a backslash is a slash to it."""
    return urljoin(f"{HERE}login/", where.replace("\\", "/")).startswith(HERE) and where.isprintable()


def test_no_form_leads_away_or_fails_by_where_it_is_to_lead(admin: Client, filled: Filled) -> None:
    alert = AlertFactory.create(host="local")
    job = JobFactory.create(kind="scan", target=filled.host, state="queued")
    for where in HOSTILE:
        for address, body in (
            (f"/alerts/{alert.pk}/acknowledge/", {}), ("/automation/", {"paused": "true"}),
            (f"/jobs/{job.pk}/cancel/", {}), ("/images/analyze/", {"image": "0"}),
        ):  # fmt: skip
            answer = admin.post(address, {"next": where} | body)
            assert answer.status_code == 302, (address, where)
            assert is_here(answer["Location"]), (address, where)
        assert admin.post("/images/analyze/", {"next": "/images/?page=2"})["Location"] == "/images/?page=2"


def test_signing_in_and_out_leads_nowhere_else(db: None) -> None:
    user = UserFactory.create(password="horse-battery-9")
    client = Client()
    for where in (*HOSTILE, "\x00"):
        body = {"username": user.username, "password": "horse-battery-9", "next": where}
        for address in ("/login/", "/logout/"):
            answer = client.post(address, body)
            assert answer.status_code == 302, (address, where)
            assert is_here(answer["Location"]), (address, where)


def test_a_saved_view_leads_to_its_own_list(admin: Client, filled: Filled) -> None:
    for query in (*HOSTILE, "next=//evil.example/", "#//evil", "\r\nX: y", "view=%0d%0aX:y", "search=//evil.example"):
        for page in ("images", "alerts", "audit", "https://evil.example/", "//evil", ""):
            answer = admin.post("/views/", {"page": page, "name": "x", "query": query, "default": "on"})
            assert answer["Location"] == "/" or answer["Location"].startswith(f"/{page}/?"), (page, query)
    for page in ("images", "alerts", "audit"):
        answer = admin.get(f"/{page}/")
        assert answer["Location"] == f"/{page}/?search=%2F%2Fevil.example"
        assert admin.get(answer["Location"]).status_code == 200
