"""The job kind ``from_device``: a block device of the host, as a logical volume, becomes an image in a pool."""

import os
import shlex
from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.kinds import creation
from images.kinds.convert import words, wrong_target
from images.kinds.create import Create, path_in, place
from images.kinds.to_device import ELSEWHERE, wrong_device
from images.rewrite import record, refusals
from images.rewrite.space import WRITTEN
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import b64
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.hosts.names import display, path_key
from storage_admin.hosts.selectors import find_pool
from storage_admin.jobs.kinds import Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan


class FromDevice(Create):
    """Reads a device that nobody uses into a new image; for admins, since a device may be anybody's."""

    name = "from_device"
    title = _("Import device")
    description = _(
        "Makes an image of a block device of the host, for example a logical volume. The device is only read, and only "
        "while nothing uses it. Zeros are left out, and the image is compared with the device. No file is overwritten."
    )
    verb = "from_device"
    role = Role.ADMIN
    stages = {"checking": (0, 2), "creating": (2, 70)} | WRITTEN
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image was written completely, or there is no file of its name."),
            gettext_noop("No image was made. The job removed what it had written. The device is unchanged."),
        )
    }
    properties = {
        "device": {"type": "string", "description": _("Path of the device on the host, such as /dev/vg/volume.")},
        "name": {"type": "string", "description": _("Name of the new file, with the extension of its format.")},
        "format": {"enum": list(OPTIONS), "default": "qcow2", "description": _("The format of the new image.")},
        "format_options": Create.properties["format_options"],
        **record.SPEED_OPTIONS,
    }

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        fields = creation.wrong(options["format"], words(options["format_options"]))
        if why := wrong_target(options["name"], options["format"]):
            fields["name"] = why
        if why := wrong_device(options["device"]):
            fields["device"] = why
        return fields

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:
        host, written = target.host.pk, path_key(path_in(find_pool(target.id), options))
        device = path_key(os.fsencode(options["device"]))
        return [Lock(f"path:{host}:{written}", exclusive=True), Lock(f"path:{host}:{device}", exclusive=False)]

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        pool = find_pool(target_id)
        path, device = path_in(pool, options), options["device"]
        against = [*refusals.for_host(pool.host), *refusals.for_new_file(pool, path)]
        given = ",".join(f"{name}={value}" for name, value in sorted(words(options["format_options"]).items()))
        command = ["qemu-img", "convert", "-f", "raw", "-O", options["format"], *(["-o", given] if given else [])]
        return Plan(
            method="from_device",
            reason=gettext("{device} is read into {path} and compared with it. Then the file gets its name.").format(
                device=device, path=display(path)
            ),
            commands=(shlex.join([*command, device, display(path)]),),
            facts_at=pool.last_scanned,
            before_bytes=0,
            refusals=tuple(against),
            warnings=(
                gettext("The size is known when the device is read. The reserve of the pool stays free."),
                str(ELSEWHERE),
            ),
            options=options,
        )

    def request(self, job: Job) -> dict[str, Any]:
        pool, options = find_pool(job.target_id), job.options
        return {
            "device_b64": b64(os.fsencode(options["device"])),
            "target": place(pool, options) | {"format": options["format"], "options": words(options["format_options"])},
            **record.limits(job),
        }  # fmt: skip

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return super().record(job, result) | {"device": job.options["device"], "device_bytes": result["device_bytes"]}
