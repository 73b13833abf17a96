"""What an overlay hides of the image right below it: what the two have twice, until the overlay is merged into it.

Layout: the qcow2 specification (qemu, docs/interop/qcow2.txt), "L2 table", "Extended L2 entries". Tables alone are
read, of both images, and of a raw base which stretches are data.
"""

from __future__ import annotations

from collections.abc import Callable

from storage_admin.agent.formats import UnreadableError
from storage_admin.agent.formats.facts import Reader
from storage_admin.agent.formats.qcow2 import parse_header
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.measure.qcow2_map import Map
from storage_admin.agent.protocol import HostError, RefusedError

Fields = dict[str, int | str | None]


def hidden_basis(
    overlay: Reader, base: Reader, base_format: str, check: Callable[[], None], deadline: float | None
) -> Fields:
    """Bytes of the base that nobody reads through the overlay.

    A cluster of the base counts where the overlay covers all of it, with data or zeros of its own.

    Args:
        overlay: a qcow2 image.
        base: the image below it.
        base_format: as declared, ``raw`` or ``qcow2``.
        check: called now and then; raises to stop.
        deadline: on the monotonic clock; when it has passed the answer is that it is not known.

    Returns:
        ``hidden_bytes``, ``None`` with a ``hidden_reason`` where it is not known.
    """
    try:
        above = Map(overlay.fd, overlay.file_size, parse_header(overlay), check)
        if base_format == "raw":
            stored = DataMap(base.fd, base.file_size, check).bytes_in
        else:
            stored = Map(base.fd, base.file_size, parse_header(base), check).bytes_in
        return {"hidden_bytes": sum(stored(*run) for run in above.covered(deadline))}
    except (UnreadableError, RefusedError, HostError) as error:
        return {"hidden_bytes": None, "hidden_reason": getattr(error, "detail", str(error))}
    except OSError as error:
        return {"hidden_bytes": None, "hidden_reason": f"the image below it could not be read: {error.strerror}"}
