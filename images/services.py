"""Writes: what an admin decides of an image."""

from django.db import transaction
from django.utils.translation import gettext as _

from images.models import Image
from images.scan import bulk_write
from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.errors import of_field

#: Formats that an image can be declared to have.
DECLARABLE = ("qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx", "qed", "luks")


def declare_format(actor: Actor, image: Image, format: str) -> Image:  # noqa: A002 (the field's word)
    """Says which format an image has, where neither a guest, an overlay nor its name does.

    Args:
        format: one of :data:`DECLARABLE`; empty takes the declaration back.

    Raises:
        ForbiddenError: the actor is no admin.
        InvalidError: no such format.
    """
    actor.require(Role.ADMIN, image.host.slug)
    if format and format not in DECLARABLE:
        sentence = _("Choose one of {declarable}.").format(declarable=", ".join(DECLARABLE))
        raise of_field("declared_format", sentence)
    with transaction.atomic():
        audit(actor, "format declared", image.path, before={"format": image.admin_format}, after={"format": format})
        image.admin_format = format
        image.save(update_fields=["admin_format"])
        bulk_write.resolve_host(image.host)
    image.refresh_from_db()
    return image
