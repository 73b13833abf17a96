"""What a caller did wrong, as services say it."""

from types import TracebackType


class InvalidError(Exception):
    """Input that cannot be used.

    Args:
        detail: a sentence that says what to do.
        fields: the same by field, where it belongs to one.
        code: ``invalid``; ``last_admin`` and ``own_account`` where it would lock out everybody, or whoever asks.
    """

    def __init__(self, detail: str, fields: dict[str, str] | None = None, *, code: str = "invalid") -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields or {}
        self.code = code


def of_fields(fields: dict[str, str]) -> InvalidError:
    """What is wrong with several fields; the sentence names each."""
    return InvalidError(" ".join(f"{name}: {text}" for name, text in fields.items()), fields)


def of_field(field: str, sentence: str) -> InvalidError:
    """What is wrong with one field."""
    return InvalidError(sentence, {field: sentence})


def require_right(wrong: dict[str, str]) -> None:
    """Raises InvalidError where something is wrong with a field; its sentences tell which by themselves."""
    if wrong:
        raise InvalidError(" ".join(wrong.values()), wrong)


class Faults(dict[str, str]):
    """What is wrong with fields, each checked within a ``with`` of its own, so that one error names all."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        if isinstance(error, InvalidError):
            self.update(error.fields)
        return isinstance(error, InvalidError)


class UnconfirmedError(Exception):
    """Nobody has confirmed what a host shows as its own.

    Args:
        detail: a sentence that says how to compare it.
        shown: what is to be sent back once it is compared, by field: ``host_key`` and its ``fingerprint``.
    """

    def __init__(self, detail: str, shown: dict[str, str], code: str = "host_key_unconfirmed") -> None:
        super().__init__(detail)
        self.detail = detail
        self.shown = shown
        self.code = code


class NotFoundError(Exception):
    """There is no such thing, or not for this actor. The argument is a sentence."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
