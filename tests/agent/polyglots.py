"""Files that are two things at once: a guest may write what it likes to the beginning of its raw disk."""

import struct
from pathlib import Path

from tests.agent.harness import qemu_img
from tests.agent.hostile import Hostile, qcow2, qed, vmdk_text

SIZE = 1 << 20


def polyglots(outside: Path, scratch: Path) -> list[Hostile]:
    """Images whose content is not what they are declared to be."""
    secret = bytes(outside / "shadow")
    made = _by_qemu(scratch)
    extent = vmdk_text(b'RW 2048 FLAT "%s" 0' % secret)
    heads = {
        **made,
        "qcow2": qcow2(),
        "qcow2 of version 2": qcow2(version=2),
        "qcow2 on a base": qcow2(secret, b"raw"),
        "qcow2 with a data file": qcow2(data_file=secret),
        "qcow2 that ends after its mark": b"QFI\xfb",
        "vmdk descriptor": extent,
        "vmdk of ESX": b"COWD" + bytes(508),
        "qed on a base": qed(secret, raw=True),
        "luks": b"LUKS\xba\xbe\0\1" + bytes(584),
        "luks2": b"LUKS\xba\xbe\0\2" + bytes(584),
        "qcow": b"QFI\xfb\0\0\0\1" + bytes(40),
        "parallels": b"WithoutFreeSpace" + bytes(48),
        "parallels, extended": b"WithouFreSpacExt" + bytes(48),
        "bochs": b"Bochs Virtual HD Image" + bytes(490),
        "cloop": b"#!/bin/sh\n#V2.0 Format\n" + bytes(500),
    }
    disks = [Hostile(f"a raw disk that begins as {what}", "raw", _disk(head)) for what, head in heads.items()]
    vdi_mark = struct.pack("<I", 0xBEDA107F)
    return [
        *disks,
        Hostile("qcow2 that is a vmdk descriptor", "qcow2", extent.ljust(4096)),
        Hostile("qcow2 that is a raw disk", "qcow2", _disk(b"")),
        Hostile("vmdk that is qcow2", "vmdk", qcow2(secret, b"raw")),
        Hostile("vdi with the mark of vmdk", "vdi", _marked(made["vdi"], 0, b"KDMV")),
        Hostile("vdi with the mark of qcow2", "vdi", _marked(made["vdi"], 0, b"QFI\xfb\0\0\0\3")),
        Hostile("qcow2 with the marks of vmdk and vdi", "qcow2", _marked(_marked(qcow2(), 64, vdi_mark), 0, b"KDMV")),
        Hostile("vhd with the head of qcow2", "vpc", _marked(made["fixed vhd"], 0, qcow2(secret, b"raw"))),
        Hostile("qed that is qcow2", "qed", qcow2()),
        Hostile("vhdx that is vmdk", "vhdx", made["vmdk"]),
    ]


def _by_qemu(scratch: Path) -> dict[str, bytes]:
    kinds = {
        "vmdk": ("vmdk", ""), "vmdk stream": ("vmdk", "subformat=streamOptimized"), "vdi": ("vdi", ""),
        "vhdx": ("vhdx", ""), "vhd": ("vpc", ""), "fixed vhd": ("vpc", "subformat=fixed"),
    }  # fmt: skip
    made = {}
    for what, (form, options) in kinds.items():
        path = scratch / what.replace(" ", "-")
        qemu_img("create", "-q", "-f", form, *(["-o", options] if options else []), path, "1M")
        made[what] = path.read_bytes()
    return made


def _disk(head: bytes) -> bytes:
    """A raw disk with that at its beginning, as large as it takes."""
    return head + b"what a guest keeps".ljust(64, b".") * ((SIZE - len(head) % SIZE) // 64) + bytes(-len(head) % 64)


def _marked(content: bytes, at: int, mark: bytes) -> bytes:
    return content[:at] + mark + content[at + len(mark) :]
