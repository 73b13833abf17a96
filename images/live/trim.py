"""The job kind ``trim``: a running guest's agent gives back what its filesystems do not use, and what came of it."""

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.live import doctor
from images.live.disks import change, images_of, occupied, pool_of, seen
from images.live.kind import bugs
from images.rewrite import record, refusals
from storage_admin.accounts.models import Actor
from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError, b64
from storage_admin.guests import proxmox_vms
from storage_admin.guests.kinds.vm_disks import Draft, VmKind, find
from storage_admin.guests.models import Guest
from storage_admin.guests.proxmox_vms import Vm
from storage_admin.hosts import asking, transport
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.libvirt.relay import why_read_only
from storage_admin.hosts.live_facts import AgentNow, DeviceNow, DiskNow, GuestNow, Trimmed
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import actions, drives, guests, node_trim
from storage_admin.hosts.proxmox.drives import Drive
from storage_admin.jobs import runner
from storage_admin.jobs.models import Job, JobLog
from storage_admin.jobs.plan_and_progress import Plan, Recorder, Refusal, refuse

#: A drive's discard mode in libvirt's words.
_MODES = {"on": "unmap", "unmap": "unmap"}
#: Causes that concern the agent, by which a trim cannot even begin.
_NO_AGENT = frozenset({"no_agent", "agent_silent", "agent_cannot_trim"})


class Trim(VmKind):
    """Has the agent inside a running guest give back what its filesystems do not use."""

    name = "trim"
    title = _("Trim in the guest")
    methods = {"trim": title}
    description = _(
        "Has the guest agent of a running guest trim its filesystems (fstrim): what they do not use becomes free on "
        "the host."
    )
    writes = False

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        guest = find(target_id)
        by_node = _by_node(guest)
        if guest.kind != Guest.Kind.DOMAIN and not by_node:
            return super().plan(actor, target_id, options)
        draft = Draft(f"{self.title}: {guest.name}.", [], _offline(guest))
        if by_node:
            draft = _draft_by_node(guest)
        elif not draft.refusals:
            try:
                draft = _draft(
                    guest, running.look(guest.host, guest.uid, agent=True), ["virsh", "domfstrim", guest.name]
                )
            except (RefusedError, HostError) as error:
                draft.refusals = [Refusal(error.code, error.detail)]
        qcow2 = guest.disks.filter(format="qcow2", device="disk").exists()
        by_hand = bugs(guest, self.name) if qcow2 else []
        return self.planned(guest, draft, by_hand, options)

    def draft(self, vm: Vm, options: dict[str, Any]) -> Draft:  # noqa: ARG002 (it has none)
        draft = _draft(vm.guest, _of_vm(vm), ["qm", "guest", "cmd", vm.guest.uid, "fstrim"])
        draft.refusals[:0] = proxmox_vms.lacking(vm, "trim")
        return draft

    def work(self, job: Job, recorder: Recorder) -> dict[str, Any]:
        guest = find(job.target_id)
        if _by_node(guest):
            refuse(_draft_by_node(guest).refusals)
            shell, ref = transport.shell(guest.host), proxmox_vms.ref_of(guest)
            trim = partial(node_trim.trim, shell, ref)
            result = _done(guest, seen(guest), partial(seen, guest), trim, recorder)
            recorder.log(result["words"])
            return result
        if guest.kind != Guest.Kind.DOMAIN:
            return super().work(job, recorder)
        refuse(_offline(guest))
        now = running.look(guest.host, guest.uid, agent=True)
        refuse(_draft(guest, now, []).refusals)

        def sizes() -> dict[str, int | None]:
            return occupied(guest, running.look(guest.host, guest.uid))

        def tick() -> None:
            recorder.tick()
            if recorder.cancel_requested or runner.stopping.is_set():
                raise StoppedError(protocol.CANCELLED, gettext("Cancelled. The guest finishes what it is trimming."))

        result = _done(guest, occupied(guest, now), sizes, lambda: running.trim(guest.host, guest.uid, tick), recorder)
        recorder.log(result["words"])
        return result

    def do(self, vm: Vm, options: dict[str, Any], recorder: Recorder) -> dict[str, Any]:  # noqa: ARG002 (it has none)
        return _done(
            vm.guest, seen(vm.guest), partial(seen, vm.guest), partial(actions.trim, vm.client, vm.ref), recorder
        )

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        if result.get("before_bytes") is not None:
            record.write_line(job, pool_of(find(job.target_id)), result["before_bytes"], result["after_bytes"])
        return result


def _by_node(guest: Guest) -> bool:
    """Whether its node's own command trims it: containers of Proxmox VE, and VMs where there is no token."""
    if guest.kind == Guest.Kind.DOMAIN or not guest.host.runs_proxmox:
        return False
    return guest.kind == Guest.Kind.CONTAINER or (not guest.host.token_id and not _without_shell(guest.host))


def _without_shell(host: Host) -> list[Refusal]:
    """Why no command runs there; nothing where one does."""
    try:
        transport.shell(host)
    except RefusedError as error:
        return [Refusal(error.code, error.detail)]
    return []


def _draft_by_node(guest: Guest) -> Draft:
    """What such a trim would do, and what stands against it, as the last scan knows the guest."""
    command = node_trim.command(proxmox_vms.ref_of(guest))
    if guest.kind == Guest.Kind.VM:
        disks = [DiskNow(disk.target, disk.target.rstrip("0123456789"), discard=_MODES.get(disk.discard, "ignore"))
                 for disk in guest.disks.filter(only_in="", device="disk")
                 if not disk.target.startswith(proxmox_vms.BESIDE)]  # fmt: skip
        draft = _draft(guest, GuestNow(guest.state, agent=AgentNow(configured=True), disks=tuple(disks)), command)
    else:
        sentence = gettext("The node trims the volumes of {guest} (fstrim). Nothing stops, and nothing is copied.")
        draft = Draft(sentence.format(guest=guest.name), command)
        draft.warnings.append(gettext("Proxmox VE locks the container for that time."))
    draft.refusals += _without_shell(guest.host)
    if guest.lock:
        sentence = gettext("{guest} is locked by Proxmox VE ({lock}). Wait until the lock is released.")
        draft.refusals.append(Refusal("guest_locked", sentence.format(guest=guest.name, lock=guest.lock)))
    return draft


def _offline(guest: Guest) -> list[Refusal]:
    """What stands against asking about a domain, as the database knows."""
    host: Host = guest.host
    if why := why_read_only(host):
        return [Refusal("tool_missing", why)]
    if host.status == Host.Status.UNREACHABLE:
        sentence = gettext("{host} does not answer: {why}").format(host=host.name, why=host.status_detail)
        return [Refusal("host_unreachable", sentence)]
    return []


def _draft(guest: Guest, now: GuestNow, command: list[str]) -> Draft:
    """What a trim of a guest would do, and what stands against it."""
    causes = doctor.causes(now, images_of(guest), _devices(guest, now))
    draft = Draft(
        gettext("The guest agent of {guest} trims all its filesystems. Nothing stops, and nothing is copied.").format(
            guest=guest.name
        ),
        command,
        causes=[*causes],
    )
    if not now.runs:
        sentence = gettext("{guest} is not running ({state}): only a running guest can be trimmed.")
        draft.refusals.append(Refusal("guest_off", sentence.format(guest=guest.name, state=now.state)))
        return draft
    draft.refusals += [
        Refusal("tool_missing", f"{cause.sentence} {cause.mend}") for cause in causes if cause.code in _NO_AGENT
    ]
    stopped = {cause.disk for cause in causes if cause.stops and cause.disk}
    if now.disks and stopped.issuperset(disk.target for disk in now.disks):
        told = gettext("No disk of {guest} frees what the guest trims: the causes are listed with the plan.")
        draft.refusals.append(Refusal("nothing_to_free", told.format(guest=guest.name)))
    draft.warnings.append(gettext("A trim cannot be stopped once it runs: cancelling only ends the waiting for it."))
    return draft


def _of_vm(vm: Vm) -> GuestNow:
    """A VM of Proxmox VE, by its configuration; whether its agent answers, only the trim itself tells."""
    disks = []
    for key, text in vm.config.now.items():
        if not drives.is_drive(key, drives.VM) or key.startswith(proxmox_vms.BESIDE):
            continue
        with contextlib.suppress(ValueError):
            drive = Drive.parse(text)
            if not drive.is_cdrom and not drive.is_empty:
                discard = "unmap" if drive.option("discard") == "on" else "ignore"
                # QEMU is told to detect zeroes unless that is switched off, and to unmap them where discard is on.
                zeroes = "off" if drive.option("detect_zeroes") == "0" else discard.replace("ignore", "on")
                disks.append(DiskNow(key, key.rstrip("0123456789"), discard=discard, detect_zeroes=zeroes))
    agent = AgentNow(configured=guests.has_agent(vm.config.now))
    return GuestNow("running" if vm.runs() else "stopped", agent=agent, disks=tuple(disks))


def _devices(guest: Guest, now: GuestNow) -> dict[str, DeviceNow]:
    """What lies below a guest's block devices; nothing where its host has no agent, or does not answer in time."""
    asked = {disk.target: disk.chain[0] for disk in now.disks if disk.kind == "block" and disk.chain}
    if not asked or refusals.without_agent(guest.host):
        return {}
    paths = [b64(os.fsencode(path)) for path in asked.values()]
    try:
        told = asking.ask(guest.host, "beneath", {"paths_b64": paths}, seconds=running.LOOK_TIMEOUT)
    except (RefusedError, HostError):
        return {}
    return {target: DeviceNow(**device) for target, device in zip(asked, told["devices"], strict=True)}


def _done(
    guest: Guest,
    before: Mapping[str, int | None],
    sizes: Callable[[], Mapping[str, int | None]],
    trim: Callable[[], tuple[Trimmed, ...]],
    recorder: Recorder,
) -> dict[str, Any]:
    """Has a guest trim, and says what it reported and how much its images occupy before and afterwards."""
    recorder.progress({"stage": "trimming", "message": "in the guest, which reports no progress"})
    recorder.flush()
    trimmed = trim()
    for one in trimmed:
        if one.error:
            recorder.log(f"{one.path}: {one.error}", JobLog.Level.WARNING)
        else:
            told = "trimmed" if one.trimmed_bytes is None else f"{one.trimmed_bytes:,} bytes trimmed"
            recorder.log(f"{one.path}: {told}")
    if trimmed and all(one.error for one in trimmed):
        sentence = gettext("The guest agent of {guest} could trim nothing: {error}")
        raise HostError(sentence.format(guest=guest.name, error=trimmed[0].error))
    known = [one.trimmed_bytes for one in trimmed if one.trimmed_bytes is not None]
    disks = _compared(before, sizes())
    result: dict[str, Any] = {
        "filesystems": [{"path": one.path, "trimmed_bytes": one.trimmed_bytes, "error": one.error} for one in trimmed],
        "trimmed_bytes": sum(known) if known else None,
        "disks": disks,
    }
    for disk in disks:
        recorder.log(f"{disk['disk']}: {disk['before_bytes']:,} bytes before, {disk['after_bytes']:,} after")
    good = sum(not one.error for one in trimmed)
    words = f"{good} of {len(trimmed)} filesystems in {guest.name} trimmed"
    if disks:
        result |= change(*(sum(disk[name] for disk in disks) for name in ("before_bytes", "after_bytes")))
        words += f": {result['freed_bytes']:,} bytes became free on the host."
    else:
        words += ". What that freed on the host, the scan that follows reads."
    return result | {"words": words}


def _compared(before: Mapping[str, int | None], after: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """The disks of which both sizes are known."""
    return [
        {"disk": disk, "before_bytes": was, "after_bytes": now, "freed_bytes": was - now}
        for disk, was in sorted(before.items())
        if was is not None and (now := after.get(disk)) is not None
    ]
