"""Why an image is left out: a code for each rule, and its sentence."""

from collections.abc import Callable
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from images.models import Image
from storage_admin.words import between, exact, size, tenths

#: Left out because the policy is not meant for them: counted, and listed page by page when somebody asks.
NOT_MEANT = {
    "gone": "No longer there since the last scan, or set aside.",
    "listed_elsewhere": "Listed by another host that mounts the same storage: it is looked at there.",
    "lister_not_named": "On a storage that a host of the policy mounts too, but listed and processed by "
    "another host that the policy does not name: add that host.",
    "other_host": "On a host that the policy does not name.",
    "other_pool": "In a pool that the policy does not name.",
    "other_name": "Its name does not match the policy's patterns.",
    "other_format": "Of a format that the policy does not name.",
}


class Skip(NamedTuple):
    """An image (or pool) that a rule leaves out.

    Args:
        facts: what the sentence is made of; of one that the policy is not for, the names of its host and pool.
    """

    id: int
    host_id: int
    pool_id: int
    label: str
    code: str
    facts: tuple[object, ...] = ()

    @property
    def reason(self) -> str:
        """Why, in a sentence."""
        return NOT_MEANT[self.code] if self.code in NOT_MEANT else _SENTENCES[self.code](*self.facts)


def _too_little(gain: int, percent: float, least: int, least_percent: int) -> str:
    gained, asked = _("about {size}").format(size=size(gain)), size(least)
    if gain < least and size(gain) == asked:
        gained, asked = (_("{count} bytes").format(count=exact(one)) for one in (gain, least))
    # Rounded down: less than is asked for never reads as that.
    wanted = [_("at least {size}").format(size=asked)] if least else []
    wanted += [f"{least_percent} %"] if least_percent else []
    if gain > 0 and wanted:
        sentence = _("It would free {gained} ({percent} %); the policy requires {wanted}.")
    elif gain > 0:
        sentence = _("It would free {gained} ({percent} %).")
    else:
        sentence = _("It would free nothing; the policy requires {wanted}.") if wanted else _("It would free nothing.")
    return sentence.format(gained=gained, percent=tenths(percent), wanted=_(" and ").join(wanted))


def _in_state(detail: str) -> str:
    return detail or _("Its state must be resolved first.")


#: In the order in which the rules are asked (:mod:`images.policies.rules`).
_SENTENCES: dict[str, Callable[..., str]] = {
    **{state: _in_state for state in Image.State.values if state not in {Image.State.OK, *Image.NOT_THERE}},
    "format_undeclared": lambda looks: _(
        "Its format is not declared; its content looks like {looks}. Declare it on the image's page first."
    ).format(looks=looks),
    "encrypted": lambda: _("It is encrypted: no space can be reclaimed from outside."),
    "immutable": lambda: _(
        "It is protected (chattr +i or +a), or the disk of a Proxmox VE template: it is not changed."
    ),
    "busy": lambda kind, job: _("Job {job} ({kind}) is already running on it, or queued.").format(job=job, kind=kind),
    "guest_running": lambda detail: _("It is in use: {detail}. A policy never shuts a guest down.").format(
        detail=detail
    ),
    "guests_unknown": lambda detail: _("Who uses it is not known. {detail}").format(
        detail=detail or _("It was not scanned yet.")
    ),
    "chain_too_short": lambda depth, least: ngettext(
        "Its chain has {depth} image; the policy requires {least} or more.",
        "Its chain has {depth} images; the policy requires {least} or more.",
        depth,
    ).format(depth=depth, least=least),
    "chain_too_deep": lambda depth, most: _("Its chain has {depth} images; more than {most} are refused.").format(
        depth=depth, most=most
    ),
    "preallocated": lambda how: _(
        "It is preallocated ({how}), and a job would undo that. It is left out unless the policy includes such images."
    ).format(how=how),
    "undone": lambda kind, job: _(
        "Its last {kind} (job {job}) was undone. It is left out until someone starts one manually."
    ).format(kind=kind, job=job),
    "decayed": lambda won, grown, job, finished, at: _(
        "It grew back: job {job} freed {won}, and {between} later it had grown by {grown} again. It is left out from "
        "now on, unless the policy includes such images."
    ).format(job=job, won=size(won), between=between(finished, at), grown=size(grown)),
    "too_young": lambda kind, job, finished, hours: _(
        "Its last {kind} (job {job}) ended at {finished:%Y-%m-%d %H:%M} UTC; the policy waits {hours} hours."
    ).format(kind=kind, job=job, finished=finished, hours=hours),
    "not_analyzed": lambda why="it has not been analyzed since it changed.", what="Its savings are not known": (
        f"{what}: {why}"
    ),
    "too_little": _too_little,
}
#: What each code means, without the numbers of one image.
WORDS = NOT_MEANT | {
    "not_analyzed": "not analyzed, so that savings or preallocation are unknown",
    "too_little": "savings too small",
    "too_young": "too soon after the last one",
    "undone": "the last one was undone",
    "decayed": "grew back after it was reclaimed",
    "chain_too_short": "chain too short",
    "chain_too_deep": "chain too deep",
    "preallocated": "preallocated",
    "immutable": "protected, or the disk of a template",
    "guest_running": "in use",
    "guests_unknown": "who uses it is not known",
    "busy": "another job has it",
    "done_meanwhile": "done by another job meanwhile",
    "too_long": "would not be done before the window ends",
    "window_closed": "its turn did not come",
    "policy_stopped": "the run was stopped",
    "gone": "no longer there",
}


def word_of(code: str) -> str:
    """What a code means, in words; a refusal's own where it is one."""
    return WORDS.get(code, code.replace("_", " "))
