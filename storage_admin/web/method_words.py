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
        Verb("in_place", "Dig holes…", "Dig holes in place", "Gives back the blocks of zeros; needs no scratch space."),
        Verb("rebase", "Flatten…", "Flatten", "Takes over what the images below hold, and keeps its own clusters."),
        Verb("convert", "Flatten…", "Flatten into a new copy", "Writes all that the chain holds anew, without zeros."),
        Verb("check", "Check…", "Check", "Looks through the image's tables for errors and leaks."),
        Verb("repair leaks", "Repair…", "Repair leaks", "Gives back what nothing refers to, on a copy."),
        Verb("repair all", "Repair…", "Repair all", "Mends all errors that can be mended, on a copy."),
        Verb("trim", "Trim in guest…", "Trim in the guest", "The running guest says which blocks it no longer needs."),
    )
}
OTHER = Verb("", "Reclaim…", "Reclaim", "Gets physical space back by the method that wins most.")


def verb_of(method: str) -> Verb:
    """The words of a method; those of reclaiming at large where it is not known which one is best."""
    return VERBS.get(method, OTHER)
