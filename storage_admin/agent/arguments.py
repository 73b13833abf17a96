"""How a verb takes its arguments: by name, with their types, and none that it does not know."""

from __future__ import annotations

from typing import Any, TypeVar

from storage_admin.agent.protocol import INVALID, RefusedError, unb64

T = TypeVar("T")


class Arguments:
    """The arguments of one request.

    Args:
        fields: as they came.
        known: the names that the verb takes.

    Raises:
        RefusedError: ``invalid``, for a name that is not known. So do all methods, for a value of another type.
    """

    def __init__(self, fields: dict[str, Any], known: frozenset[str]) -> None:
        if unknown := sorted(fields.keys() - known):
            raise RefusedError(INVALID, "unknown option: " + ", ".join(unknown))
        self._fields = fields

    def take(self, name: str, kind: type[T]) -> T:
        """A required value; a boolean is no integer, an integer is a float."""
        if name not in self._fields:
            raise RefusedError(INVALID, f"{name} is missing")
        value = self._fields[name]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RefusedError(INVALID, f"{name} is no {kind.__name__}")
        return value

    def get(self, name: str, kind: type[T], default: T) -> T:
        """A value that may be missing."""
        return default if name not in self._fields else self.take(name, kind)

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """A value that may be missing or null."""
        return None if self._fields.get(name) is None else self.take(name, kind)

    def path(self, name: str) -> bytes:
        """A required path, from base64."""
        try:
            return unb64(self.take(name, str))
        except ValueError as error:
            raise RefusedError(INVALID, f"{name} is no base64") from error

    def choice(self, name: str, among: frozenset[str], default: str) -> str:
        """One of several words."""
        value = self.get(name, str, default)
        if value not in among:
            raise RefusedError(INVALID, f"{name} is one of " + ", ".join(sorted(among)))
        return value

    def size(self, name: str) -> int | None:
        """A number of bytes, at least 1, or ``None``."""
        value = self.maybe(name, int)
        if value is not None and value < 1:
            raise RefusedError(INVALID, f"{name} is at least 1")
        return value
