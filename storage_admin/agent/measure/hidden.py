"""What an overlay hides of the image right below it: what the two have twice, until the overlay is merged into it.

Layout: the qcow2 specification (qemu, docs/interop/qcow2.txt), "L2 table", "Extended L2 entries". Tables alone are
read, of both images, and of a raw base which stretches are data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Union

from storage_admin.agent.formats import Reader, UnreadableError
from storage_admin.agent.formats.qcow2 import parse_header
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.measure.qcow2_map import Map
from storage_admin.agent.protocol import HostError, RefusedError

Fields = dict[str, Union[int, str, None]]  # read by Python, which has had | since 3.10


def hidden_basis(
    overlay: Reader, base: Reader, base_format: str, check: Callable[[], None], deadline: float | None
) -> Fields:
    """Bytes of the base that nobody reads through the overlay.

    A cluster of the base counts, as far as it is no hole, where the overlay covers all of it, with data or zeros of its
    own. Internal snapshots hold on to what is hidden: then it is not known.

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
        header = parse_header(overlay)
        above = Map(overlay.fd, overlay.file_size, header, check, deadline)
        data, allocated = DataMap(base.fd, base.file_size, check), os.fstat(base.fd).st_blocks * 512
        if base_format == "raw":
            stored = data.bytes_in
        else:
            below = parse_header(base)
            if below.snapshots_count:
                return {"hidden_bytes": None, "hidden_reason": "the image below it has internal snapshots"}
            stored = partial(Map(base.fd, base.file_size, below, check, deadline).bytes_in, data)
        if header.snapshots_count:
            return {"hidden_bytes": None, "hidden_reason": "its internal snapshots read the image below it as well"}
        return {"hidden_bytes": min(sum(stored(*run) for run in above.covered()), allocated)}
    except (UnreadableError, RefusedError, HostError) as error:
        return {"hidden_bytes": None, "hidden_reason": getattr(error, "detail", str(error))}
    except OSError as error:
        return {"hidden_bytes": None, "hidden_reason": f"the image below it could not be read: {error.strerror}"}
