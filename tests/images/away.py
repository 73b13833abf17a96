"""The database goes away for a moment in the middle of a job that runs in the test's own process."""

from typing import Any

import pytest
from django.db import OperationalError

from storage_admin.jobs import runner


def goes_away(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, text: str = "", *, times: int = 2, spared: int = 0
) -> list[int]:
    """Has calls of a function find the database locked, the first ones of those whose arguments hold a text, after as
    many that are spared.

    Returns:
        A list that gets a 1 for each of these calls.
    """
    real, failed, others = getattr(where, name), list[int](), list[int]()

    def locked(*args: Any, **kwargs: Any) -> Any:
        if len(failed) < times and any(text in str(one) for one in args):
            (failed if len(others) == spared else others).append(1)
            if failed:
                raise OperationalError("database is locked")
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "FINISH_AGAIN", 0.05)
    monkeypatch.setattr(runner, "connection", type("Kept", (), {"close": staticmethod(lambda: None)}))
    monkeypatch.setattr(where, name, locked)
    return failed
