"""Fixtures of the policies' tests."""

import pytest

from images.models import Policy
from tests.factories import PolicyFactory


@pytest.fixture
def policy(db: None) -> Policy:
    """Reclaims every night at 22:00 UTC for six hours, the last half hour quiet, one job at once on each host."""
    return PolicyFactory.create()
