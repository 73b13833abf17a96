"""What the tests of policy pages share."""

from typing import Any

from tests.factories import (
    GIB,
    ImageFactory,
)
from tests.policies.test_runs import estimated


def wins(**columns: Any) -> Any:
    return ImageFactory.create(**{"reclaimable_bytes": GIB} | estimated(8) | columns)
