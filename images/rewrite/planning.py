"""Plans for images whose rows are fetched already: many images, or many kinds for one, share what surrounds them."""

from typing import Any

from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite.kind import ImageKind, Rewriting
from storage_admin.accounts.models import Actor, Role
from storage_admin.errors import InvalidError
from storage_admin.jobs import kinds
from storage_admin.jobs.plan_and_progress import Plan


def image_kinds() -> list[ImageKind]:
    """The kinds of jobs that work on an image, in the order of the settings."""
    return [kind for kind in kinds.every() if isinstance(kind, ImageKind)]


def rewriting_kinds() -> list[Rewriting]:
    """Those of them that rewrite it."""
    return [kind for kind in image_kinds() if isinstance(kind, Rewriting)]


def image_kind(name: str) -> ImageKind:
    """The kind of that name, which works on an image.

    Raises:
        InvalidError: there is none.
    """
    for kind in image_kinds():
        if kind.name == name:
            return kind
    raise InvalidError(_("{name!r} is not a job kind for images.").format(name=name))


def works_on(kind: ImageKind, image: Image) -> bool:
    """Whether a kind can do anything at all to an image: on volumes, only those of some kinds of pools can."""
    return not image.is_volume or image.pool.kind in kind.volumes


def plan_for(actor: Actor, kind: ImageKind, image: Image, options: dict[str, Any]) -> Plan:
    """What a job would do, as :func:`storage_admin.jobs.services.plan` says, but without fetching the image again.

    Args:
        image: a row that exists for the actor, with its host and pool; see :func:`images.rewrite.neighbours.share`.

    Raises:
        ForbiddenError, InvalidError: as for :func:`storage_admin.jobs.services.submit`.
    """
    actor.require(Role.VIEWER, image.host.slug)
    return kind.plan_for(actor, image, kind.clean(options))
