"""What the tests of policies share."""

from typing import Any

from tests.factories import GIB, ImageFactory
from tests.policies.test_runs import estimated

URL = "/api/v1/policies/"


NIGHTLY = {"name": "nightly", "cron": "0 22 * * 1-5", "timezone": "Europe/Berlin"}


def wins(**columns: Any) -> Any:
    return ImageFactory.create(**{"reclaimable_bytes": GIB} | estimated(8) | columns)
