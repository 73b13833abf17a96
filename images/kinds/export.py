"""The job kind ``export``: an image is packed into a file to take elsewhere, by zstd or gzip, or as an OVA."""

import os
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.kinds import convert
from images.models import Image
from images.rewrite import forecasts, readers, record
from images.rewrite.kind import REWRITE_OPTIONS, Choice
from images.rewrite.neighbours import find
from images.rewrite.space import WRITTEN
from storage_admin.agent.rewrite.exporting import room
from storage_admin.agent.rewrite.packed import MOST_PARTS
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

#: What a file is called that is packed so.
ENDINGS = {"zstd": ".zst", "gzip": ".gz", "ova": ".ova"}
_MIB = 1 << 20
#: Of names that the first part has; the others count on.
_FIRST = ".001"
#: Options of an OVA alone.
_GUEST = {"cpus": 1, "memory_bytes": 2 << 30}


class Export(convert.Convert):
    """Writes a packed file beside an image, which is only read."""

    name = "export"
    title = _("Export")
    description = _(
        "Packs the image into a file to take elsewhere: by zstd or gzip, in parts where wanted, or as an OVA archive "
        "for another hypervisor. The file is unpacked again and compared with the image before it gets its name."
    )
    verb = "export"
    stages = {"checking": (0, 2), "copying": (2, 70)} | WRITTEN
    properties = {
        "packing": {
            "enum": list(ENDINGS),
            "default": "zstd",
            "description": _(
                "zstd, gzip: the file of the image as it is. ova: the disk with its backing chain as streamOptimized "
                "vmdk, with a description of the guest."
            ),
        },
        "target_pool": convert.Convert.properties["target_pool"],
        "target_name": {
            "type": ["string", "null"],
            "default": None,
            "description": _("Name of the new file; null for the name of the image with another extension."),
        },
        "part_bytes": {
            "type": ["integer", "null"],
            "minimum": _MIB,
            "default": None,
            "description": _(
                "Size of each part in bytes, at least 1 MiB; null for one file. Parts are called .001, .002 and so on; "
                "the first one gets its name last. Not for an OVA."
            ),
        },
        "cpus": {
            "type": "integer", "minimum": 1, "maximum": 512, "default": _GUEST["cpus"],
            "description": _("Processors of the guest that an OVA describes."),
        },
        "memory_bytes": {
            "type": "integer", "minimum": _MIB, "multipleOf": _MIB, "default": _GUEST["memory_bytes"],
            "description": _("Memory of the guest that an OVA describes, in bytes."),
        },
        **{name: REWRITE_OPTIONS[name] for name in REWRITE_OPTIONS if name != "undo_hours"},
    }  # fmt: skip
    guarantee = _(
        "The image is only read. The new file gets its name only when it was unpacked again and verified to be "
        "identical."
    )

    def replaces(self, method: str, options: dict[str, Any]) -> bool:  # noqa: ARG002 (never)
        return False

    def wrong(self, options: dict[str, Any]) -> dict[str, str]:
        packing, name, fields = options["packing"], options["target_name"], {}
        if packing == "ova" and options["part_bytes"]:
            fields["part_bytes"] = gettext("an OVA is one file. Leave this out.")
        if packing != "ova":
            set_to = [one for one, default in _GUEST.items() if options[one] != default]
            fields |= dict.fromkeys(set_to, gettext("only an OVA describes a guest. Leave this out."))
        if why := convert.wrong_target(name, ""):
            fields["target_name"] = why
        elif name is not None and name.startswith("."):
            fields["target_name"] = gettext("A name that begins with a dot hides the file.")
        elif name is not None and not name.lower().endswith(ENDINGS[packing]):
            fields["target_name"] = gettext("The name must end in {ending}.").format(ending=ENDINGS[packing])
        return fields

    def place(self, image: Image, options: dict[str, Any]) -> tuple[StoragePool, bytes]:
        packing, name = options["packing"], options["target_name"]
        if name is None:
            name = os.fsdecode(bytes(image.path_bytes).rpartition(b"/")[2])
            name = (name.rpartition(".")[0] or name if packing == "ova" else name) + ENDINGS[packing]
        name += _FIRST if options["part_bytes"] else ""
        return convert.target_of(image, {"target_pool": options["target_pool"], "target_name": name})

    def against(self, image: Image, options: dict[str, Any]) -> list[Refusal]:
        found = super().against(image, options)
        if options["packing"] == "ova":
            return found
        if image.backing_format or image.backing_id:
            told = gettext("{image} is an overlay, which is nothing without its base. Export it as OVA, or convert it.")
            found.append(Refusal("unsupported_subformat", told.format(image=image.name)))
        # Its bytes are packed as they are, whatever they mean.
        return [one for one in found if one.code != "encrypted"]

    def choose(self, image: Image, below: list[Image], options: dict[str, Any]) -> Choice:
        pool, path = self.place(image, options)
        whole, packing = sum(one.occupied_bytes for one in (image, *below)), options["packing"]
        foreign, allowed = readers.for_taken(image, below)
        size = forecasts.Range(None, None, None)
        if packing == "ova":
            size = forecasts.converted(image, below, "vmdk", {"subformat": "streamOptimized"})
            reason = gettext("The disk is written to {path} as an OVA archive and compared with the image.")
        else:
            reason = gettext("The file is packed to {path} by {packing}, unpacked again and compared with the image.")
        warnings = []
        if size.high is None:
            warnings.append(gettext("The size of the packed file is not known in advance."))
        part = options["part_bytes"]
        if part and whole > part * MOST_PARTS:
            told = gettext("There may be more than {most} parts, which are refused. Choose a larger size of a part.")
            warnings.append(told.format(most=MOST_PARTS))
        if image.snapshots and packing == "ova":
            told = gettext("The {count} internal snapshots of the image are not exported.")
            warnings.append(told.format(count=len(image.snapshots)))
        return Choice(
            "export",
            f"{reason.format(path=display(path), packing=packing)} {gettext('The image is unchanged.')}",
            _commands(image, display(path), options),
            after=size.guess,
            low=size.low,
            high=size.high,
            took=forecasts.seconds(image, self.name, 2 * whole, options["bandwidth_bytes_sec"]),
            scratch=room(packing, whole, image.file_size or 0, image.virtual_size or 0),
            refusals=foreign,
            by_hand=allowed,
            warnings=warnings,
            below={image.pk: gettext("read, not changed")},
            space_in=pool,
        )

    def asked(self, image: Image, below: list[Image], job: Job) -> dict[str, Any]:  # noqa: ARG002 (the same for all)
        pool, path = self.place(image, job.options)
        guest = next(iter(image.guest_names), image.name.rpartition(".")[0] or image.name)
        return {
            "target": pool.place_of(path),
            "packing": job.options["packing"],
            "part_bytes": job.options["part_bytes"],
            "guest": {"name": guest} | {name: job.options[name] for name in _GUEST},
        }

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        pool, path = self.place(find(job.target_id), job.options)
        record.write_line_beside(job, pool, result["after_bytes"])
        told = ("packing", "parts", "file_size", "sha256", "content_sha256", "after_bytes", "inode", "seconds")
        return {"method": result["method"], "path": display(path), "pool": pool.pk, "swapped": False} | {
            name: result[name] for name in told
        }


def _commands(image: Image, path: str, options: dict[str, Any]) -> list[list[str]]:
    """What an admin would type."""
    if options["packing"] == "ova":
        disk = "DISK.vmdk"
        given = ["-O", "vmdk", "-o", "adapter_type=lsilogic,subformat=streamOptimized"]
        return [
            ["qemu-img", "convert", "-c", "-f", image.declared_format, *given, image.path, disk],
            ["tar", "--format=ustar", "-cf", path, "GUEST.ovf", "GUEST.mf", disk],
        ]
    if options["part_bytes"]:
        stem = path.removesuffix(_FIRST)
        return [
            [options["packing"], "-c", image.path],
            ["split", "-b", str(options["part_bytes"]), "-a", "3", "--numeric-suffixes=1", "-", f"{stem}."],
        ]
    return [[options["packing"], "-c", image.path]]
