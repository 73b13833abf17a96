"""Whatever goes wrong: code, sentence, fields, and the status that belongs to the code."""

import json
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from tests.factories import ImageFactory, JobFactory, TokenFactory, UserFactory, an_hour_ago

pytestmark = pytest.mark.django_db

STATUS = {"invalid": 400, "not_authenticated": 401, "forbidden": 403, "not_found": 404, "method_not_allowed": 405}


def assert_error(response, code: str, *fields: str) -> str:  # type: ignore[no-untyped-def]
    assert response.headers["Content-Type"] == "application/json"
    body = response.json()
    assert set(body) == {"code", "detail", "fields"}
    assert (response.status_code, body["code"]) == (STATUS[code], code), body
    assert len(body["detail"]) > 10
    assert set(body["fields"]) == set(fields)
    return str(body["detail"])


@pytest.mark.parametrize("path", ["images/", "jobs/", "overview/", "images/1/", "nothing/", "", "tokens/"])
def test_nobody_gets_in_without_signing_in(path: str) -> None:
    response = APIClient().get(f"/api/v1/{path}")
    assert_error(response, "not_authenticated")
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["Bearer nonsense", "Bearer ", "Bearer", "Basic YTpi", "Bearer \xff\xfe"])
def test_a_header_that_opens_nothing(header: str) -> None:
    assert_error(APIClient().get("/api/v1/images/", HTTP_AUTHORIZATION=header), "not_authenticated")


def test_an_expired_token_says_so() -> None:
    TokenFactory.create(secret="sa_old", name="nightly", expires=an_hour_ago())
    response = APIClient().get("/api/v1/images/", HTTP_AUTHORIZATION="Bearer sa_old")
    assert "nightly has expired" in assert_error(response, "not_authenticated")


def test_a_session_without_its_csrf_token_changes_nothing() -> None:
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(UserFactory.create(role="admin"))
    assert client.get("/api/v1/images/").status_code == 200
    assert "CSRF" in assert_error(client.post("/api/v1/jobs/", {}, format="json"), "forbidden")


def test_a_session_with_its_csrf_token_is_let_through() -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(UserFactory.create(role="admin"))
    browser.cookies["csrftoken"] = "a" * 32
    response = browser.post("/api/v1/jobs/", "{}", content_type="application/json", headers={"X-CSRFToken": "a" * 32})
    assert_error(response, "invalid", "kind")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"kind": NaN}', "application/json"),
        (b"[" * 200_000, "application/json"),
        (b'{"kind": "sc\\u0000an"}', "application/json"),
        (b'{"options": {"x": ["\\ud800"]}}', "application/json"),
        (b'{"a": ' + b"1" * 5000 + b"}", "application/json"),
        (b'"' + b"x" * (1 << 20) + b'"', "application/json"),
        (b"kind=scan", "application/x-www-form-urlencoded"),
        (b"<kind/>", "text/xml"),
        (b"{}", "multipart/form-data; boundary=x"),
    ],
)
def test_a_body_that_is_no_json(operator: Any, body: bytes, kind: str) -> None:
    response = operator.generic("POST", "/api/v1/jobs/", body, content_type=kind)
    fields = ("kind",) if body == b"" else ()
    assert_error(response, "invalid", *fields)


@pytest.mark.parametrize("body", [[], "text", 5, None, True, [{"kind": "scan"}]])
def test_a_body_that_is_no_object(operator: APIClient, body: object) -> None:
    response = operator.generic("POST", "/api/v1/jobs/", json.dumps(body), content_type="application/json")
    assert_error(response, "invalid", "body")


@pytest.mark.parametrize(
    "path",
    ["images/999/", "hosts/999/", "pools/999/", "guests/999/", "jobs/999/", "jobs/999/log/", "images/999/chain/",
     "images/99999999999999999999999/", "images/x/", "images/-1/", "images/1", "no/such/thing/"],
)  # fmt: skip
def test_what_is_not_there(viewer: APIClient, path: str) -> None:
    assert_error(viewer.get(f"/api/v1/{path}"), "not_found")


@pytest.mark.parametrize("method", ["post", "put"])
def test_a_method_that_does_not_work_names_those_that_do(admin: APIClient, method: str) -> None:
    image = ImageFactory.create()
    response = getattr(admin, method)(f"/api/v1/images/{image.pk}/")
    assert "GET, PATCH" in assert_error(response, "method_not_allowed")
    assert "PATCH" in response.headers["Allow"]


def test_a_host_whose_fields_are_wrong_is_told_each_of_them(admin: APIClient) -> None:
    body = {"name": " ", "address": "-oProxyCommand=x", "user": "a b", "host_key": "x"}
    assert_error(admin.post("/api/v1/hosts/", body, format="json"), "invalid", "name")
    body["name"] = "hv1"
    assert_error(admin.post("/api/v1/hosts/", body, format="json"), "invalid", "address", "user", "host_key")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"), ("limit=1001", "limit"), ("limit=-1", "limit"), ("limit=x", "limit"), ("limit=", "limit"),
        ("limit=٣", "limit"), ("limit=1e3", "limit"), ("limit=1.0", "limit"), ("limit=" + "9" * 30, "limit"),
        ("offset=-1", "offset"), ("offset=x", "offset"), ("offset=" + "9" * 30, "offset"),
        ("offset=9223372036854775807", "offset"),
        ("ordering=size", "ordering"), ("ordering=--name", "ordering"), ("ordering=pool__host", "ordering"),
        ("state=good", "state"), ("format=docx", "format"), ("in_use=maybe", "in_use"), ("orphan=1", "orphan"),
        ("host=none", "host"), ("host=99", "host"), ("pool=99", "pool"), ("pool=x", "pool"), ("guest=99", "guest"),
        ("guest=" + "9" * 40, "guest"), ("min_chain_depth=x", "min_chain_depth"),
        ("max_chain_depth=-1", "max_chain_depth"),
        ("min_reclaimable=" + "9" * 25, "min_reclaimable"), ("min_reclaimable=1.5", "min_reclaimable"),
        ("search=a%00b", "search"), ("search=" + "x" * 1101, "search"), ("host=%00", "host"), ("hots=local", "hots"),
        ("name=x", "name"),
        ("state=", "state"), ("host=", "host"), ("ordering=", "ordering"), ("limit=5&limit=6", "limit"),
    ],
)  # fmt: skip
def test_a_filter_or_page_that_makes_no_sense(viewer: APIClient, query: str, field: str) -> None:
    assert_error(viewer.get(f"/api/v1/images/?{query}"), "invalid", field)


@pytest.mark.parametrize(
    ("query", "field"),
    [("cursor=x", "cursor"), ("cursor=cD1hYmM%3D", "cursor"), ("state=done", "state"),
     ("kind=format", "kind"), ("active=2", "active"), ("image=x", "image"), ("image=1.5", "image"),
     ("ordering=state", "ordering"),
     ("limit=0", "limit"), ("offset=3", "offset"), ("cursor=cD0" + "5" * 40, "cursor")],
)  # fmt: skip
def test_a_page_of_jobs_that_makes_no_sense(viewer: APIClient, query: str, field: str) -> None:
    JobFactory.create_batch(3)
    assert_error(viewer.get(f"/api/v1/jobs/?{query}"), "invalid", field)


@pytest.mark.parametrize("query", ["after=x", "after=-1", "limit=0", "after=" + "9" * 30])
def test_a_page_of_a_log_that_makes_no_sense(viewer: APIClient, query: str) -> None:
    assert_error(viewer.get(f"/api/v1/jobs/{JobFactory.create().pk}/log/?{query}"), "invalid", query.partition("=")[0])
