"""Starts, or takes over, a block job of a running domain, and follows it to its end: ``block_job URI``.

It reads lines and writes lines, each a JSON document. The first line may be ``look``: the UUID of a domain, which it
tells of as ``guest`` does. Then it reads the request:

- ``uid``, ``disk`` (its target), ``op``: ``pull``, ``commit`` or ``copy``;
- ``chain``: paths of the disk's images from above, as they were planned; ``top``, ``base``: places in it, of a commit
  the layers from ``top`` to right above ``base`` go into ``base``, of a pull all between the first one and ``base``
  (``null`` for the whole chain) move up;
- ``target``: of a copy ``path`` and ``format`` of the file that libvirt makes, and no other file may have that name;
- ``bytes_per_second``: at most, 0 for no limit;
- ``start``: else it only takes over what is at work.

Afterwards ``{"do": "abort"}`` gives the job up. It writes ``{"stage": …, "done": …, "total": …}`` at least once a
second, with ``against`` where libvirt has just refused to switch the guest over, and at last ``ended`` with what the
disk stands on now, ``contradiction`` where the domain is not what the request takes it for and nothing was begun, or
``error``; nothing where the connection ends. A block job goes on in QEMU when this process ends: whoever started it may
come back and take it over.
"""

import json
import sys
from typing import IO, Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import guest, helper
from storage_admin.hosts.libvirt.disks import ContradictedError
from storage_admin.hosts.libvirt.domains import backs_up, chain_of, disk_paths, keeps_names
from storage_admin.hosts.libvirt.elements import disk_of

#: Milliseconds between two looks, where libvirt tells of nothing meanwhile.
_POLL = 500
_PIVOTS = (libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_ACTIVE_COMMIT, libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_COPY)
_TYPES = {
    "pull": (libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_PULL,),
    "commit": (libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_COMMIT, libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_ACTIVE_COMMIT),
    "copy": (libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_COPY,),
}
_GONE = (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_DOMAIN)


class _Orders:
    """Waits for whatever is a reason to look again: an order, something that libvirt tells of the job, or time."""

    def __init__(self, lines: IO[bytes], domain: Any) -> None:
        self._lines, self._woken, self._order = lines, False, ""
        watched = libvirt.VIR_EVENT_HANDLE_READABLE | libvirt.VIR_EVENT_HANDLE_HANGUP
        libvirt.virEventAddHandle(lines.fileno(), watched, self._read, None)
        libvirt.virEventAddTimeout(_POLL, self._wake, None)
        domain.connect().domainEventRegisterAny(domain, libvirt.VIR_DOMAIN_EVENT_ID_BLOCK_JOB_2, self._wake, None)

    def _wake(self, *_: Any) -> None:
        self._woken = True

    def _read(self, *_: Any) -> None:
        line = self._lines.readline()
        self._woken, self._order = True, json.loads(line)["do"] if line else "end"

    def next(self) -> str:
        """What is wanted; empty where it is only time to look."""
        while not self._woken:
            libvirt.virEventRunDefaultImpl()
        order, self._woken, self._order = self._order, False, ""
        if order == "end":
            sys.exit(0)  # nobody listens any more; the job goes on
        return order


def main(uri: str) -> None:
    helper.prepare()
    lines = open(0, "rb", buffering=0)  # noqa: SIM115 (unbuffered: what has come is seen by libvirt's loop)
    request, connection = json.loads(lines.readline()), None
    libvirt.virEventRegisterDefaultImpl()
    try:
        connection = libvirt.open(uri)
        if "look" in request:
            helper.say(guest.look(connection.lookupByUUIDString(request["look"])))
            request = json.loads(lines.readline())
        domain = connection.lookupByUUIDString(request["uid"])
        orders = _Orders(lines, domain)
        if request["start"]:
            _start(domain, request)
        _follow(domain, request, orders)
        helper.say({"ended": True, **look(domain, request["disk"]), "allocated": _allocated(domain, request["disk"])})
    except ContradictedError as error:
        helper.say({"contradiction": str(error)})
    except libvirt.libvirtError as error:
        if connection is not None and not connection.isAlive():
            sys.exit(0)  # what was asked for last may have been begun: whoever hears no end comes back and looks
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN and not request.get("start", True):
            gone = {"active": False, "chain": [], "later": None, "allocated": None}
            helper.say({"ended": True, **gone})  # the guest was removed
        else:
            helper.say({"error": str(error)})


def look(domain: Any, disk: str) -> dict[str, Any]:
    """What a disk stands on: while the domain runs, and what its definition names for the next start."""
    active = bool(domain.isActive())
    found: dict[str, Any] = {"active": active, "chain": chain(domain, disk) if active else [], "later": None}
    if domain.isPersistent():
        xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
        found["later"] = disk_paths(domain.connect(), xml).get(disk)
    return found


def chain(domain: Any, disk: str) -> list[str]:
    """The paths of a running domain's disk and of all that it stands on, from above."""
    xml = domain.XMLDesc()
    element = disk_of(ET.fromstring(xml), disk)  # noqa: S314 (libvirt wrote it)
    if element is None:
        return []
    return chain_of(element, disk_paths(domain.connect(), xml).get(disk, ""))


def _allocated(domain: Any, disk: str) -> int | None:
    """What the image of a running domain's disk occupies, in bytes; ``None`` where libvirt does not tell."""
    try:
        element = disk_of(ET.fromstring(domain.XMLDesc()), disk)  # noqa: S314 (libvirt wrote it)
        driver = None if element is None else element.find("driver")
        # Of a raw file libvirt gives its length, whatever it occupies.
        return None if driver is None or driver.get("type") == "raw" else int(domain.blockInfo(disk)[1])
    except libvirt.libvirtError:
        return None


def _start(domain: Any, request: dict[str, Any]) -> None:
    disk, planned, top, base = request["disk"], request["chain"], request["top"], request["base"]
    name = domain.name()
    if not domain.isActive():
        raise ContradictedError(f"{name} does not run")
    if domain.blockJobInfo(disk, 0):
        raise ContradictedError(f"another block job is running on {disk} of {name}")
    if (now := chain(domain, disk)) != planned:
        raise ContradictedError(f"{disk} of {name} has another chain by now: {', '.join(now) or 'none'}")
    _refuse_memories(domain)
    if request["op"] == "pull":
        flags = libvirt.VIR_DOMAIN_BLOCK_REBASE_BANDWIDTH_BYTES
        domain.blockRebase(disk, None if base is None else planned[base], request["bytes_per_second"], flags)
    elif request["op"] == "copy":
        # Without the flag libvirt only copies disks of guests that have no definition: QEMU cannot start with a mirror.
        speed = {libvirt.VIR_DOMAIN_BLOCK_COPY_BANDWIDTH: request["bytes_per_second"]}
        flags = libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
        domain.blockCopy(disk, _target(request["target"]), speed if request["bytes_per_second"] else {}, flags)
    else:
        flags = libvirt.VIR_DOMAIN_BLOCK_COMMIT_BANDWIDTH_BYTES
        flags |= libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE if top == 0 else 0
        domain.blockCommit(disk, planned[base], planned[top], request["bytes_per_second"], flags)
    helper.say({"stage": "started"})


def _target(target: dict[str, str]) -> str:
    root = ET.Element("disk", {"type": "file"})
    ET.SubElement(root, "source", {"file": target["path"]})
    ET.SubElement(root, "driver", {"type": target["format"]})
    return ET.tostring(root, encoding="unicode")


def _refuse_memories(domain: Any) -> None:
    """What would not agree with a changed chain any more."""
    if why := keeps_names(domain):
        raise ContradictedError(why)
    if backs_up(domain):
        raise ContradictedError(f"a backup of {domain.name()} is running: wait for its end")


def _follow(domain: Any, request: dict[str, Any], orders: _Orders) -> None:
    """Tells how far the job is until there is none any more; ends this process where nobody listens any more."""
    disk, aborted, against = request["disk"], False, ""
    while True:
        try:
            info = domain.blockJobInfo(disk, libvirt.VIR_DOMAIN_BLOCK_JOB_INFO_BANDWIDTH_BYTES)
        except libvirt.libvirtError as error:
            if error.get_error_code() in _GONE and not helper.runs(domain):
                return  # the guest ended, and its jobs with it
            if domain.connect().isAlive() and disk_of(ET.fromstring(domain.XMLDesc()), disk) is None:  # noqa: S314
                return  # the disk was unplugged
            raise
        if not info:
            return
        mirror = _mirror(domain, disk)
        if not _is_wanted(info, mirror, request):
            return  # somebody else's, who neither wants it given up nor the guest switched over
        ready = info["type"] in _PIVOTS and mirror is not None and mirror.get("ready") == "yes"
        stage = "aborting" if aborted else "ready" if ready else "mirroring"
        helper.say({"stage": stage, "done": info["cur"], "total": info["end"], "against": against})
        order, against = orders.next(), ""
        if order == "abort" and not aborted:
            aborted = True
            domain.blockJobAbort(disk, libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_ASYNC)
        elif ready and order == "pivot" and not aborted:
            helper.say({"stage": "pivoting"})
            try:
                domain.blockJobAbort(disk, libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)
            except libvirt.libvirtError as error:
                if not domain.connect().isAlive():
                    raise
                against = str(error)


def _mirror(domain: Any, disk: str) -> ET.Element | None:
    element = disk_of(ET.fromstring(domain.XMLDesc()), disk)  # noqa: S314 (libvirt wrote it)
    return None if element is None else element.find("mirror")


def _is_wanted(info: dict[str, Any], mirror: ET.Element | None, request: dict[str, Any]) -> bool:
    """Whether a block job is what was asked for, by its type and by what it writes to as far as libvirt tells."""
    if info["type"] not in _TYPES[request["op"]]:
        return False
    source = None if mirror is None else mirror.find("source")
    if source is None:
        return True
    into = request["target"]["path"] if request["target"] else request["chain"][request["base"]]
    return into in {source.get("file"), source.get("dev")}


if __name__ == "__main__":
    main(sys.argv[1])
