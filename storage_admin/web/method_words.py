"""The words on buttons: each method's verb, and what it does in a sentence."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A method's words. ``button`` ends in an ellipsis: a plan comes before anything happens."""

    method: str
    button: str
    title: str
    sentence: str


VERBS = {
    verb.method: verb
    for verb in (
        Verb("compress", "Compress…", "Compress", "Rewrites the image without its zeros and compresses what is left."),
        Verb("copy", "Copy…", "Copy", "Rewrites the image without its zeros and unused clusters, uncompressed."),
        Verb("in_place", "Punch holes…", "Punch holes in place", "Frees blocks of zeros; needs no scratch space."),
        Verb("rebase", "Flatten…", "Flatten", "Copies the data of the images below and keeps its own clusters."),
        Verb("convert", "Flatten…", "Flatten into a new copy", "Rewrites the data of the whole chain, without zeros."),
        Verb("check", "Check…", "Check", "Checks the image's tables for errors and leaks."),
        Verb("repair leaks", "Repair…", "Repair leaks", "Frees what nothing refers to, on a copy."),
        Verb("repair all", "Repair…", "Repair all", "Repairs all errors that can be repaired, on a copy."),
        Verb(
            "trim", "Trim in guest…", "Trim in the guest", "The running guest reports which blocks it no longer needs."
        ),
    )
}
OTHER = Verb("", "Reclaim…", "Reclaim", "Frees physical space by the method with the highest expected savings.")


def verb_of(method: str) -> Verb:
    """The words of a method; those of reclaiming at large where it is not known which one is best."""
    return VERBS.get(method, OTHER)
