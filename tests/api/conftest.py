"""A client for each role, with a token of its own, and a world that they ask about."""

from collections.abc import Callable

import pytest
from rest_framework.test import APIClient

from tests.api.test_roles import world
from tests.factories import TokenFactory

__all__ = ["world"]


@pytest.fixture
def client_of(db: None) -> Callable[..., APIClient]:
    """``client_of("viewer", hosts=["local"])``: sends a token's requests; other words go to the token's row."""

    def make(role: str, **token: object) -> APIClient:
        secret = f"sa_{role}-{len(made)}"
        made.append(TokenFactory.create(role=role, secret=secret, **token))
        client = APIClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
        return client

    made: list[object] = []
    return make


@pytest.fixture
def viewer(client_of: Callable[..., APIClient]) -> APIClient:
    return client_of("viewer")


@pytest.fixture
def operator(client_of: Callable[..., APIClient]) -> APIClient:
    return client_of("operator")


@pytest.fixture
def admin(client_of: Callable[..., APIClient]) -> APIClient:
    return client_of("admin")
