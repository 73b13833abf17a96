"""Forms that are refused: their pages show them again with what was typed, and all that is wrong at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.web.templatetags.parts import refusal_code

T = TypeVar("T")


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a form (``fragments/wrong.html``).

    Args:
        detail: a sentence, where it belongs to no field.
        fields: sentences by the form's names of its fields.
        status: of the answer that shows the form again.
        refusal: its code, where it is one.
    """

    detail: str
    fields: dict[str, str]
    status: int = 400
    refusal: str = ""


def refusal_message(error: RefusedError, ending: str = "") -> SafeString:
    """A refusal as a page's message: what speaks against it, what that means, and its code in small print."""
    ending = ending or _("Nothing was changed.")
    return format_html("<b>{}</b> {} {} {}", _("Refused."), error.detail, ending, refusal_code(error.code))


def whole_number(text: str) -> int | None:
    """What was typed as a whole number; ``None`` where nothing was. Raises ValueError where it is none."""
    return int(text) if text.strip() else None


class Form:
    """A form as it was sent. What cannot be read of it is told together with what cannot be taken."""

    def __init__(self, request: HttpRequest, names: Mapping[str, str] | None = None) -> None:
        """Reads the form of a request.

        Args:
            names: the form's names of fields that services call otherwise.
        """
        self._request = request
        self._names = names or {}
        self._unread: dict[str, str] = {}

    def text(self, name: str) -> str:
        """What was typed; empty where nothing was."""
        return self._request.POST.get(name, "")

    def whole(self, name: str, *, required: bool = False) -> int | None:
        """A whole number; ``None`` where nothing was typed, or something else."""
        return self._read(name, int, _("Enter a whole number."), required=required)

    def number(self, name: str) -> float | None:
        """A number, whose decimals may follow a comma; ``None`` where nothing was typed, or something else."""
        return self._read(name, lambda text: float(text.replace(",", ".")), _("Enter a number."))

    def role(self, name: str = "role") -> Role:
        """A role; the least one where there is no such role."""
        try:
            return Role.named(self.text(name))
        except ValueError as error:
            self.wrong(name, str(error))
            return Role.VIEWER

    def wrong(self, name: str, sentence: str) -> None:
        """Notes what is wrong with a field."""
        self._unread[name] = sentence

    def confirmed(self, wanted: str, name: str = "confirm") -> None:
        """Raises InvalidError where something else was typed than what confirms it."""
        if self.text(name).strip() != wanted:
            sentence = _("Not confirmed: type “{wanted}” to confirm.").format(wanted=wanted)
            raise InvalidError(sentence, {name: sentence})

    def save(self, work: Callable[[], T], done: str = "") -> T | None:
        """Does what the form asks for; what speaks against it is kept for the page, which shows the form again.

        Args:
            done: the sentence for success on the next page; empty says nothing.

        Returns:
            What ``work`` returned, ``None`` where it was refused.
        """
        try:
            result = self._all_at_once(work) if self._unread else work()
        except RefusedError as error:
            self._refuse(Wrong(error.detail, {}, 409, error.code))
            return None
        except InvalidError as error:
            fields = {self._names.get(name, name): text for name, text in error.fields.items()} | self._unread
            self._refuse(Wrong("" if fields else error.detail, fields))
            return None
        if done:
            messages.success(self._request, done)
        return result

    def _all_at_once(self, work: Callable[[], T]) -> T:
        """The work, undone at its end, for what it says of the fields that could be read."""
        with transaction.atomic():
            work()
            raise InvalidError(_("Some fields are invalid."))

    def _refuse(self, wrong: Wrong) -> None:
        self._request.wrong = wrong  # type: ignore[attr-defined]

    def _read(self, name: str, read: Callable[[str], T], sentence: str, *, required: bool = False) -> T | None:
        text = self.text(name).strip()
        # What a form does not have at all is left as it is.
        if not text and not (required and name in self._request.POST):
            return None
        try:
            return read(text)
        except (ValueError, OverflowError):
            self.wrong(name, sentence)
            return None


def wrong_of(request: HttpRequest) -> Wrong | None:
    """Why the form that was sent was refused; ``None`` where it was not."""
    return getattr(request, "wrong", None)


def status_of(request: HttpRequest) -> int:
    """Of the page that shows a form again, else 200."""
    wrong = wrong_of(request)
    return wrong.status if wrong else 200


def typed(request: HttpRequest, address: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields of a form hold: what was typed into them where it was refused, else what is kept.

    Args:
        address: where the form is sent to.
        kept: values by the names of the fields; of a list all that were ticked are told.
    """
    if wrong_of(request) is None or request.path != address:
        return {name: "" if value is None else value for name, value in kept.items()}
    sent = request.POST
    return {name: sent.getlist(name) if isinstance(value, list) else sent.get(name, "") for name, value in kept.items()}
