"""What the OpenAPI schema says beside the endpoints' own words: how to sign in, errors, strict bodies."""

from typing import Any

from django.utils.translation import gettext as _
from drf_spectacular.extensions import OpenApiAuthenticationExtension

ERROR = {
    "type": "object",
    "description": "An error. `code` is for programs, `detail` is a sentence that says what to do, `fields` "
    "has a sentence for each invalid field or parameter.",
    "required": ["code", "detail", "fields"],
    "properties": {
        "code": {"type": "string", "examples": ["image_in_use", "invalid", "not_found"]},
        "detail": {"type": "string"},
        "fields": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_ALWAYS = {
    "400": "Invalid input.",
    "401": "Not authenticated.",
    "403": "The role or the host limit does not allow this.",
}
_CHANGES = {"409": "Refused. `code` names the reason, `detail` says what to do."}
#: Of answers that are a file, read on its host just now.
_FILE = "application/octet-stream"
#: An extension that marks what a host is asked for just now, so that it may be refused as a change may.
ASKS_HOST = "x-asks-host"
_ONE = {"404": "Not found, or no access."}


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # an untyped registry
    """``Authorization: Bearer TOKEN``."""

    target_class = "storage_admin.accounts.authentication.TokenAuthentication"
    name = "token"

    def get_security_definition(self, _auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": _("An API token. Create one with tokens/ or manage.py create_token."),
        }


def finish(result: dict[str, Any], **_about: Any) -> dict[str, Any]:
    """A hook of drf-spectacular: adds the errors that any endpoint may answer, and closes the bodies."""
    schemas = result.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = ERROR
    for name, schema in schemas.items():
        if name.endswith("Request") and schema.get("type") == "object":
            schema["additionalProperties"] = False
    for path, operations in result["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                _name_descending(parameter["schema"])
            file = operation["responses"].get("200", {}).get("content", {}).get(_FILE)
            if operation.get("security"):
                changes = method in {"post", "patch", "delete"} or file is not None or operation.pop(ASKS_HOST, False)
                _add_errors(operation, changes=changes, one="{" in path or method == "post")
            if file is not None:
                part = {"description": "The range that was asked for.", "content": {_FILE: file}}
                operation["responses"] |= {"206": part, "416": {"description": "The range lies outside of the file."}}
    return result


def _name_descending(schema: dict[str, Any]) -> None:
    """Names for orders such as ``-name``: a program that is generated from the schema would call them by number."""
    values = schema.get("enum", [])
    if any(str(value).startswith("-") for value in values):
        names = [str(value).removeprefix("-").upper() for value in values]
        pairs = zip(values, names, strict=True)
        schema["x-enum-varnames"] = [f"{name}_DESC" if value.startswith("-") else name for value, name in pairs]


def _add_errors(operation: dict[str, Any], *, changes: bool, one: bool) -> None:
    errors = _ALWAYS | (_ONE if one else {}) | (_CHANGES if changes else {})
    for status, description in errors.items():
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        operation["responses"].setdefault(status, {"description": description, "content": content})
