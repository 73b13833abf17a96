"""Lists as CSV, of any length: read in parts, sent as they are read, for spreadsheets and scripts alike.

A size is a whole number of bytes, a time is ISO 8601 in UTC, and what is not known is empty, never 0.

A text stands in quotes always, a number never. Who opens the file with commas as separators, or with commas and
semicolons, gets each text as one cell. Where semicolons alone separate, as spreadsheets of many languages have it, a
quote within a line is no quote to them, and a text is cut at its semicolons: so what follows one is no formula either.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from django.db.models import Model, QuerySet
from django.http import StreamingHttpResponse
from django.utils import timezone

from storage_admin.batches import batched

#: Rows that are in memory at once.
PART = 1000

#: What begins a formula, also as the wide signs that spreadsheets take for the same.
FORMULA = frozenset("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
#: A semicolon before a formula, as which the rest of a text is read where semicolons separate.
SPLIT = re.compile(';(?=[ "]*[-=+@\uff1d\uff0b\uff0d\uff20])')

#: What is no text. Of these no cell has a separator or a quote.
BARE = (bool, int, float, datetime)

#: The name of each column, of letters and underscores, and how a row tells it: attributes with dots between them, or a
#: function.
Columns = Mapping[str, str | Callable[[Any], object]]


def csv_answer(name: str, columns: Columns, rows: Iterable[Any]) -> StreamingHttpResponse:
    """A list as a file to download.

    Args:
        name: of the file, as ``jobs``; the day is added to it.
        columns: what a line says of a row, in order.
        rows: filtered, ordered and within the actor's scope. Of a queryset the ids are read first and then the rows in
            parts, so that a slow reader holds no transaction open.
    """
    filename = f"{name}-{timezone.now():%Y-%m-%d}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{filename}"'}
    return StreamingHttpResponse(lines(columns, rows), content_type="text/csv; charset=utf-8", headers=headers)


def lines(columns: Columns, rows: Iterable[Any]) -> Iterator[str]:
    """The same as text: the heading and the first rows, then the others, so many at a time as are read at once."""
    told = [attrgetter(how) if isinstance(how, str) else how for how in columns.values()]
    heading = ",".join(columns) + "\r\n"
    for part in in_parts(rows):
        yield heading + "".join([line(tell(row) for tell in told) for row in part])
        heading = ""
    if heading:
        yield heading


def line(values: Iterable[object]) -> str:
    """One line with its end: each value as its :func:`cell`, in quotes where it is a text that says something."""
    return ",".join(map(_written, values)) + "\r\n"


def _written(value: object) -> str:
    text = cell(value)
    if not text or isinstance(value, BARE):
        return text
    return '"' + text.replace('"', '""') + '"'


def in_parts(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """The rows, :data:`PART` at a time."""
    return _by_id(rows) if isinstance(rows, QuerySet) else batched(rows, PART)


def _by_id(rows: QuerySet[Model]) -> Iterator[list[Model]]:
    """The rows of a queryset in its order. One that is deleted meanwhile is left out."""
    ids = array("q", rows.values_list("pk", flat=True).iterator(chunk_size=PART))
    unordered = rows.order_by()
    for part in batched(ids, PART):
        found = {row.pk: row for row in unordered.filter(pk__in=part)}
        yield [found[pk] for pk in part if pk in found]


def cell(value: object) -> str:
    """What a cell says; no text in it is a formula, and none has a line's end or a control character."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list | tuple | set | frozenset):
        value = ", ".join(map(str, value))
    text = str(value)
    guarded = f"'{text}" if text.lstrip(" ")[:1] in FORMULA and text.strip(" ") else text
    guarded = SPLIT.sub(";'", guarded) if ";" in guarded else guarded
    return guarded if guarded.isprintable() else "".join(map(_visible, guarded))


def known(answer: bool | None) -> str:
    """A yes or no that may not be known, in the words of the filters."""
    return "unknown" if answer is None else "yes" if answer else "no"


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
