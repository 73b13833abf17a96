"""Why an image is left out: a code for each rule, and its sentence."""

from collections.abc import Callable
from typing import NamedTuple

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
    gained, asked = f"about {size(gain)}", size(least)
    if gain < least and size(gain) == asked:
        gained, asked = f"{exact(gain)} bytes", f"{exact(least)} bytes"
    # Rounded down: less than is asked for never reads as that.
    wins = f"It would free {gained} ({tenths(percent)} %)" if gain > 0 else "It would free nothing"
    wanted = [f"at least {asked}"] if least else []
    wanted += [f"{least_percent} %"] if least_percent else []
    return f"{wins}; the policy requires {' and '.join(wanted)}." if wanted else f"{wins}."


def _in_state(detail: str) -> str:
    return detail or "Its state must be resolved first."


#: In the order in which the rules are asked (:mod:`images.policies.rules`).
_SENTENCES: dict[str, Callable[..., str]] = {
    **{state: _in_state for state in Image.State.values if state not in {Image.State.OK, *Image.NOT_THERE}},
    "format_undeclared": lambda looks: (
        f"Its format is not declared; its content looks like {looks}. Declare it on the image's page first."
    ),
    "encrypted": lambda: "It is encrypted: no space can be reclaimed from outside.",
    "immutable": lambda: "It is protected (chattr +i or +a), or the disk of a Proxmox VE template: it is not changed.",
    "busy": lambda kind, job: f"Job {job} ({kind}) is already running on it, or queued.",
    "guest_running": lambda detail: f"It is in use: {detail}. A policy never shuts a guest down.",
    "guests_unknown": lambda detail: f"Who uses it is not known. {detail or 'It was not scanned yet.'}",
    "chain_too_short": lambda depth, least: (
        f"Its chain has {depth} image{'s' if depth > 1 else ''}; the policy requires {least} or more."
    ),
    "chain_too_deep": lambda depth, most: f"Its chain has {depth} images; more than {most} are refused.",
    "preallocated": lambda how: (
        f"It is preallocated ({how}), and a job would undo that. It is left out unless the policy includes such images."
    ),
    "undone": lambda kind, job: (
        f"Its last {kind} (job {job}) was undone. It is left out until someone starts one manually."
    ),
    "decayed": lambda won, grown, job, finished, at: (
        f"It grew back: job {job} freed {size(won)}, and {between(finished, at)} later it had "
        f"grown by {size(grown)} again. It is left out from now on, unless the policy includes "
        "such images."
    ),
    "too_young": lambda kind, job, finished, hours: (
        f"Its last {kind} (job {job}) ended at {finished:%Y-%m-%d %H:%M} UTC; the policy waits {hours} hours."
    ),
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
