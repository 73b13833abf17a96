"""An emulated machine is slow."""

import pytest

from storage_admin.hosts import session


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents there take their time until they greet, where much else runs beside them."""
    monkeypatch.setattr(session, "HELLO_TIMEOUT", 300.0)
