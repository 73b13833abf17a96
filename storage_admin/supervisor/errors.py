"""What keeps the start from going on."""


class SetupError(Exception):
    """Something about this machine that an administrator can put right; its text is one sentence that says how."""
