"""Kinds that rewrite images, and do to volumes of some pools what their backends can: by other verbs of the agent."""

from dataclasses import asdict
from typing import Any, ClassVar

from django.utils.translation import gettext, gettext_noop

from images.models import Image
from images.rewrite import in_use, volume_refusals
from images.rewrite.kind import Rewriting
from images.rewrite.neighbours import ancestors, find
from images.rewrite.record import speed_for
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.kinds import Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal, refuse
from storage_admin.words import Translatable


class OnVolumes(Rewriting):
    """Its :meth:`against` and :meth:`choose` tell volumes from files; all else that is different of these is here."""

    #: What the agent is asked, by the kinds of pools of :attr:`volumes`.
    volume_verbs: ClassVar[dict[str, str]] = {}
    #: The options that there are for volumes, too: else their storage has but one way to do it.
    volume_options: ClassVar[frozenset[str]] = frozenset()
    #: Why it does not work on volumes of other pools, by their kinds, where there is more to say.
    no_volumes: ClassVar[dict[str, Translatable]] = {}
    #: What holds while it works on a volume, by the method of its plan.
    volume_promises: ClassVar[dict[str, Translatable]] = {}

    unsuccessful = Rewriting.unsuccessful | {
        "discard": Unsuccessful(
            gettext_noop("The volume's contents are unchanged. Some of its zeros may have been discarded."),
            gettext_noop("This job did not change what is read from the volume."),
        ),
        "sparsify": Unsuccessful(
            gettext_noop("The volume's contents are unchanged. Some of its zeros may have been discarded."),
            gettext_noop("This job did not change what is read from the volume."),
        ),
        "flatten": Unsuccessful(
            gettext_noop("The volume's contents are unchanged. It may have a copy of some of its parent's data."),
            gettext_noop("This job did not change what is read from the volume."),
        ),
        "promote": Unsuccessful(
            gettext_noop("The contents of both volumes are unchanged. They may have exchanged their parts."),
            gettext_noop("This job did not exchange anything."),
        ),
    }

    def against_volume(self, image: Image) -> list[Refusal]:
        """What stands against work on a volume."""
        if image.pool.kind in self.volume_verbs:
            return volume_refusals.for_change(image)
        told = gettext("{image} is a volume of a {kind} pool. This job does not work on such volumes.")
        told = str(self.no_volumes.get(image.pool.kind, told))
        return [Refusal("unsupported_pool", told.format(kind=image.pool.kind, image=image.name))]

    def verb_for(self, job: Job) -> str:
        return self.volume_verbs.get(find(job.target_id).pool.kind, self.verb)

    def replaces(self, method: str, options: dict[str, Any]) -> bool:
        return method not in self.volume_promises and super().replaces(method, options)

    def promise(self, method: str, options: dict[str, Any]) -> str:
        return str(self.volume_promises.get(method) or super().promise(method, options))

    def prepare(self, job: Job) -> None:
        image = find(job.target_id)
        if image.is_volume:
            in_use.check_guests_off(image)
        else:
            super().prepare(job)

    def request(self, job: Job) -> dict[str, Any]:
        image = find(job.target_id)
        if not image.is_volume:
            return super().request(job)
        choice = self.choose(image, ancestors(image), job.options)
        refuse([*self.against(image, job.options), *choice.refusals])
        return self.place_of(image) | (asdict(speed_for(job)) if image.pool.kind == StoragePool.Kind.LVMTHIN else {})

    @staticmethod
    def place_of(image: Image) -> dict[str, Any]:
        """What the agent's verb for a volume is told it by."""
        return place(image)

    def note_ready(self, job: Job, ready: dict[str, Any]) -> None:
        if "made_inode" in ready:  # nothing takes a volume's place
            super().note_ready(job, ready)


def place(image: Image) -> dict[str, Any]:
    """What a volume's own backend knows it by."""
    if image.pool.kind == StoragePool.Kind.RBD:
        pool = image.pool.path.partition(" ")[2]
        name = bytes(image.path_bytes).removeprefix(f"rbd:{pool}/".encode())
        return {"pool": pool, "name_b64": b64(name), "size": image.virtual_size, "id": image.volume.get("id", "")}
    if image.pool.kind == StoragePool.Kind.ZFS:
        return {"dataset": dataset(image.path), "origin": dataset(image.backing_path)}
    return image.volume_place


def dataset(path: str) -> str:
    """The volume of ZFS that a device is, as ZFS calls it; of what is no such device, nothing."""
    prefix = "/dev/zvol/"
    return path.removeprefix(prefix).replace("+", " ") if path.startswith(prefix) else ""
