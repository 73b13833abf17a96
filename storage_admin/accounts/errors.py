"""What is wrong with what somebody wants of users, tokens and sessions."""


class AccountError(ValueError):
    """It cannot be done.

    Args:
        detail: a sentence that says what to do.
        fields: the same by field, where it belongs to one.
        code: ``invalid`` for input that cannot be used; ``last_admin`` and ``own_account`` where it would lock out
            everybody, or whoever asks.
    """

    def __init__(self, detail: str, fields: dict[str, str] | None = None, *, code: str = "invalid") -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields or {}
        self.code = code
