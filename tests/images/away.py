"""The database goes away for a moment in the middle of a job that runs in the test's own process."""

from typing import Any

import pytest
from django.db import OperationalError

from storage_admin.jobs import runner


def goes_away(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, text: str = "", *, times: int = 2) -> list[int]:
    """Has calls of a function find the database locked, the first ones of those whose arguments hold a text.

    Returns:
        A list that gets a 1 for each of these calls.
    """
    real, failed = getattr(where, name), list[int]()

    def locked(*args: Any, **kwargs: Any) -> Any:
        if len(failed) < times and any(text in str(one) for one in args):
            failed.append(1)
            raise OperationalError("database is locked")
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "FINISH_AGAIN", 0.05)
    monkeypatch.setattr(runner, "connection", type("Kept", (), {"close": staticmethod(lambda: None)}))
    monkeypatch.setattr(where, name, locked)
    return failed
