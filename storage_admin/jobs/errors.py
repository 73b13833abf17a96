"""What a request for a job can be answered with, apart from a refusal (``RefusedError``)."""

from storage_admin.hosts.errors import InvalidError, NotFoundError

__all__ = ["InvalidError", "NotFoundError"]
