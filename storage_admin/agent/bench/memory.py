"""How many guests fit into a host's memory."""

from __future__ import annotations

#: What qemu takes for a guest beside the guest's own memory, and what stays for the host, in bytes.
OVERHEAD_BYTES = 64 << 20
KEPT_BYTES = 256 << 20


def needed_bytes(guests: int, memory_bytes: int) -> int:
    """What so many guests of that much memory take at once."""
    return guests * (memory_bytes + OVERHEAD_BYTES)


def most_guests(available_bytes: int, memory_bytes: int) -> int:
    """How many guests of that much memory fit into what a host has available (proc_meminfo(5), "MemAvailable")."""
    return max(0, available_bytes - KEPT_BYTES) // (memory_bytes + OVERHEAD_BYTES)
