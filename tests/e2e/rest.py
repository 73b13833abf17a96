"""The dashboard over REST, as automation uses it."""

import time
from typing import Any

import requests

from tests.harness.services import Dashboard


class Rest:
    """A client with a token of its own."""

    def __init__(self, dashboard: Dashboard, role: str = "admin", name: str = "") -> None:
        self.base = f"{dashboard.url}/api/v1/"
        name = name or f"tests {role} {time.monotonic_ns()}"
        token = dashboard.manage("create_token", name, "--role", role).strip()
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, **query: Any) -> Any:
        """What an address answers.

        Raises:
            AssertionError: not with 200.
        """
        answer = self._session.get(self.base + path, params=query, timeout=30)
        assert answer.status_code == 200, f"GET {path}: {answer.status_code} {answer.text[:300]}"
        return answer.json()

    def post(self, path: str, body: dict[str, Any] | None = None, expect: int | tuple[int, ...] = 202) -> Any:
        """What an address answers to a request that changes something, with one of the statuses ``expect``."""
        answer = self._session.post(self.base + path, json=body or {}, timeout=30)
        allowed = (expect,) if isinstance(expect, int) else expect
        assert answer.status_code in allowed, f"POST {path}: {answer.status_code} {answer.text[:300]}"
        return answer.json()

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._session.patch(self.base + path, json=body, timeout=30)
        assert answer.status_code == 200, f"PATCH {path}: {answer.status_code} {answer.text[:300]}"
        return answer.json()

    def finished(self, job: dict[str, Any], seconds: float = 90) -> dict[str, Any]:
        """The job once it has ended."""
        deadline = time.monotonic() + seconds
        while True:
            now: dict[str, Any] = self.get(f"jobs/{job['id']}/")
            if now["state"] not in {"queued", "running"}:
                return now
            assert time.monotonic() < deadline, f"job {job['id']} is {now['state']} {now['stage']} {now['waiting_for']}"
            time.sleep(0.2)

    def local(self) -> dict[str, Any]:
        """This machine, whichever hosts other tests have added."""
        row: dict[str, Any] = next(row for row in self.get("hosts/", limit=1000)["results"] if row["slug"] == "local")
        return row

    def scan(self) -> None:
        """Scans this machine and waits for the end."""
        host = self.local()["id"]
        ended = self.finished(self.post(f"hosts/{host}/scan/"))
        assert ended["state"] == "succeeded", ended["error"]

    def quiet(self, seconds: float = 90) -> None:
        """Waits until no job is at work."""
        deadline = time.monotonic() + seconds
        while any(self.get("jobs/", state=state)["results"] for state in ("queued", "running")):
            assert time.monotonic() < deadline, "jobs do not come to an end"
            time.sleep(0.3)

    def image(self, name: str) -> dict[str, Any]:
        found = [row for row in self.get("images/", search=name, limit=1000)["results"] if row["name"] == name]
        assert len(found) == 1, f"{name}: {len(found)} images"
        return dict(found[0])
