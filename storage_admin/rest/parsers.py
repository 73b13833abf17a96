"""Bodies of requests: JSON within bounds, of text that every database can keep."""

import json
from typing import IO, Any

from django.utils.translation import gettext as _
from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser

#: Bytes. No request of the API comes near it.
LARGEST_BODY = 1 << 20


class JsonParser(BaseParser):
    """JSON, at most 1 MiB, without NUL characters and lone surrogates, which databases refuse."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], *_about: Any, **_more: Any) -> Any:
        raw = stream.read(LARGEST_BODY + 1)
        if len(raw) > LARGEST_BODY:
            raise ParseError(_("The body is larger than 1 MiB."))
        try:
            parsed = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ParseError(_("The body is not valid JSON: {error}.").format(error=error)) from None
        _check_text(parsed)
        return parsed


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_text(parsed: Any) -> None:
    waiting = [parsed]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
            raise ParseError(_("The body contains a NUL character or an unpaired surrogate, which is not valid text."))
