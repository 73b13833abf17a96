"""Functions of the product that do something more in a test, or fail."""

from collections.abc import Callable
from typing import Any

import pytest


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that fails with this error, whatever it is given."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def do_before(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[..., object]) -> None:
    """Has ``act`` called before each call of a function, with the same arguments."""
    real = getattr(where, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, both)


def do_after(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[..., object]) -> None:
    """Has ``act`` called after each call of a function that came to its end, with the same arguments."""
    real = getattr(where, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        answer = real(*args, **kwargs)
        act(*args, **kwargs)
        return answer

    monkeypatch.setattr(where, name, both)
