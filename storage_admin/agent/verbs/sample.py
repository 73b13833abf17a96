"""The verbs ``sample`` and ``exclusive``: many images analyzed one after the other, and what each volume of the host's
thin pools has alone, while nobody else wants the disk.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from storage_admin.agent.host import thin
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure.prediction import unknown
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request
from storage_admin.agent.verbs import analyze

#: ``ioprio_set(2)`` by machine, its class for idle, and how far the class is shifted (linux/ioprio.h).
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IDLE = 3 << 13


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Analyze images one by one, at idle priority.

    Args:
        request: ``images``: the arguments of ``analyze`` for each, and its ``id``; ``seconds`` for each at most.
        io: the controller; it gets an ``estimate`` event (``id``, ``data``) per image.

    Returns:
        ``analyzed`` and ``failed``: how many images were told of.

    Raises:
        RefusedError: ``invalid``.
        StoppedError: the controller stopped the work; what was told stands.
    """
    args = Arguments(request.args, frozenset({"images", "seconds"}))
    images, seconds = args.take("images", list), args.get("seconds", float, 1.0)
    be_idle(io)
    failed = 0
    for done, fields in enumerate(images):
        if not isinstance(fields, dict) or not isinstance(fields.get("id"), int):
            raise RefusedError(INVALID, "each image is an object with an id")
        one = _OneOfMany(io, done, len(images))
        one.tell()
        own = {key: value for key, value in fields.items() if key != "id"}
        try:
            estimate = analyze.run(
                Request("analyze", request.job, request.generation, {**own, "seconds": seconds}), one
            )
        except (RefusedError, HostError) as error:
            # One image that is gone, or damaged, says nothing about the others.
            failed += 1
            estimate = {"mode": "sample", **unknown(0, error.detail), "allocated_size": None}
        io.emit("estimate", id=fields["id"], data=estimate)
    return {"analyzed": len(images) - failed, "failed": failed}


class _OneOfMany:
    """The controller, while one of many images is looked at: how far that one is, in bytes, is none of its business."""

    def __init__(self, io: AgentIO, done: int, total: int) -> None:
        self._io, self._done, self._total = io, done, total
        self.emit, self.emit_raw, self.log, self.command = io.emit, io.emit_raw, io.log, io.command
        self.check, self.wait_for_go, self.take_data = io.check, io.wait_for_go, io.take_data

    def tell(self, what: str = "") -> None:
        """Say which one it is."""
        said = f"image {self._done + 1:,} of {self._total:,}" + (f", {what}" if what else "")
        self._io.progress("sampling", self._done, self._total, said)

    def progress(self, stage: str, done: int, total: int | None, message: str = "") -> None:  # noqa: ARG002
        """Say what is done with it."""
        self.tell(stage)


def exclusive(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look at the thin pools of this host one by one, at idle priority.

    Args:
        request: without arguments.
        io: the controller; it gets an ``exclusive`` event for each pool: ``group``, ``pool``, ``why`` it could not be
            measured (else empty), ``volumes``: by their names what deleting each would free, in bytes.

    Returns:
        ``measured``: how many pools were; ``skipped``: how many could not be.

    Raises:
        RefusedError: ``invalid``, ``tool_missing``.
        HostError: LVM does not answer.
        StoppedError: the controller stopped the work; what was told stands.
    """
    Arguments(request.args, frozenset())
    be_idle(io)
    thin.release_left(io)
    measured = skipped = 0
    for told in thin.measure(io):
        measured, skipped = measured + (not told["why"]), skipped + bool(told["why"])
        io.progress("measuring", measured + skipped, None, f"{told['group']}/{told['pool']}")
        if told["why"]:
            io.log(f"{told['group']}/{told['pool']} was not measured: {told['why']}", "warning")
        io.emit("exclusive", **told)
    return {"measured": measured, "skipped": skipped}


def be_idle(io: AgentIO) -> None:
    """Give this process's turns at processor and disk to everybody else who wants them."""
    os.nice(19)
    number = _IOPRIO_SET.get(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(number, 1, 0, _IDLE) != 0:
        io.log("idle I/O priority could not be set; the job continues with normal priority", "warning")
