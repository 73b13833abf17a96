"""The audit trail is append-only for the database itself: triggers refuse to change or delete a row.

Whoever may change the tables can take the triggers away; what they stop is every statement of a program, ours or
another, that gets hold of the dashboard's connection and knows no better. ``TRUNCATE`` on PostgreSQL, and ``manage.py
flush``, which empty whole databases, go through.

A migration that changes the table on SQLite makes it anew, and has to call :func:`protect` afterwards.
"""

from typing import Any

TABLE = "accounts_auditentry"
WHY = "The audit trail is append-only."

_POSTGRESQL = (
    f"""CREATE OR REPLACE FUNCTION {TABLE}_refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION '{WHY}' USING ERRCODE = 'integrity_constraint_violation'; END $$""",
    f"DROP TRIGGER IF EXISTS {TABLE}_append_only ON {TABLE}",
    f"""CREATE TRIGGER {TABLE}_append_only BEFORE UPDATE OR DELETE ON {TABLE}
        FOR EACH ROW EXECUTE FUNCTION {TABLE}_refuse()""",
)
_POSTGRESQL_BACK = (
    f"DROP TRIGGER IF EXISTS {TABLE}_append_only ON {TABLE}",
    f"DROP FUNCTION IF EXISTS {TABLE}_refuse()",
)
_SQLITE_BACK = tuple(f"DROP TRIGGER IF EXISTS {TABLE}_no_{verb}" for verb in ("update", "delete"))
_SQLITE = _SQLITE_BACK + tuple(
    f"CREATE TRIGGER {TABLE}_no_{verb} BEFORE {verb.upper()} ON {TABLE} BEGIN SELECT RAISE(ABORT, '{WHY}'); END"
    for verb in ("update", "delete")
)


def protect(_apps: Any, schema_editor: Any) -> None:
    """Makes the triggers; for ``migrations.RunPython``."""
    _run(schema_editor, _POSTGRESQL, _SQLITE)


def unprotect(_apps: Any, schema_editor: Any) -> None:
    """Takes them away; for ``migrations.RunPython``."""
    _run(schema_editor, _POSTGRESQL_BACK, _SQLITE_BACK)


def _run(schema_editor: Any, postgresql: tuple[str, ...], sqlite: tuple[str, ...]) -> None:
    for statement in postgresql if schema_editor.connection.vendor == "postgresql" else sqlite:
        schema_editor.execute(statement, None)
