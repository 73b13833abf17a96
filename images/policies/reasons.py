"""Why an image is left out: a code for each rule, and its sentence."""

from collections.abc import Callable
from typing import NamedTuple

from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from storage_admin.words import between, exact, size, tenths

#: Left out because the policy is not meant for them: counted, and listed page by page when somebody asks.
NOT_MEANT = {
    "gone": _("No longer there since the last scan, or set aside."),
    "listed_elsewhere": _("Listed by another host that mounts the same storage. The policy looks at it there."),
    "lister_not_named": _(
        "On a storage that a host of the policy mounts, but listed and processed by another host. Add that host to "
        "the policy."
    ),
    "other_host": _("On a host that the policy does not include."),
    "other_pool": _("In a pool that the policy does not include."),
    "other_name": _("The name does not match the patterns of the policy."),
    "other_format": _("In a format that the policy does not include."),
}


class Skip(NamedTuple):
    """An image (or pool, or guest) that a rule leaves out.

    Args:
        facts: what the sentence is made of; of one that the policy is not for, the names of its host and pool.
    """

    id: int
    host_id: int
    pool_id: int | None
    label: str
    code: str
    facts: tuple[object, ...] = ()

    @property
    def reason(self) -> str:
        """Why, in a sentence."""
        return str(NOT_MEANT[self.code]) if self.code in NOT_MEANT else told(self.code, *self.facts)[1]


def told(code: str, *facts: object) -> tuple[str, str]:
    """The code of a skip and its sentence, by what a rule has found."""
    return code, _SENTENCES[code](*facts)


def _too_little(gain: int, percent: float, least: int, least_percent: int) -> str:
    gained, asked = gettext("about {size}").format(size=size(gain)), size(least)
    if gain < least and size(gain) == asked:
        gained, asked = (gettext("{count} bytes").format(count=exact(one)) for one in (gain, least))
    # Rounded down: less than is asked for never reads as that.
    wanted = [gettext("at least {size}").format(size=asked)] if least else []
    wanted += [f"{least_percent} %"] if least_percent else []
    if gain > 0 and wanted:
        sentence = gettext("The job would free {gained} ({percent} %); the policy requires {wanted}.")
    elif gain > 0:
        sentence = gettext("The job would free {gained} ({percent} %).")
    else:
        sentence = (
            gettext("The job would free nothing; the policy requires {wanted}.")
            if wanted
            else gettext("The job would free nothing.")
        )
    return sentence.format(gained=gained, percent=tenths(percent), wanted=gettext(" and ").join(wanted))


def _in_state(detail: str) -> str:
    return detail or gettext("The state of the image must be resolved first.")


#: In the order in which the rules are asked (:mod:`images.policies.rules`).
_SENTENCES: dict[str, Callable[..., str]] = {
    **{state: _in_state for state in Image.State.values if state not in {Image.State.OK, *Image.NOT_THERE}},
    "format_undeclared": lambda looks: gettext(
        "The format is not declared; the content looks like {looks}. Declare it on the page of the image first."
    ).format(looks=looks),
    "encrypted": lambda: gettext("The image is encrypted. No space can be reclaimed from outside the guest."),
    "immutable": lambda: gettext(
        "The image is protected (chattr +i or +a), or is the disk of a Proxmox VE template. It is never changed."
    ),
    "busy": lambda kind, job: gettext("Job {job} ({kind}) is already queued or running on it.").format(
        job=job, kind=kind
    ),
    "guest_running": lambda detail: gettext("The image is in use: {detail}. A policy never shuts down a guest.").format(
        detail=detail
    ),
    "guest_off": lambda state: gettext("The guest does not run ({state}).").format(state=state),
    "no_old_snapshot": lambda days: ngettext(
        "The guest has no snapshot that is {days} day old.", "The guest has no snapshot that is {days} days old.", days
    ).format(days=days),
    "guests_unknown": lambda detail: gettext("It is not known who uses the image. {detail}").format(
        detail=detail or gettext("The image has not been scanned yet.")
    ),
    "chain_too_short": lambda depth, least: ngettext(
        "The backing chain has {depth} image; the policy requires {least} or more.",
        "The backing chain has {depth} images; the policy requires {least} or more.",
        depth,
    ).format(depth=depth, least=least),
    "chain_too_deep": lambda depth, most: gettext("The backing chain has {depth} images; the limit is {most}.").format(
        depth=depth, most=most
    ),
    "preallocated": lambda how: gettext(
        "The image is preallocated ({how}), and a job would undo that. It is skipped unless the policy includes "
        "preallocated images."
    ).format(how=how),
    "undone": lambda kind, job: gettext(
        "The last {kind} (job {job}) was undone. The policy skips it until someone starts one manually."
    ).format(kind=kind, job=job),
    "decayed": lambda won, grown, job, finished, at: gettext(
        "The image grew back: job {job} freed {won}, and {between} later it had grown by {grown} again. It is "
        "skipped unless the policy includes images that grow back."
    ).format(job=job, won=size(won), between=between(finished, at), grown=size(grown)),
    "too_young": lambda kind, job, finished, hours: gettext(
        "The last {kind} (job {job}) ended at {finished:%Y-%m-%d %H:%M} UTC. The policy waits {hours} hours."
    ).format(kind=kind, job=job, finished=finished, hours=hours),
    "not_analyzed": lambda why="it has not been analyzed since it changed.", what="The savings are not known": (
        f"{what}: {why}"
    ),
    "too_little": _too_little,
    "backup_too_old": lambda days, told: ngettext(
        "The policy requires a backup of the last {days} day. {told}",
        "The policy requires a backup of the last {days} days. {told}",
        days,
    ).format(days=days, told=told),
}
#: What each code means, without the numbers of one image.
WORDS = NOT_MEANT | {
    "not_analyzed": _("not analyzed: savings or preallocation unknown"),
    "too_little": _("savings too small"),
    "too_young": _("last job too recent"),
    "undone": _("last job was undone"),
    "decayed": _("grew back after it was reclaimed"),
    "chain_too_short": _("chain too short"),
    "chain_too_deep": _("chain too deep"),
    "preallocated": _("preallocated"),
    "backup_too_old": _("last backup too old, unknown or without the disk"),
    "immutable": _("protected, or the disk of a template"),
    "guest_running": _("in use"),
    "guest_off": _("not running"),
    "no_old_snapshot": _("no snapshot that old"),
    "guests_unknown": _("users not known"),
    "busy": _("another job is on it"),
    "done_meanwhile": _("done by another job in the meantime"),
    "too_long": _("would not finish before the window ends"),
    "window_closed": _("window closed before its turn"),
    "policy_stopped": _("the run was stopped"),
    "gone": _("no longer there"),
}


def word_of(code: str) -> str:
    """What a code means, in words; a refusal's own where it is one."""
    return str(WORDS.get(code, code.replace("_", " ")))
