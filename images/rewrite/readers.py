"""Who would get to read the content of a base that is written into an overlay."""

from collections.abc import Iterator

from django.utils.translation import gettext as _

from images.models import Image
from storage_admin.agent.host import attributes
from storage_admin.jobs.plan_and_progress import Refusal


def for_taken(image: Image, taken: list[Image]) -> tuple[list[Refusal], list[Refusal]]:
    """What stands against writing the content of bases into an image that belongs to somebody who may not read them.

    Args:
        taken: the bases whose content moves into the image.

    Returns:
        What is refused to everybody, and what an admin has allowed for a pool, which policies leave alone.
    """
    refused, allowed = [], []
    for base in taken:
        if (kept_out := _kept_out(image, base)) is None:
            continue
        uid, owns = kept_out
        sentence = _("User {uid} may not read {base}, but owns {owns} and could read that data after the job.").format(
            uid=uid, owns=owns, base=base.name
        )
        if base.pool.share_bases:
            told = _("{sentence} Pool {pool} allows this for jobs that a user starts; policies always refuse it.")
            allowed.append(Refusal("foreign_base", told.format(sentence=sentence, pool=base.pool.name)))
        else:
            what_to_do = _("Give the user read access, or have an admin allow this in the settings of {pool}.").format(
                pool=base.pool.name
            )
            refused.append(Refusal("foreign_base", f"{sentence} {what_to_do}"))
    return refused, allowed


def _kept_out(image: Image, base: Image) -> tuple[int, str] | None:
    """Who may not read a base and would get its content, and what of the image is that user's; ``None`` for nobody.

    As far as the last scan tells. What it does not, as of bases far below in closed folders, the agent looks at.
    """
    rights = _rights(base)
    if rights is None:
        return None
    for who, owns, closed in _readers(image):
        stopped = closed and image.backing_id == base.pk
        if who.uid not in (0, rights.uid) and (stopped or not rights.allow(who, attributes.READ)):
            return who.uid, owns
    return None


def _readers(image: Image) -> Iterator[tuple[attributes.Who, str, bool]]:
    """Who gets what is written into an image: its owner, and who owns its folder, if he may read it.

    With each of them, what is his, and whether a folder keeps him from the base.
    """
    rights, groups, keeper = _rights(image), image.from_header("groups"), image.from_header("keeper")
    if rights is None:
        return
    owner = attributes.Who(rights.uid, frozenset([rights.gid] if groups is None else groups))
    yield owner, image.name, bool(image.from_header("backing_closed"))
    if keeper is not None and rights.allow(who := attributes.Who(keeper[0], frozenset(keeper[1:])), attributes.READ):
        yield who, _("the folder of {image}").format(image=image.name), bool(image.from_header("keeper_closed"))


def _rights(image: Image) -> attributes.Rights | None:
    """Who may read a file, as the last scan found it; ``None`` where none has told."""
    uid, gid, mode = (image.from_header(name) for name in ("uid", "gid", "mode"))
    if None in (uid, gid, mode):
        return None
    return attributes.Rights(uid, gid, mode, bytes.fromhex(image.from_header("acl") or ""))
