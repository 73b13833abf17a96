"""What an admin can put right."""


class EventsError(Exception):
    """A value that cannot be taken.

    Args:
        detail: a sentence that says what to do.
        fields: the same by field, where it belongs to one.
    """

    def __init__(self, detail: str, fields: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields or {}


def of_field(field: str, sentence: str) -> EventsError:
    """What is wrong with one field."""
    return EventsError(sentence, {field: sentence})
