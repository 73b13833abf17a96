"""What the names of policies tell to whoever does not see these policies."""

from collections.abc import Callable

from rest_framework.test import APIClient

from tests.factories import HostFactory, PolicyFactory

URL = "/api/v1/policies/"


def test_a_draft_does_not_tell_which_names_other_hosts_policies_have(client_of: Callable[..., APIClient]) -> None:
    alpha, beta = HostFactory.create(slug="alpha"), HostFactory.create(slug="beta")
    PolicyFactory.create(name="beta-nights", hosts=[beta.pk])
    operator = client_of("operator", hosts=["alpha"])
    body = {"cron": "0 22 * * *", "hosts": [alpha.pk]}
    answers = [
        operator.post(f"{URL}preview/", body | {"name": name}, format="json") for name in ("beta-nights", "free")
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json().keys() == answers[1].json().keys()


def test_a_name_that_is_taken_is_refused_without_saying_by_whom(admin: APIClient) -> None:
    PolicyFactory.create(name="nightly")
    refused = admin.post(URL, {"name": "nightly", "cron": "0 22 * * *"}, format="json")
    assert (refused.status_code, refused.json()["fields"].keys()) == (400, {"name"})
    assert "nightly" not in refused.json()["detail"]
