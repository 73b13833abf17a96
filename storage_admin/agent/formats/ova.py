"""An OVA archive of one disk: the place and the text of what stands before it.

Layout: DMTF DSP0243 (OVF 1.1), "OVF package" and "Distribution as a single file": a tar archive (POSIX.1-2017,
"ustar Interchange Format") of the descriptor, the manifest and the disk, in that order. The first two have a size that
is known before, so that the disk is written where it stays.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

_BLOCK = 512
#: Bytes of the descriptor; what its text does not need is line ends, which XML allows behind the end.
_DESCRIPTOR = 16 << 10
#: Where the disk begins.
DISK = 3 * _BLOCK + _DESCRIPTOR + _BLOCK
#: What follows it at the archive's end.
END = bytes(2 * _BLOCK)
#: The largest size that eleven octal digits say; from there on it stands in binary, as GNU tar and VMware do it.
_OCTAL = 1 << 33
_MIB = 1 << 20
_FORMAT = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"
_CIM = "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2"


@dataclass(frozen=True)
class Appliance:
    """What the archive says of the guest.

    Args:
        name: of the guest, and of the files as far as the letters in it are everywhere allowed in a file's name.
        cpus: how many processors it has.
        memory_bytes: a multiple of 1 MiB.
        virtual_size: of the disk in bytes.
    """

    name: str
    cpus: int
    memory_bytes: int
    virtual_size: int

    def member(self, ending: str) -> str:
        """The name of a file in the archive."""
        return (re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip(".-")[:60] or "guest") + ending

    @property
    def disk(self) -> str:
        """The name of the disk in the archive."""
        return self.member("-disk1.vmdk")

    def front(self, disk_bytes: int, disk_sha256: str) -> bytes:
        """All that stands before the disk, :data:`DISK` bytes.

        Args:
            disk_bytes: size of the disk's file.
            disk_sha256: of that file, in hexadecimal digits.
        """
        text = self._descriptor(disk_bytes).encode()
        text += b"\n" * (_DESCRIPTOR - len(text))
        own = hashlib.sha256(text).hexdigest()
        manifest = f"SHA256({self.member('.ovf')})= {own}\nSHA256({self.disk})= {disk_sha256}\n".encode()
        return b"".join(
            (
                *(_header(self.member(".ovf"), _DESCRIPTOR), text),
                *(_header(self.member(".mf"), len(manifest)), manifest, bytes(_BLOCK - len(manifest))),
                _header(self.disk, disk_bytes),
            )
        )

    def _descriptor(self, disk_bytes: int) -> str:
        name = escape("".join(letter if letter.isprintable() else "?" for letter in self.name)[:200])
        items = (
            _item("AllocationUnits", "hertz * 10^6", "ElementName", f"{self.cpus} virtual CPU(s)", "InstanceID", 1,
                  "ResourceType", 3, "VirtualQuantity", self.cpus),
            _item("AllocationUnits", "byte * 2^20", "ElementName", f"{self.memory_bytes // _MIB} MB of memory",
                  "InstanceID", 2, "ResourceType", 4, "VirtualQuantity", self.memory_bytes // _MIB),
            _item("Address", 0, "ElementName", "SCSI controller 0", "InstanceID", 3, "ResourceSubType", "lsilogic",
                  "ResourceType", 6),
            _item("AddressOnParent", 0, "ElementName", "Disk 1", "HostResource", "ovf:/disk/disk1", "InstanceID", 4,
                  "Parent", 3, "ResourceType", 17),
        )  # fmt: skip
        return f"""<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="{_CIM}/CIM_ResourceAllocationSettingData" xmlns:vssd="{_CIM}/CIM_VirtualSystemSettingData">
  <References>
    <File ovf:href={quoteattr(self.disk)} ovf:id="file1" ovf:size="{disk_bytes}"/>
  </References>
  <DiskSection>
    <Info>Virtual disks</Info>
    <Disk ovf:capacity="{self.virtual_size}" ovf:diskId="disk1" ovf:fileRef="file1" ovf:format="{_FORMAT}"/>
  </DiskSection>
  <VirtualSystem ovf:id={quoteattr(self.member(""))}>
    <Info>A virtual machine</Info>
    <Name>{name}</Name>
    <OperatingSystemSection ovf:id="1">
      <Info>Not known</Info>
    </OperatingSystemSection>
    <VirtualHardwareSection>
      <Info>Virtual hardware</Info>
      <System>
        <vssd:ElementName>Virtual hardware</vssd:ElementName>
        <vssd:InstanceID>0</vssd:InstanceID>
        <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>
        <vssd:VirtualSystemType>vmx-07</vssd:VirtualSystemType>
      </System>
{"".join(items)}    </VirtualHardwareSection>
  </VirtualSystem>
</Envelope>
"""


def _item(*fields: object) -> str:
    """One device; its elements stand in the order of their names, as the schema has them."""
    pairs = zip(fields[::2], fields[1::2])
    inside = "".join(f"        <rasd:{name}>{value}</rasd:{name}>\n" for name, value in pairs)
    return f"      <Item>\n{inside}      </Item>\n"


def _header(name: str, size: int) -> bytes:
    """The header of a file that everybody may read, without an owner and a time."""
    told = b"%011o\0" % size if size < _OCTAL else b"\x80" + size.to_bytes(11, "big")
    header = bytearray(_BLOCK)
    for at, field in (
        (0, name.encode()), (100, b"0000644\0"), (108, b"0000000\0"), (116, b"0000000\0"), (124, told),
        (136, b"00000000000\0"), (148, b" " * 8), (156, b"0"), (257, b"ustar\x0000"),
    ):  # fmt: skip
        header[at : at + len(field)] = field
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)
