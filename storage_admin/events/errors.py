"""What an admin can put right."""


class EventsError(Exception):
    """A value that cannot be taken.

    Args:
        detail: a sentence that says what to do.
        field: the field that it is about.
    """

    def __init__(self, detail: str, field: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
