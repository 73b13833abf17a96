"""VMs of Proxmox VE as their node's API shows them at this moment: what stands against changing one is looked at there.

What a scan knows may be old, and a plan that says yes where Proxmox VE says no is worth little; so plans ask as well,
for a few seconds at most. Where the API does not answer, the plan says that.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import qemu_bugs
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import changes, hidden, permissions, registration
from storage_admin.hosts.proxmox.client import ANSWER_SECONDS, Client
from storage_admin.hosts.proxmox.config import PATHS, Config, GuestRef, read_config
from storage_admin.hosts.proxmox.drives import CONTAINER, VM
from storage_admin.hosts.proxmox.errors import RIGHT_MISSING, NotThereError
from storage_admin.hosts.proxmox.permissions import FEATURES, MissingRight, Permissions
from storage_admin.jobs.plan_and_progress import Refusal, refuse

#: Seconds that an answer may take while somebody waits for a plan.
PLAN_SECONDS = 8.0
#: For how many seconds the plans of many guests share what was learned of their token's rights.
SHARED_SECONDS = 10.0
#: Drives that are none of the guest's own disks.
BESIDE = ("unused", "vmstate", "efidisk", "tpmstate")


#: The option of what writes a VM's configuration.
ACCEPT: dict[str, dict[str, Any]] = {
    "accept_hidden_lines": {
        "type": ["string", "null"],
        "maxLength": 40,
        "default": None,
        "description": _(
            "For nodes that are reached by the API alone. The API does not show lines that it drops when it writes "
            "a configuration. An admin accepts this once per configuration, by its digest."
        ),
    }
}


UNCHECKED = _(
    "Without SSH it cannot be checked whether the configuration has lines that the API does not show. This change "
    "drops such lines. An admin has accepted that for the current configuration."
)


@dataclass(frozen=True)
class Vm:
    """A VM, or a container, and its configuration as it was read; ``client`` is open."""

    guest: Guest
    client: Client
    config: Config

    @property
    def ref(self) -> GuestRef:
        return self.config.guest

    @property
    def is_template(self) -> bool:
        """Whether other VMs may stand on its disks, which Proxmox VE protects."""
        return self.config.now.get("template") == "1"

    def runs(self) -> bool:
        """Whether it runs, as its node says now; raises HostError."""
        rows = self.client.rows("nodes", self.ref.node, PATHS[self.ref.kind])
        return any(str(row.get("vmid")) == self.guest.uid and row.get("status") != "stopped" for row in rows)

    def running_qemu(self) -> str | None:
        """The version of QEMU that it runs, which may be older than the installed one; ``None`` where it is off."""
        rows = self.client.rows("nodes", self.ref.node, PATHS[VM], params={"full": 1})
        mine = [row for row in rows if str(row.get("vmid")) == self.guest.uid and row.get("status") != "stopped"]
        return str(mine[0].get("running-qemu") or "") if mine else None

    def snapshots_with(self, volume: str) -> list[str]:
        """The snapshots that name a volume; raises HostError."""
        return list(changes.snapshots_with(self.client, self.config, volume))

    def again(self) -> Config:
        """Its configuration now; raises HostError."""
        return read_config(self.client, self.ref)


def bugs(vm: Vm, kind: str) -> list[Refusal]:
    """What of QEMU's known bugs could corrupt a disk of a running VM: a user may do it all the same, a policy not."""
    if vm.ref.kind != VM or kind not in qemu_bugs.KINDS or (running := vm.running_qemu()) is None:
        return []
    return [Refusal("qemu_bug", one) for one in qemu_bugs.against(vm.guest.host, kind, running)]


def offline(guest: Guest, *, containers: bool = False) -> Iterator[Refusal]:
    """What stands against it as the database knows: nobody is asked.

    Args:
        containers: whether it can be done with containers of Proxmox VE as well.
    """
    host = guest.host
    if guest.kind != Guest.Kind.VM and not (containers and guest.kind == Guest.Kind.CONTAINER and host.runs_proxmox):
        yield Refusal(INVALID, gettext("{guest} is not a VM of Proxmox VE.").format(guest=guest.name))
    elif not host.token_id:
        yield Refusal(
            "tool_missing",
            gettext(
                "{host} was added without its API. Add an API token for the node: its guests are changed through it."
            ).format(host=host.name),
        )
    if host.status == Host.Status.UNREACHABLE:
        yield Refusal(
            "host_unreachable",
            gettext("{host} does not answer: {why}").format(host=host.name, why=host.status_detail),
        )
    if guest.lock:
        yield Refusal(
            "guest_locked",
            gettext("{guest} is locked by Proxmox VE ({lock}). Wait until the lock is released.").format(
                guest=guest.name, lock=guest.lock
            ),
        )


def ref_of(guest: Guest) -> GuestRef:
    """Where its node has it."""
    kind = CONTAINER if guest.kind == Guest.Kind.CONTAINER else VM
    return GuestRef(guest.host.node, int(guest.uid), kind)


@contextlib.contextmanager
def opened(guest: Guest, seconds: float = ANSWER_SECONDS) -> Iterator[Vm]:
    """The VM, or container, as its node shows it now, provided that it may be changed.

    Args:
        seconds: that each answer may take.

    Raises:
        RefusedError: ``guest_locked``.
        HostError: the API does not answer, or knows no such guest on that node.
    """
    host = guest.host
    with registration.client(host, seconds) as client:
        try:
            config = read_config(client, ref_of(guest))
        except NotThereError as error:
            raise HostError(
                gettext(
                    "There is no guest {uid} on {node} now. If it has moved to another node, select it there. {detail}"
                ).format(uid=guest.uid, node=host.node, detail=error.detail),
                error.code,
            ) from error
        config.check_free()
        yield Vm(guest, client, config)


def accepted_by(actor: Actor, guest: Guest, options: dict[str, Any]) -> str | None:
    """The digest that an option :data:`ACCEPT` gives; raises ForbiddenError where the actor is no admin."""
    digest: str | None = options.get("accept_hidden_lines")
    if digest:
        actor.require(Role.ADMIN, guest.host.slug)
    return digest


def check_writing(vm: Vm, accepted: str | None) -> list[str]:
    """Lets the configuration be written, where no line of it is lost by that, or an admin has accepted it.

    Args:
        accepted: the digest for which an admin has accepted it with this job.

    Returns:
        What to be warned of.

    Raises:
        RefusedError: ``hidden_lines``; ``stale_plan``: the file changes just now.
        HostError: the file cannot be read.
    """
    refuse(unchecked(vm.guest, vm.config.digest, accepted))
    hidden.refuse_dropping(vm.guest.host, vm.client, vm.config, vm.guest.name)
    return [str(UNCHECKED)] if vm.guest.host.by_api_alone else []


def unchecked(guest: Guest, digest: str, accepted: str | None) -> list[Refusal]:
    """What stands against a write by the API alone: lines that it does not show would be lost, unless that is accepted.

    Args:
        digest: of the configuration that would be written.
        accepted: as for :func:`check_writing`.
    """
    if not guest.host.by_api_alone or (digest and digest in (guest.accepted_digest, accepted)):
        return []
    asks = (
        gettext("accept the loss of such lines in the current configuration (accept_hidden_lines: {digest})").format(
            digest=digest
        )
        if digest
        else gettext("scan the host first")
    )
    return [
        Refusal(
            hidden.CODE,
            gettext(
                "Without SSH it cannot be checked whether the configuration of {guest} has lines that the API of "
                "Proxmox VE does not show. Any change by the API drops such lines. Set up SSH for the host as well "
                "or, as an admin, {asks}."
            ).format(guest=guest.name, asks=asks),
        )
    ]


def accept(guest: Guest, digest: str) -> None:
    """Keeps that nothing is lost by a write of that configuration, or that an admin has accepted it."""
    Guest.objects.filter(pk=guest.pk).update(accepted_digest=digest)
    guest.accepted_digest = digest


def still_needed(guest: Guest, target: str) -> list[Refusal]:
    """Why a drive's volume has to stay, as the last scan knows it: other images stand on it, or other guests use it.

    Proxmox VE itself looks at the linked clones of templates alone.
    """
    disk = guest.disks.filter(target=target, only_in="").select_related("use__image").first()
    use = getattr(disk, "use", None)
    if use is None:
        return []
    image, found, keep = use.image, [], gettext("keep the old volume (delete_source off).")
    if image.overlays_count:
        sentence = ngettext(
            "{count:,} overlay uses {image} as backing file. Flatten it first, or {keep}",
            "{count:,} overlays use {image} as backing file. Flatten them first, or {keep}",
            image.overlays_count,
        ).format(count=image.overlays_count, image=image.name, keep=keep)
        found.append(Refusal("has_overlays", sentence))
    uses = image.uses.exclude(disk__guest=guest).select_related("disk__guest")
    others = {use.disk.guest.name_for(guest.host_id) for use in uses}
    if others:
        sentence = gettext("{image} is also a disk of {others}: {keep}").format(
            image=image.name, others=", ".join(sorted(others)[:3]), keep=keep
        )
        found.append(Refusal("guest_names_image", sentence))
    return found


def lacking(vm: Vm, feature: str, storage: str = "") -> list[Refusal]:
    """The right that a feature lacks on this VM and this storage, as a refusal that names it; raises HostError."""
    try:
        permissions.require(vm.client, feature, vmid=vm.ref.vmid, storage=storage)
    except HostError as error:
        if error.code != RIGHT_MISSING:
            raise
        return [Refusal(RIGHT_MISSING, error.detail)]
    return []


_rights: dict[tuple[object, ...], tuple[float, Permissions | Refusal]] = {}


def lacking_on(guest: Guest, feature: str) -> list[Refusal]:
    """The same for a plan among those of many guests: each host is asked once, also where it does not answer."""
    host = guest.host
    key = (host.address, host.port, host.token_id, bytes(host.token_locked))
    asked, known = _rights.get(key, (0.0, None))
    if known is None or time.monotonic() - asked > SHARED_SECONDS:
        try:
            with registration.client(host, PLAN_SECONDS) as client:
                known = permissions.read(client)
        except (HostError, RefusedError) as error:
            known = Refusal(error.code, error.detail)
        _rights.clear()
        _rights[key] = (time.monotonic(), known)
    if isinstance(known, Refusal):
        return [known]
    path = f"/vms/{guest.uid}"
    return [
        Refusal(RIGHT_MISSING, MissingRight(feature, path, need.rights).sentence)
        for need in FEATURES[feature].needs
        if need.scope == "/vms" and not known.has(path, need.rights)
    ]
