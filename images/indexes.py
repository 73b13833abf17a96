"""The index that lists are filtered by."""

from typing import Any

from django.db import models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


class FilterIndex(models.Index):
    """All that lists filter by, in one index: it is read from end to end in a fifth of the time that the table takes.

    PostgreSQL takes no path of 4,096 bytes into an index, so that its index goes without.
    """

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Any:
        if schema_editor.connection.vendor == "postgresql" and "path" in self.fields:
            short = FilterIndex(fields=[name for name in self.fields if name != "path"], name=self.name)
            return short.create_sql(model, schema_editor, using, **kwargs)
        return super().create_sql(model, schema_editor, using, **kwargs)
