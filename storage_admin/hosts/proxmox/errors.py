"""What Proxmox VE answers where it does not do what was asked, in sentences that say what to do.

The traps, as its own code has them: a bad token is a 401 without a body, with the reason in the status line alone; a VM
that is not there is a 500; a path that its version does not know is a 501; a node or a storage that does not answer is
a 595 or 596, again without a body; what is refused because of a lock or a changed digest is a plain 500.
"""

import re
from collections.abc import Mapping

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import TOOL_FAILED, HostError, RefusedError

UNREACHABLE = "host_unreachable"
TOKEN_REFUSED = "token_refused"  # noqa: S105 (the name of a code)
RIGHT_MISSING = "right_missing"
NOT_FOUND = "not_found"

#: AnyEvent's own statuses, which pveproxy passes on: the node, or the worker that does the request, did not answer.
_NO_ANSWER = frozenset({504, 595, 596, 597, 598, 599})
_DENIED = re.compile(r"\(([^\s,()]+), ([^()]+)\)")
_LOCKED = re.compile(r"\b(?:VM|CT|guest|container) is locked(?: \(([\w-]+)\))?", re.IGNORECASE)
_CHANGED = ("checksum mismatch", "detected modified configuration")
_BUSY = re.compile(r"can't lock file '[^']*'.*got timeout")
_GONE = re.compile(r"(?:Configuration file|snapshot|storage) '[^']*' does not exist|no such task", re.IGNORECASE)
_LONGEST = 600


class ApiError(HostError):
    """An answer that is none of those below.

    Args:
        status: of HTTP.
    """

    def __init__(self, detail: str, code: str = TOOL_FAILED, status: int = 0) -> None:
        super().__init__(detail, code)
        self.status = status


class DeniedError(ApiError):
    """The token has no right to that."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, RIGHT_MISSING, 403)


class NotThereError(ApiError):
    """The guest, the storage or the snapshot does not exist (any more)."""


class NotKnownError(ApiError):
    """This version of Proxmox VE has no such call."""


class NoAnswerError(ApiError):
    """The node did not answer in time: it hangs, or one of its storages does."""


def of_host(error: HostError | RefusedError) -> str:
    """The code for a node that tells nothing: that it does not answer, unless it has answered that it may not tell."""
    return error.code if error.code in (TOKEN_REFUSED, RIGHT_MISSING) else UNREACHABLE


def of_answer(
    who: str, status: int, reason: str, message: str = "", fields: Mapping[str, str] | None = None
) -> HostError | RefusedError:
    """The exception for an answer with an error.

    Args:
        who: the server and the token, as in a sentence.
        status: of HTTP.
        reason: the rest of the status line.
        message: of the body, where there is one.
        fields: the body's ``errors``.
    """
    said = _one_line(message or reason) or _("status {status}").format(status=status)
    if status == 401:
        return ApiError(
            _(
                "{who} rejected the API token: {said}. Check its ID, secret and expiry date."
            ).format(who=who, said=said),
            TOKEN_REFUSED, status,
        )  # fmt: skip
    if status == 403:
        return _denied(who, said)
    if status == 400:
        told = "; ".join(f"{name}: {_one_line(why)}" for name, why in sorted((fields or {}).items()))
        # What is in the way of a change comes as an error of the parameter, too.
        return in_the_way(who, told) or ApiError(
            _("{who} rejected the request: {said}").format(who=who, said=told or said), status=400
        )
    if status == 501:
        sentence = _("{who} does not support this call: {said}. Its version of Proxmox VE may be too old.")
        return NotKnownError(sentence.format(who=who, said=said), status=status)
    if status in _NO_ANSWER:
        return NoAnswerError(
            _("{who} did not answer ({status} {said}). A node may be down, or one of its storages may hang.").format(
                who=who, status=status, said=said
            ),
            UNREACHABLE, status,
        )  # fmt: skip
    if status >= 500:
        return in_the_way(who, said) or _failed(who, status, said)
    sentence = _("{who} answered {status} {said}. Check that the address is a Proxmox VE server.")
    return ApiError(sentence.format(who=who, status=status, said=said), status=status)


def _denied(who: str, said: str) -> DeniedError:
    found = _DENIED.search(said)
    if found is None:
        return DeniedError(_("{who} denied the request: {said}").format(who=who, said=said))
    rights = _(" or ").join(right.strip() for right in found[2].split("|"))
    return DeniedError(_("{who} lacks {rights} on {path}.").format(who=who, rights=rights, path=found[1]))


def in_the_way(who: str, said: str) -> RefusedError | None:
    """What these words of Proxmox VE refuse, where it is something that an admin can wait for or undo."""
    locked = _LOCKED.search(said)
    if locked is not None:
        return guest_locked(_("The guest"), locked[1] or "locked")
    if any(words in said for words in _CHANGED):
        return changed_meanwhile()
    if _BUSY.search(said):
        return RefusedError("busy", _("{who} is busy. Try again in a minute.").format(who=who))
    return None


def _failed(who: str, status: int, said: str) -> ApiError:
    kind = NotThereError if _GONE.search(said) else ApiError
    return kind(
        _("{who} says: {said}").format(who=who, said=said), NOT_FOUND if kind is NotThereError else TOOL_FAILED, status
    )


def changed_meanwhile() -> RefusedError:
    """The refusal where a configuration is not what it was when the work was planned."""
    return RefusedError(
        "stale_plan", _("The guest's configuration was changed in the meantime. Reload the plan, then try again.")
    )


def guest_locked(name: str, lock: str) -> RefusedError:
    """The refusal for a guest whose configuration has a ``lock``."""
    return RefusedError(
        "guest_locked",
        _(
            "{name} is locked by Proxmox VE ({lock}). Wait until the lock is released. If no task is running any "
            "more, unlock the guest in Proxmox VE."
        ).format(name=name, lock=lock),
    )


def _one_line(text: str) -> str:
    """Fit for a sentence: whose words these are is not ours to trust."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line).rstrip(".")[:_LONGEST]
