"""Rows of which a list reads some columns only."""

from collections.abc import Collection
from typing import Any, Self

from django.db import models


class PartialRows(models.Model):
    """For models with many columns of which lists leave out the large ones.

    Django looks each column up in the list of those that were read: fifty columns of fifty rows are compared as often
    as all the rest of a list's page takes. In a set each is found at once.
    """

    class Meta:
        abstract = True

    @classmethod
    def from_db(cls, db: str | None, field_names: Collection[str], values: Collection[Any], **options: Any) -> Self:
        """As Django's."""
        return super().from_db(db, frozenset(field_names), values, **options)
