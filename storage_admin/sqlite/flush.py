"""Emptying tables (``manage.py flush``, and between tests) that triggers keep from being changed."""

from typing import Any

from django.db.backends.sqlite3.operations import DatabaseOperations as Operations


class DatabaseOperations(Operations):
    """As PostgreSQL's TRUNCATE, emptying does not run triggers: they are taken away for it and put back."""

    def sql_flush(self, style: Any, tables: Any, *, reset_sequences: bool = False, allow_cascade: bool = False) -> Any:
        statements = super().sql_flush(style, tables, reset_sequences=reset_sequences, allow_cascade=allow_cascade)
        if not tables:
            return statements
        with self.connection.cursor() as cursor:
            marks = ", ".join(["%s"] * len(tables))
            cursor.execute(
                f"SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name IN ({marks})",  # noqa: S608
                list(tables),
            )
            triggers = cursor.fetchall()
        dropped = [f"DROP TRIGGER {self.quote_name(name)};" for name, _ in triggers]
        return [*dropped, *statements, *(sql for _, sql in triggers)]
