"""Who acts."""

import pytest

from storage_admin.accounts.models import Actor, Role, User
from tests.factories import UserFactory


@pytest.fixture
def root(db: None) -> User:
    return UserFactory.create(username="root", role="admin")


@pytest.fixture
def admin(root: User) -> Actor:
    return root.actor


@pytest.fixture
def bob(db: None) -> User:
    return UserFactory.create(username="bob", role="operator")


@pytest.fixture
def limited(db: None) -> Actor:
    """An admin of one host alone."""
    return Actor(name="ann", role=Role.ADMIN, hosts=frozenset({"a"}), user_id=-1)
