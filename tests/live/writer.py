"""A guest that writes all the time, and whether everything that it was told to be on the disk is there.

Each write is a block of 4096 bytes with a number in it, the next one each time, in turn in each of so many places. It
counts as acknowledged when the guest has been told that it is flushed.
"""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.harness.guests import LibvirtGuest

BLOCK, PLACES = 4096, 64
#: Where it writes, in blocks from the begin of the disk.
FIRST = 16384
_LOOP = (
    "i=0; while [ -e /writes ]; do "
    "printf '%04095d\\n' $i | dd of=/dev/{disk} bs=4096 seek=$(({first} + i % {places})) conv=notrunc,fsync 2>/dev/null"
    " && echo $i > /acked.new && mv /acked.new /acked; i=$((i+1)); done"
)


@contextlib.contextmanager
def writing(guest: LibvirtGuest, disk: str = "vda") -> Iterator[None]:
    """The guest writes as long as the context lasts, and has ended then."""
    begin(guest, disk)
    yield
    guest.console.run("rm -f /writes; until [ -e /ended ]; do sleep 0.05; done; rm /ended")


def begin(guest: LibvirtGuest, disk: str = "vda") -> None:
    """The guest writes from now on."""
    loop = _LOOP.format(disk=disk, first=FIRST, places=PLACES)
    guest.console.run(f"touch /writes; echo -1 > /acked; ( {loop}; touch /ended ) > /dev/null 2>&1 &")
    wait_for_writes(guest, 2)


def acknowledged(guest: LibvirtGuest) -> int:
    """The number of the last write that was acknowledged."""
    return int(guest.console.run("cat /acked"))


def wait_for_writes(guest: LibvirtGuest, more: int) -> None:
    """Waits until so many more writes were acknowledged."""
    guest.console.run(f"n=$(($(cat /acked) + {more})); until [ $(cat /acked) -ge $n ]; do sleep 0.02; done")


def check(image: Path, last: int, form: str = "qcow2") -> None:
    """Of an image that no guest has open: each place holds the last write into it that was acknowledged, or a later
    one.
    """
    assert last > 0, "nothing was written"
    raw = image.with_suffix(".check")
    subprocess.run(["qemu-img", "convert", "-f", form, "-O", "raw", image, raw], check=True)
    with raw.open("rb") as file:
        for place in range(PLACES):
            wanted = last - (last - place) % PLACES
            if wanted < 0:
                continue
            file.seek((FIRST + place) * BLOCK)
            found = re.fullmatch(rb"(\d{4095})\n", file.read(BLOCK))
            assert found is not None, f"place {place} holds something else than a whole write"
            assert int(found[1]) >= wanted, f"place {place} holds write {int(found[1])}, and {wanted} was acknowledged"
            assert int(found[1]) % PLACES == place
    raw.unlink()
