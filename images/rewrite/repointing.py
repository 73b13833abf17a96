"""Guests follow an image that gets another name and format: their definitions name the new file, or the old one again.

A conversion that takes its image's place changes the definitions right before the agent may swap
(:func:`lead_to_the_new_one`), because libvirt may refuse that, and the image is not touched then. In the moment
between, they name a file that is not there yet: a guest that is started then does not start. Before that, what they
were is kept with the job, which owes (``repoint_due``) that they agree with the name that the image has in the end.
:func:`agree` sees to that when the job, its undo or a recovery has ended, and :func:`settle` where that did not work at
once.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from django.db.models import Q
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import guest_locks, in_use, linked_clones
from storage_admin.accounts.models import SYSTEM, audit
from storage_admin.agent.protocol import HostError, RefusedError, b64, unb64
from storage_admin.guests.models import Guest
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.libvirt import control
from storage_admin.hosts.libvirt.disks import Edit
from storage_admin.hosts.libvirt.relay import why_read_only
from storage_admin.hosts.names import display
from storage_admin.jobs import claims
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

#: What libvirt calls the formats that it knows.
DRIVERS = {"qcow2": "qcow2", "raw": "raw", "vmdk": "vmdk", "vdi": "vdi", "vpc": "vpc"}
#: A second definition of a running guest, as a scan lists it.
NEXT_START = " (next start)"


@dataclass(frozen=True)
class Move:
    """What becomes of an image: its path before and after, the format of the new file, whether guests follow, and
    whether the image stays where it is.
    """

    before: bytes
    after: bytes
    format: str
    repoint: bool
    stays: bool = False


def refusals(image: Image, move: Move) -> list[Refusal]:
    """What stands against it as far as the database knows: guests that would not find the image any more."""
    if move.before == move.after and move.format == image.declared_format:
        return []
    disks = image.disks
    if disks and not move.repoint:
        return [_left_behind(image.guest_names[0], image)]
    if disks and (why := why_read_only(image.host)):
        return [Refusal("tool_missing", why)]
    found = []
    for disk in disks:
        if disk.guest.kind != Guest.Kind.DOMAIN or disk.guest.host_id != image.host_id:
            told = _("{guest} is not a libvirt guest of this host, so its definition cannot be changed.")
            found.append(_named(told.format(guest=disk.guest.name_for(image.host_id))))
        elif disk.only_in not in {"", "pending"}:
            told = _("Guest {guest} uses the image in {only_in}. Delete that first.")
            found.append(_named(told.format(guest=disk.guest.name, only_in=disk.only_in)))
        elif _new_path(bytes(disk.path_bytes), move) is None:
            found.append(_otherwise_named(disk.guest.name, disk.path))
    return found


def _named(sentence: str) -> Refusal:
    return Refusal("guest_names_image", sentence)


def _left_behind(guest: str, image: Image) -> Refusal:
    told = _(
        "Guest {guest} uses {image} and would not find the new file. Have the job update the definition of the guest "
        "(repoint_guest)."
    )
    return _named(told.format(guest=guest, image=image.name))


def _otherwise_named(guest: str, path: str) -> Refusal:
    told = _("The definition of guest {guest} names the image as {path}. Change that path by hand first.")
    return _named(told.format(guest=guest, path=path))


def _new_path(named: bytes, move: Move) -> bytes | None:
    """What a definition is to name; ``None`` where it names the image by a link of another name or folder.

    A volume goes by several names in any case.
    """
    if move.stays:
        return move.after
    folder, __, name = named.rpartition(b"/")
    if move.after.rpartition(b"/")[0] != move.before.rpartition(b"/")[0]:
        return move.after if named == move.before else None
    if name != move.before.rpartition(b"/")[2]:
        return None
    return folder + b"/" + move.after.rpartition(b"/")[2]


def look(image: Image, move: Move) -> list[dict[str, Any]]:
    """The guests that name the image now, and how their disks would change: asked of libvirt, nothing is changed.

    Returns:
        Each ``uid``, ``name``, ``disks`` (each ``target``, ``path``, ``new_path``, ``before``, ``after``).

    Raises:
        RefusedError: ``guest_names_image``, ``stale_plan`` or ``guests_unknown``.
        HostError: libvirt does not answer.
    """
    if move.before == move.after and move.format == image.declared_format:
        return []
    guests = []
    for domain, disks in in_use.domains_that_name(image):
        if not move.repoint:
            told = _left_behind(domain.name, image)
            raise RefusedError(told.code, told.detail)
        edits = [_edit(domain, target, path, move) for target, path in disks]
        changed = {disk.target: disk for disk in control.repoint(image.host, domain.uid, edits, write=False)}
        guests.append(
            {
                "uid": domain.uid,
                "name": domain.name,
                "disks": [
                    {
                        "target": edit.target, "path": edit.path, "new_path": edit.new_path, "format": edit.new_format,
                        "before": changed[edit.target].before, "after": changed[edit.target].after,
                    }
                    for edit in edits if edit.target in changed
                ],
            }
        )  # fmt: skip
    return guests


def _edit(domain: GuestFacts, target: str, path: str, move: Move) -> Edit:
    new = _new_path(os.fsencode(path), move)
    if new is None:
        told = _otherwise_named(domain.name, path)
        raise RefusedError(told.code, told.detail)
    return Edit(target.removesuffix(NEXT_START), path, os.fsdecode(new), DRIVERS[move.format])


def lead_to_the_new_one(job: Job, image: Image, move: Move) -> None:
    """Keeps what is changed with the job, and changes the definitions; right before the swap.

    Raises:
        RefusedError: as :func:`look`; ``stale_plan`` where the job is somebody else's by now.
        HostError: libvirt refuses it.
    """
    kept = job.kept
    if kept.get("new_path_b64") != b64(move.after):  # else the database went away in the middle of it
        kept = {
            "path_b64": b64(move.before), "new_path_b64": b64(move.after), "admin_format": image.admin_format,
            "format": move.format, "guests": look(image, move), "stays": move.stays,
        }  # fmt: skip
    guests = kept["guests"]
    if not job.ours().update(kept=kept, repoint_due=bool(guests)):
        raise RefusedError("stale_plan", _("Another worker has taken over this job."))
    job.kept = kept
    for guest in guests:
        _define(job, guest, forward=True, check=True)
        claims.log(job, f"guest {guest['name']}: its definition now names {display(move.after)}")


def lead_to_the_base(job: Job, image: Image, move: Move) -> None:
    """Changes the definition of the guest whose image was merged into its base; there is no way back.

    Nobody can begin to write to the image meanwhile: its agent holds it.

    Raises:
        RefusedError, HostError: as :func:`look`; the definition is as it was.
    """
    for guest in look(image, move):
        _define(job, guest, forward=True, check=True)
        claims.log(job, f"guest {guest['name']}: its definition now names {display(move.after)}")


def lead_back(undone: Job) -> None:
    """Right before an undo: the definitions name the original again.

    Raises:
        RefusedError, HostError: as :func:`lead_to_the_new_one`.
    """
    guests = undone.kept.get("guests", [])
    by_id = bool(undone.kept.get("volumes"))
    Job.objects.filter(pk=undone.pk).update(repoint_due=bool(guests) or by_id)
    if by_id:
        linked_clones.put(undone, flat=False)
    for guest in guests:
        _define(undone, guest, forward=False, check=False)


def _define(job: Job, guest: dict[str, Any], *, forward: bool, check: bool) -> bool:
    """Has libvirt take a guest's disks as they were, or as they are to be; whether anything had to be changed."""
    edits = [_way(disk, forward=forward) for disk in guest["disks"]]
    changed = control.repoint(job.host, guest["uid"], edits, write=True, forward=check)
    if changed:
        action = "guest repointed to the new image" if forward else "guest repointed to the original"
        disks = [{"target": disk.target, "before": disk.before, "after": disk.after} for disk in changed]
        audit(SYSTEM, action, guest["name"], after={"job": job.pk, "disks": disks})
    return bool(changed)


def _way(disk: dict[str, Any], *, forward: bool) -> Edit:
    target, path, new_path = disk["target"], disk["path"], disk["new_path"]
    if forward:
        return Edit(target, path, new_path, disk["format"], expect=disk["before"], put=disk["after"])
    driver = ET.fromstring(disk["before"]).find("driver")  # noqa: S314 (libvirt wrote it, and we kept it)
    form = driver.get("type", "raw") if driver is not None else "raw"
    return Edit(target, new_path, path, form, expect=disk["after"], put=disk["before"])


def agree(job: Job) -> None:
    """Makes the definitions agree with the name that the image has by now; what fails is tried again by :func:`settle`.

    Args:
        job: a conversion or flattening that has ended, not the undo of one.
    """
    job.refresh_from_db()
    if not job.repoint_due or job.active or job.needs_recovery:
        return
    image = Image.every.filter(pk=job.target_id).first()
    if image is None:
        return
    if job.kept.get("volumes"):
        _agree_by_id(job)
        return
    forward = bytes(image.path_bytes) == unb64(job.kept["new_path_b64"])
    if job.kept.get("stays"):
        forward = job.state == Job.State.SUCCEEDED
    for guest in job.kept.get("guests", []):
        try:
            if _define(job, guest, forward=forward, check=False):
                path = display(unb64(job.kept["new_path_b64"])) if forward else image.path
                claims.log(job, f"guest {guest['name']}: its definition names {path} again")
        except HostError as error:
            _say_once(job, f"the definition of guest {guest['name']} could not be changed yet: {error.detail}")
            return
        except RefusedError as error:
            _say_once(job, f"guest {guest['name']} was not changed; check its disks yourself. {error.detail}")
    Job.objects.filter(pk=job.pk).update(repoint_due=False)


def done_after_all(job: Job) -> None:
    """A job turns out to have succeeded whose guests may have been led back to the original meanwhile.

    Where that stays, they may have written to it: they are left with it, and an admin is told.
    """
    if job.repoint_due or not job.kept.get("guests"):
        return
    if not job.kept.get("stays"):
        Job.objects.filter(pk=job.pk).update(repoint_due=True)
        return
    names, copy = ", ".join(guest["name"] for guest in job.kept["guests"]), display(unb64(job.kept["new_path_b64"]))
    told = f"{names} was led back to the original before {copy} was found, and may have written to it since"
    _say_once(job, f"{told}: it goes on with the original. Delete the copy, or change the definition yourself.")


def _agree_by_id(job: Job) -> None:
    """The same for a linked clone: which id its image is to have, the way that the job has ended tells."""
    result = job.result or {}
    # Of a volume no file takes the place.
    flat = job.state == Job.State.SUCCEEDED and bool(result.get("swapped") or result.get("method") == "flatten")
    try:
        linked_clones.put(job, flat=flat and job.undo_state != Job.UndoState.UNDONE)
    except HostError as error:
        _say_once(job, f"the configuration of the VM could not be changed yet: {error.detail}")
        return
    except RefusedError as error:
        if error.code in linked_clones.PASSING:
            _say_once(job, f"the configuration of the VM is changed later: {error.detail}")
            return
        _say_once(job, f"the configuration of the VM was not changed; check its disks yourself. {error.detail}")
    Job.objects.filter(pk=job.pk).update(repoint_due=False)


def _say_once(job: Job, text: str) -> None:
    guest_locks.say_once(job, "guest not repointed to its image", text)


def settle(host_id: int | None = None, *, but_not: Collection[int] = ()) -> None:
    """Tries again what :func:`agree` could not do; arguments: see :func:`images.rewrite.wait_for_guests.look`."""
    guest_locks.settle(host_id, but_not=but_not)  # a guest that is locked takes no change
    undoing = Job.objects.filter(Q(state__in=Job.ACTIVE) | Q(needs_recovery=True), kind="undo").values("target_id")
    for job in guest_locks.owing(host_id, but_not).filter(repoint_due=True).exclude(pk__in=undoing):
        agree(job)


def restore_declaration(image: Image, undone: Job) -> None:
    """After an undo: what an admin had declared of the image holds again."""
    if "admin_format" in undone.kept:
        image.admin_format = undone.kept["admin_format"]
        image.save(update_fields=["admin_format"])
