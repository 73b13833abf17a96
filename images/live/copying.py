"""The job kinds ``live_copy`` and ``switch_back``: a running guest goes on in a copy of its disk, and the way back.

QEMU copies the disk to a new file, in whatever pool and format, while the guest writes to both; when they are equal the
guest is switched over. The image that it leaves keeps its name, as it was in that moment: that is the undo copy, until
somebody deletes it. A guest that is off is led back to it by its definition; the copy stays beside it then, so that
nothing is lost on the way back either.
"""

import os
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds.convert import Convert, target_of, wrong_target
from images.live.block_jobs import DISK, Choice, LiveKind
from images.live.disks import Layers, drop, files, files_told, in_the_clear, not_known, refuse_needed_by_others
from images.live.follow import kept
from images.live.kind import OFF, LiveGuestKind
from images.live.merging import needed_by_others
from images.models import Image
from images.rewrite import forecasts, neighbours, record, refusals
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.errors import NotFoundError
from storage_admin.guests.kinds.vm_disks import find
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import control, running
from storage_admin.hosts.libvirt.block_jobs import Wanted
from storage_admin.hosts.libvirt.disks import Edit
from storage_admin.hosts.libvirt.relay import why_read_only
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.kinds import BEGUN, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Affected, Plan, Recorder, Refusal, refuse

#: Formats of what a copy is written to, which QEMU can mirror into.
FORMATS = ("qcow2", "raw")


class LiveCopy(LiveKind):
    """Block copy with a switch at its end: a copy, a conversion or a move, whatever the options say."""

    name = "live_copy"
    title = _("Copy and switch while the guest runs")
    description = _(
        "Copies a disk of a running guest to a new file, in another pool or format if wanted, and switches the guest "
        "over to it (block copy). The image that it leaves stays as it was in that moment."
    )
    op = "copy"
    no_way_back = False
    bears = frozenset({"unsupported_subformat"})
    properties = {
        "disk": DISK,
        "target_pool": Convert.properties["target_pool"],
        "target_name": Convert.properties["target_name"],
        "format": {
            "type": ["string", "null"],
            "enum": [None, *FORMATS],
            "default": None,
            "description": _("Format of the new file; null for the format of the image."),
        },
        "bandwidth_bytes_sec": record.SPEED_OPTIONS["bandwidth_bytes_sec"],
    }

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        return {"target_name": wrong_target(options["target_name"], options["format"] or "")}

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        found = super().locks(target, options)
        disk = {"uses__disk__guest": target.id, "uses__disk__target": options["disk"], "uses__disk__only_in": ""}
        image = Image.objects.filter(**disk).first()
        if image is not None:
            __, path = _target(image, options, image.declared_format)
            found.append(Lock(f"path:{image.host_id}:{path_key(path)}", exclusive=True))
        return found

    def choose(self, guest: Guest, layers: Layers, options: dict[str, Any]) -> Choice:
        own = layers.rows.get(0)
        try:
            if own is None or len(layers.rows) != len(layers.chain):
                raise NotFoundError(not_known(layers.disk))
            pool, raw = _target(own, options, layers.format)
        except NotFoundError as error:
            nothing = gettext("{title}: {guest}.").format(title=self.title, guest=guest.name)
            return Choice(nothing, [], refusals=(Refusal("outside_pool", error.detail),))
        form, path = options["format"] or _format(layers.format), display(raw)
        against = [*refusals.for_new_file(pool, raw), *in_the_clear(layers.images, path)]
        if path.encode(errors="replace") != raw:
            sentence = gettext("{path} is not UTF-8: libvirt cannot name it. Choose another folder.")
            against.append(Refusal(INVALID, sentence.format(path=path)))
        for disk in neighbours.of(own).own_disks:
            if (disk.guest_id, disk.target) != (guest.pk, layers.disk):
                sentence = gettext("{who} uses {image} as well, and would be left behind on it.")
                who = refusals.named(disk.guest, own)
                against.append(Refusal("image_in_use", sentence.format(who=who, image=own.name)))
        size = forecasts.converted(own, layers.images_at(range(1, len(layers.chain))), form, {})
        reason = gettext(
            "QEMU copies {disk} to {path} ({form}) while {guest} runs, then switches it over. {image} stays as it is "
            "in that moment."
        ).format(disk=layers.disk, path=path, form=form, guest=guest.name, image=own.name)
        command = ["virsh", "blockcopy", guest.name, layers.disk, path, "--format", form]
        target = {"path": path, "format": form, "format_before": layers.format}
        return Choice(
            reason, [*command, "--transient-job", "--wait", "--pivot"], 0, None, target, pool,
            0, size.high or own.virtual_size, tuple(against),
            (
                gettext(
                    "The space of {image} becomes free only when you delete it. Until then {guest} can be switched "
                    "back to it once it is off: what it has written since the switch is then only in the copy."
                ).format(image=own.name, guest=guest.name),
            ),
        )  # fmt: skip

    def against_switching(self, guest: Guest, wanted: Wanted) -> str:
        if wanted.target is None or refusals.without_agent(guest.host):
            return ""
        path, host = wanted.target["path"], guest.host.name
        try:
            if files_told(guest, [path])[0]:
                return ""
        except (RefusedError, HostError) as error:
            sentence = gettext("It is not known whether {host} has {path}: {why} The guest was not switched over.")
            return sentence.format(host=host, path=path, why=error.detail)
        return gettext(
            "QEMU writes to {path}, and {host} has no such file: libvirt sees other mounts than the host does. The "
            "guest was not switched over. Restart libvirt once the filesystem is mounted."
        ).format(path=path, host=host)

    def pool_of_grown(self, job: Job, wanted: Wanted) -> StoragePool | None:
        """The pool that was asked for, else that of the image."""
        if job.options["target_pool"] is not None:
            return StoragePool.objects.filter(pk=job.options["target_pool"], host=job.host_id).first()
        return super().pool_of_grown(job, wanted)

    def came_to_nothing(self, job: Job, guest: Guest, wanted: Wanted, recorder: Recorder) -> None:
        """Deletes the unfinished copy, which libvirt leaves where it is."""
        if wanted.target is None or job.kept[BEGUN]["stage"] == "planned":
            return
        path, pool = wanted.target["path"], self.pool_of_grown(job, wanted)
        try:
            if against := refusals.without_agent(guest.host):
                raise RefusedError(against[0].code, against[0].detail)
            drop(guest, path, pool, int(job.created.timestamp()))
            recorder.log(f"removed the unfinished copy {path}")
        except (RefusedError, HostError) as error:
            recorder.log(f"the unfinished copy {path} is left, delete it: {error.detail}", JobLog.Level.WARNING)

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        result, wanted = super().work(job, recorder), kept(job)[0]
        result["before"]["format"] = (wanted.target or {}).get("format_before", "")
        # What the guest has left, for whoever leads it back: nobody writes to it from now on.
        [left] = files(find(job.target_id), result["before"]["chain"][:1])
        held = None if left is None else left["bytes"]
        after = result["after_bytes"]
        freed = None if after is None else -after
        return result | {"left": left, "before_bytes": held, "held_bytes": held, "freed_bytes": freed}

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if result["after_bytes"] is not None:
            record.write_line_beside(job, self.pool_of_grown(job, kept(job)[0]), result["after_bytes"])
        return result


class SwitchBack(LiveGuestKind):
    """Leads a guest that is off back to the image that it had before a live copy."""

    name = "switch_back"
    title = _("Switch back to the image before a copy")
    description = _(
        "Has the definition of a guest that is off name the image again that the guest had before a live copy. Both "
        "files stay: what the guest has written since the copy is in the copy alone."
    )
    unsuccessful = {"": Unsuccessful(gettext_noop("The guest's definition names either the copy or the image before."))}
    properties = {
        "job": {"type": "integer", "minimum": 1, "description": _("Id of the live copy that is to be undone.")}
    }

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        found = super().locks(target, options)
        job = Job.objects.filter(pk=options["job"], kind=LiveCopy.name, target_id=target.id).first()
        for path in ((job.result or {}).get("before", {}).get("chain", []) if job else [])[:1]:
            for image in Image.objects.filter(host=target.host, path_key=path_key(os.fsencode(path))):
                found += neighbours.locks_on(image, exclusive=True)
        return list({lock.key: lock for lock in found}.values())

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        guest = find(target_id)
        reason, edit, against = f"{self.title}: {guest.name}.", None, list[Refusal]()
        try:
            edit, image = self._edit(guest, options)
            reason = gettext(
                "The definition of {guest} names {image} for {disk} again, as it was when the copy took over. What "
                "{guest} has written since is in {copy} alone, which stays."
            ).format(guest=guest.name, image=image.name, disk=edit.target, copy=edit.path)
            control.repoint(guest.host, guest.uid, [edit], write=False)
        except (RefusedError, HostError) as error:
            against = [Refusal(error.code, error.detail)]
        return Plan(
            method=self.name, reason=reason, commands=(f"virsh edit {guest.name}",) if edit else (),
            facts_at=guest.last_seen, refusals=tuple(against),
            affected_guests=(Affected(guest.pk, guest.name, guest.state),), options=options,
        )  # fmt: skip

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        edit, image = self._edit(guest, job.options)
        refuse_needed_by_others(guest, [image])
        changed = control.repoint(guest.host, guest.uid, [edit], write=True)
        words = f"{edit.target} of {guest.name} is {edit.new_path} again; {edit.path} stays."
        recorder.log(words)
        return {"disk": edit.target, "image": image.pk, "changed": len(changed), "words": words}

    @staticmethod
    def _edit(guest: Guest, options: dict[str, Any]) -> tuple[Edit, Image]:
        """What is changed in the definition, and the image before; raises RefusedError or HostError."""
        if why := why_read_only(guest.host):
            raise RefusedError("tool_missing", why)
        copied = Job.objects.filter(pk=options["job"], kind=LiveCopy.name, state=Job.State.SUCCEEDED)
        job = copied.filter(target_kind="guest", target_id=guest.pk).first()
        result = {} if job is None else job.result or {}
        if job is None or not result.get("left"):
            sentence = gettext("Job {job} is no finished live copy of a disk of {guest}.")
            raise RefusedError("undo_missing", sentence.format(job=options["job"], guest=guest.name))
        now = running.look(guest.host, guest.uid)
        if now.state != OFF:
            sentence = gettext("{guest} is not off ({state}): shut it down first.")
            raise RefusedError("image_in_use", sentence.format(guest=guest.name, state=now.state))
        before = result["before"]["chain"][0]
        [left] = files(guest, [before])
        image = Image.objects.filter(host=job.host_id, path_key=path_key(os.fsencode(before))).first()
        if left is None or image is None:
            raise RefusedError("undo_missing", gettext("{path} no longer exists.").format(path=before))
        if left != result["left"]:
            sentence = gettext("{image} was changed since the copy: it is not what the guest had any more.")
            raise RefusedError("stale_plan", sentence.format(image=image.name))
        refuse(needed_by_others(Layers(guest.pk, result["disk"], [before], {0: image}, "", None, ()), 0, 0))
        # Once no guest names it, only its name, which may have no extension, would tell a scan its format.
        form = result["before"].get("format") or image.declared_format
        return Edit(result["disk"], result["now"]["chain"][0], before, form), image


def _format(declared: str) -> str:
    return declared if declared in FORMATS else "qcow2"


def _target(image: Image, options: dict[str, Any], declared: str) -> tuple[StoragePool, bytes]:
    """The pool and the path of the copy; raises NotFoundError."""
    return target_of(image, options | {"format": options["format"] or _format(declared), "replace": False})
