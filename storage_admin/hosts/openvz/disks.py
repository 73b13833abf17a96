"""Where a container's data is: a folder (simfs), or the images in it (ploop)."""

from dataclasses import replace

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.names import display
from storage_admin.hosts.openvz.commands import Commands, plain

#: Reads private areas, one a line, and prints the files of each that is a ploop, each name ended by a zero byte:
#: the area, then its files, then an empty one. A snapshot adds a file, and all of them are needed.
_PLOOPS = """\
while IFS= read -r area; do
  [ -d "$area/root.hdd" ] || continue
  printf '%s\\0' "$area"
  for file in "$area"/root.hdd/*; do
    case $file in */DiskDescriptor.xml* | *.lck) continue ;; esac
    if [ -f "$file" ] && [ ! -L "$file" ]; then printf '%s\\0' "$file"; fi
  done
  printf '\\0'
done
"""


def with_disks(commands: Commands, guests: tuple[GuestFacts, ...], areas: dict[str, bytes]) -> tuple[GuestFacts, ...]:
    """Containers with their disks.

    Args:
        areas: private areas by container.

    Raises:
        HostError: the host cannot be reached, or the areas could not be looked into.
    """
    asked = sorted({area for area in areas.values() if area.startswith(b"/")})
    ploops = _ploops(commands, asked) if asked else {}
    return tuple(_with(guest, areas.get(guest.uid, b""), ploops) for guest in guests)


def _ploops(commands: Commands, areas: list[bytes]) -> dict[bytes, list[bytes]]:
    done = commands.script(_PLOOPS, stdin=b"".join(area + b"\n" for area in areas))
    if done.exit_code:
        raise HostError(
            _("The private areas of the containers could not be read: {said}").format(said=plain(done.stderr))
        )
    found = {}
    for block in done.stdout.split(b"\0\0"):
        area, *files = block.split(b"\0")
        if area:
            found[area] = files
    return found


def _with(guest: GuestFacts, area: bytes, ploops: dict[bytes, list[bytes]]) -> GuestFacts:
    files = ploops.get(area)
    if not area.startswith(b"/"):
        # Whatever looks like nobody's may be its own.
        return replace(guest, unread=(*guest.unread, f"VE_PRIVATE={display(area)}"))
    named = [("disk", file) for file in files] if files is not None else [("directory", area)]
    disks: list[DiskFacts] = []
    unread = list(guest.unread)
    for device, raw in named:
        try:
            path = raw.decode()
        except UnicodeDecodeError:
            unread.append(display(raw))
            continue
        disks.append(DiskFacts(target="root" if not disks else f"root.{len(disks)}", device=device, path=path))
    return replace(guest, disks=tuple(disks), unread=tuple(unread))
