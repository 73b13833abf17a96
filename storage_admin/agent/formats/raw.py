"""An image without a header."""

from __future__ import annotations

from storage_admin.agent.formats.facts import Facts, Reader


def read(reader: Reader) -> Facts:
    """The facts of a raw image: its virtual size is its file size, rounded up to whole sectors as qemu does."""
    return Facts(format="raw", virtual_size=(reader.file_size + 511) // 512 * 512)
