"""A dashboard with the demo's images, and tokens for it, for all tests here."""

from dataclasses import dataclass

import pytest

from tests.e2e.rest import Rest
from tests.harness.services import Dashboard


@dataclass(frozen=True)
class Automated:
    """Where it answers, and the tokens of an operator and an admin."""

    url: str
    operator: str
    admin: str

    @property
    def environment(self) -> dict[str, str]:
        return {"DASHBOARD": self.url, "TOKEN": self.operator, "ADMIN_TOKEN": self.admin}


@pytest.fixture(scope="session")
def automated(running_dashboard_session: Dashboard) -> Automated:
    """A dashboard that has scanned and sampled the demo's images."""
    running_dashboard_session.manage("demo", "--path", str(running_dashboard_session.demo))
    client = Rest(running_dashboard_session)
    for _ in range(10):
        client.scan()
        client.quiet()
        if not client.local()["owners_unknown"]:
            break  # a libvirtd of other tests, which just starts or stops, is asked again
    tokens = [
        running_dashboard_session.manage("create_token", f"examples {role}", "--role", role).strip()
        for role in ("operator", "admin")
    ]
    return Automated(running_dashboard_session.url, *tokens)
