"""Containers, as vzlist and their configurations tell of them."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.guest_facts import GuestFacts
from storage_admin.hosts.names import display
from storage_admin.hosts.openvz import config
from storage_admin.hosts.openvz.commands import Commands, is_missing, plain
from storage_admin.hosts.openvz.disks import with_disks
from storage_admin.hosts.openvz.files import FOLDERS, read_all
from storage_admin.hosts.openvz.ids import is_ctid
from storage_admin.hosts.shells import Done, Shell

COLUMNS = "ctid,hostname,status,ioprio"
#: Seconds for vzlist: of all containers, and of one. On a configuration of one empty line it loops for ever.
ALL_SECONDS, ONE_SECONDS = 20.0, 5.0
#: vzlist's words, in libvirt's. One that is mounted has no process, but its disk is in use.
STATES = {
    "running": "running", "stopped": "shut off", "paused": "paused", "suspended": "suspended", "mounted": "mounted",
}  # fmt: skip
UNKNOWN = "unknown"

#: Columns other than the last are cut off after so many bytes.
_CUT_AT = 32
_NONE_FOUND = b"(s) not found"
_HAS_OPENVZ = '[ -d /proc/vz ]; echo "$?"'


#: Reads ids, asks vzlist for each ($1 columns, at most $2 seconds), and prints after the mark ($3) id, exit code, rows.
_EACH = """\
PATH=$PATH:/usr/sbin:/sbin
if timeout -k 1 1 true 2>/dev/null; then limit="timeout -k 1 $2"; else limit=; fi
while read -r ctid; do
  rows=$($limit vzlist -aH -o "$1" "$ctid" 2>&1 </dev/null)
  printf '%s %s %s\\n%s\\n' "$3" "$ctid" "$?" "$rows"
done
"""


class AbsentError(RefusedError):
    """There is no OpenVZ on the host: neither its kernel nor a configuration of a container."""

    def __init__(self) -> None:
        super().__init__(
            "tool_missing", _("This host does not run OpenVZ: vzlist lists no containers, and none is configured.")
        )


@dataclass(frozen=True)
class Listed:
    """What vzlist said.

    Args:
        guests: without their disks.
        told: whether it said anything that can be relied on; a host without OpenVZ's kernel gives nothing and exit 0.
    """

    guests: tuple[GuestFacts, ...]
    told: bool


def containers(shell: Shell, *, folders: Sequence[str] = FOLDERS) -> tuple[GuestFacts, ...]:
    """The containers of a host, running or not. None is an answer: OpenVZ is there and has none.

    Where vzlist is missing, or the kernel is none of OpenVZ's, the configurations tell, with the state ``unknown``.
    Where it fails, it is asked for one container after the other: the fault of one costs that one.

    Args:
        folders: where configurations are looked for then.

    Raises:
        AbsentError: there is no OpenVZ (``tool_missing``).
        HostError: vzlist failed for each of them, or the host cannot be reached.
    """
    commands = Commands(shell)
    try:
        listed = vzlist(commands)
    except HostError as error:
        if error.code == "host_unreachable":
            raise
        return _one_by_one(commands, folders, error)
    if listed.told:
        guests = _with_whole_names(commands, listed.guests)
        areas = columns_by_ctid(run_vzlist(commands, "ctid,private")) if guests else {}
        return with_disks(commands, guests, areas)
    found = read_all(commands, folders)
    if not found:
        raise AbsentError
    areas = {ctid: _area(ctid, content) for ctid, content in found.items()}
    return with_disks(commands, tuple(_from_file(ctid, content) for ctid, content in found.items()), areas)


def _one_by_one(commands: Commands, folders: Sequence[str], why: HostError) -> tuple[GuestFacts, ...]:
    """Each container for itself. What vzlist does not tell of one stands as not read: whatever looks like nobody's may
    be its own.

    Raises:
        HostError: ``why``, where it tells of none.
    """
    found, mark = read_all(commands, folders), secrets.token_hex(16)
    words, seconds = (COLUMNS, f"{ONE_SECONDS:.0f}", mark), ALL_SECONDS + (ONE_SECONDS + 1) * min(len(found), 50)
    said = commands.script(_EACH, *words, stdin="".join(f"{ctid}\n" for ctid in found).encode(), seconds=seconds).stdout
    guests, told = [], False
    for block in said.split(mark.encode() + b" ")[1:]:
        first, __, rows = block.partition(b"\n")
        ctid, code = _ascii(first).split()
        own = _from_file(ctid, found[ctid])
        rest = [guest for line in rows.split(b"\n") if (guest := _guest(line)) is not None and guest.uid == ctid]
        if int(code) and not rest and _NONE_FOUND not in rows:
            guests.append(replace(own, unread=(f"vzlist {ctid}: exit code {code} {plain(rows)}".strip(),)))
        else:
            told = True
            guests += [replace(guest, name=own.name) for guest in rest]
    if not told:
        raise why
    return with_disks(commands, tuple(guests), {ctid: _area(ctid, content) for ctid, content in found.items()})


def vzlist(commands: Commands, *ctids: str) -> Listed:
    """What vzlist says of id, name, state and I/O priority. As text: its JSON shows 0 where none is set.

    Args:
        ctids: of these containers alone, whatever is wrong with others; of all where none is given.

    Raises:
        HostError: it failed, or said nothing that can be understood.
    """
    done = run_vzlist(commands, COLUMNS, *ctids)
    if is_missing(done):
        return Listed((), told=False)
    lines = [line for line in done.stdout.split(b"\n") if line.strip()]
    guests = tuple(guest for line in lines if (guest := _guest(line)) is not None)
    if not guests and _NONE_FOUND in done.stderr + done.stdout:
        return Listed((), told=True)
    if done.exit_code or (lines and not guests):
        raise HostError(_("vzlist failed: {said}").format(said=plain(done.stderr + done.stdout) or done.words()))
    if guests:
        return Listed(guests, told=True)
    # Containers whose private area is not mounted are hidden: with OpenVZ's kernel, nothing is an answer.
    return Listed((), told=commands.script(_HAS_OPENVZ).stdout.strip() == b"0")


def run_vzlist(commands: Commands, columns: str, *ctids: str) -> Done:
    """vzlist with these columns, of these containers or all, without a header."""
    return commands.tool(["vzlist", "-aH", "-o", columns, *ctids], ONE_SECONDS if ctids else ALL_SECONDS)


def columns_by_ctid(done: Done) -> dict[str, bytes]:
    """The one column after the id, by id."""
    found = {}
    for line in done.stdout.split(b"\n"):
        first, __, rest = line.strip().partition(b" ")
        if is_ctid(_ascii(first)):
            found[_ascii(first)] = rest.strip()
    return found


def _guest(line: bytes) -> GuestFacts | None:
    """A row; ``None`` for what is none, such as a warning. The name may have blanks in it, so it is what is left."""
    first, __, rest = line.strip().partition(b" ")
    ctid = _ascii(first)
    if not is_ctid(ctid):
        return None
    name, status, priority = [*rest.strip().rsplit(None, 2), b"", b"", b""][:3]
    if _ascii(name) in STATES and not priority:
        name, status, priority = b"", name, status  # an empty name
    state, shown = STATES.get(_ascii(status), UNKNOWN), _ascii(priority)
    understood = state != UNKNOWN and re.fullmatch(r"-|[0-7]", shown)
    return GuestFacts(
        kind="container", uid=ctid, name=_name(ctid, name), state=state,
        io_priority=int(shown) if understood and shown != "-" else None,
        unread=() if understood else (display(line.strip()),),
    )  # fmt: skip


def _name(ctid: str, raw: bytes) -> str:
    return display(raw) if raw not in (b"", b"-") else ctid


def _with_whole_names(commands: Commands, guests: tuple[GuestFacts, ...]) -> tuple[GuestFacts, ...]:
    if all(len(guest.name.encode()) < _CUT_AT for guest in guests):
        return guests
    names = columns_by_ctid(run_vzlist(commands, "ctid,hostname"))
    return tuple(replace(guest, name=_name(guest.uid, names.get(guest.uid, guest.name.encode()))) for guest in guests)


def _from_file(ctid: str, content: bytes) -> GuestFacts:
    name, priority = config.value(content, b"HOSTNAME") or b"", config.recorded(content).priority
    return GuestFacts(kind="container", uid=ctid, name=_name(ctid, name), state=UNKNOWN, io_priority=priority)


def _area(ctid: str, content: bytes) -> bytes:
    area = config.value(content, b"VE_PRIVATE") or b""
    return area.replace(b"${VEID}", ctid.encode()).replace(b"$VEID", ctid.encode())


def _ascii(raw: bytes) -> str:
    return raw.decode("ascii", "replace")
