"""A job's options as a kind's JSON Schema has them."""

from copy import deepcopy
from typing import Any

import jsonschema
from django.utils.translation import gettext

from storage_admin.errors import of_fields


def _is_whole(_checker: jsonschema.TypeChecker, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: Where a whole number is wanted, 4.0 is none: JSON Schema alone would take it.
StrictValidator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_whole),
)


def cleaned(kind: str, schema: dict[str, Any], options: Any) -> dict[str, Any]:
    """The options with the defaults of those that were not given.

    Raises:
        InvalidError: an option is unknown or out of range; it names each.
    """
    properties: dict[str, dict[str, Any]] = schema["properties"]
    fields: dict[str, str] = {}
    for error in StrictValidator(schema).iter_errors(options):
        if error.validator == "additionalProperties":
            unknown = sorted(set(options) - set(properties))
            known = ", ".join(sorted(properties)) or "none"
            told = gettext("{name} has no such option. Its options: {known}.").format(name=kind, known=known)
            fields |= dict.fromkeys(unknown, told)
        elif error.validator == "required":
            missing = [name for name in error.validator_value if name not in options]
            fields |= dict.fromkeys(missing, gettext("required."))
        else:
            fields[str(error.path[0]) if error.path else "options"] = _sentence(error)
    if fields:
        raise of_fields(fields)
    defaults = {name: one["default"] for name, one in properties.items() if "default" in one}
    return deepcopy(defaults) | {name: _shortest(value) for name, value in options.items()}


def _shortest(value: Any) -> Any:
    """Where any number may be given, 24.0 hours are 24: the same request has one digest."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sentence(error: jsonschema.ValidationError) -> str:
    wanted: Any = error.validator_value
    if error.validator == "enum":
        return gettext("choose one of {path}.").format(path=", ".join(map(str, wanted)))
    if error.validator == "minimum":
        return gettext("at least {wanted}.").format(wanted=wanted)
    if error.validator == "maximum":
        return gettext("at most {wanted}.").format(wanted=wanted)
    if error.validator == "type":
        return f"must be of type {wanted if isinstance(wanted, str) else ' or '.join(wanted)}."
    return error.message
