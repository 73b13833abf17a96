"""Benchmarks of some seconds, and a pool with neighbours that none of them may touch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage_admin.agent.protocol import b64
from storage_admin.agent.verbs import benchmark
from tests.agent.harness import make_image, qemu_img
from tests.agent.recording import RecordingIO, request

KIB, MIB = 1 << 10, 1 << 20
#: Steps of every kind that needs no guest, as small as they can be and still say something.
DD: list[dict[str, Any]] = [
    {"mode": mode, "block_bytes": MIB, "count": 24, "sync": sync, "data": data, "setting": {"mode": mode, "sync": sync}}
    for mode, sync, data in (
        ("write", "fdatasync", "random"), ("read", "fdatasync", "random"), ("write", "direct", "zero"),
        ("read", "direct", "zero"),
    )
]  # fmt: skip
BONNIE: list[dict[str, Any]] = [
    {
        "size_bytes": 16 * MIB,
        "memory_bytes": 8 * MIB,
        "files": 1,
        "fast": True,
        "unbuffered": False,
        "setting": {"a": 1},
    }
]
FIO: list[dict[str, Any]] = [
    {"rw": rw, "block_bytes": 4 * KIB, "size_bytes": 8 * MIB, "seconds": 1, "iodepth": 4, "jobs": jobs, "direct": True,
     "setting": {"rw": rw, "jobs": jobs}}
    for rw, jobs in (("randread", 1), ("randwrite", 1), ("write", 2))
]  # fmt: skip
PREALLOCATION: list[dict[str, Any]] = [
    {"preallocation": kind, "virtual_bytes": 64 * MIB, "write_bytes": 8 * MIB, "block_bytes": 64 * KIB,
     "cluster_bytes": 64 * KIB, "setting": {"preallocation": kind}}
    for kind in ("off", "metadata", "falloc", "full")
]  # fmt: skip
CLUSTER_SIZE: list[dict[str, Any]] = [
    {"cluster_bytes": size, "extended_l2": extended, "virtual_bytes": 64 * MIB, "write_bytes": 4 * MIB,
     "block_bytes": 64 * KIB, "setting": {"cluster_size": size, "extended_l2": extended}}
    for size, extended in ((512, False), (64 * KIB, True), (2 * MIB, False))
]  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"layout": layout, "depth": depth, "virtual_bytes": 32 * MIB, "data_bytes": 16 * MIB, "block_bytes": 4 * KIB,
     "direct": direct, "setting": {"layout": layout, "depth": depth}}
    for layout, depth, direct in (
        ("raw", 1, True), ("qcow2", 1, True), ("raw+qcow2", 2, True), ("qcow2+qcow2", 2, True), ("chain", 4, False),
        ("zlib", 1, True), ("zstd", 1, True),
    )
]  # fmt: skip
MODES: list[dict[str, Any]] = [
    {"cache": cache, "io": io, "data_bytes": 16 * MIB, "block_bytes": 4 * KIB, "setting": {"cache": cache, "io": io}}
    for cache, io in (("none", "native"), ("none", "io_uring"), ("writeback", "threads"), ("writethrough", "threads"))
]
KINDS = {
    "dd": DD,
    "bonnie": BONNIE,
    "fio": FIO,
    "preallocation": PREALLOCATION,
    "cluster_size": CLUSTER_SIZE,
    "formats": FORMATS,
    "modes": MODES,
}


def args(pool: Path, kind: str, steps: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The arguments of a benchmark; nothing is to be left free."""
    return {"pool_path_b64": b64(bytes(pool)), "kind": kind, "steps": list(steps), "reserve_bytes": 0, **more}


def measured(pool: Path, kind: str, steps: Sequence[dict[str, Any]], **more: Any) -> tuple[RecordingIO, dict[str, Any]]:
    """A benchmark in this process: what it told, and its result."""
    io = RecordingIO()
    return io, benchmark.run(request("benchmark", **args(pool, kind, steps, **more)), io)


def samples(io: RecordingIO, metric: str) -> dict[str, Any]:
    """The values of one metric, by the setting."""
    return {json.dumps(told["setting"]): told["value"] for told in io.all("sample") if told["metric"] == metric}


def furnish(pool: Path) -> Path:
    """A pool with images, another job's files, and names that look like a benchmark's."""
    pool.mkdir()
    make_image(pool / "vm.qcow2")
    qemu_img("create", "-q", "-f", "qcow2", "-b", "vm.qcow2", "-F", "qcow2", pool / "overlay.qcow2")
    for name in ("dd.data", "new.qcow2", "source.raw", "base.qcow2", ".sa-other.orig", ".sa-other.bench.raw", "probe"):
        (pool / name).write_bytes(name.encode() * 1000)
    (pool / "images").mkdir()
    (pool / "images" / "sa.0.0").write_bytes(os.urandom(64 * KIB))
    return pool


def marks(pool: Path) -> dict[str, tuple[str, int, int, int]]:
    """Every file of a pool: its content's hash, inode, mode and time of last modification."""
    found = {}
    for path in sorted(pool.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(pool))] = (digest, status.st_ino, status.st_mode, status.st_mtime_ns)
    return found
