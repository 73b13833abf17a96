"""Whatever is done to the images of a chain, in whatever order, what a guest reads from each of them stays the same."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.agent.harness import ask, image_info, leftovers, link, qemu_img, rewrite_args, undo_args, write

pytestmark = pytest.mark.qemu

BLOCK, BLOCKS = 64 << 10, 24
OPTIONS = ("", "cluster_size=4k", "cluster_size=512", "compat=0.10", "extended_l2=on,cluster_size=128k")

block = st.integers(0, BLOCKS - 1)
count = st.integers(1, 6)
pattern = st.sampled_from([0, 0, 1, 0x61, 0xFF])


class Chains(RuleBasedStateMachine):
    """A tree of images, and the bytes that each of them holds for a guest."""

    @initialize(options=st.sampled_from(OPTIONS), raw=st.booleans())
    def begin(self, options: str, raw: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sa-chains-"))
        self.bases: dict[str, str | None] = {}
        self.forms: dict[str, str] = {}
        self.content: dict[str, bytearray] = {}
        self.undoable: dict[str, tuple[str, str | None]] = {}
        self.jobs = 0
        self._make("0", None, "raw" if raw else "qcow2", options)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, name: str, base: str | None, form: str, options: str) -> None:
        words = ["-o", options] if options and form == "qcow2" else []
        words += ["-b", base, "-F", self.forms[base]] if base is not None else [str(BLOCK * BLOCKS)]
        at = [name] if base is None else []
        qemu_img("create", "-q", "-f", form, *words[:-1], *at, *words[-1:], *([] if at else [name]), cwd=self.folder)
        self.bases[name], self.forms[name] = base, form
        self.content[name] = bytearray(self.content[base] if base is not None else bytes(BLOCK * BLOCKS))

    def _leaves(self) -> list[str]:
        return [name for name in sorted(self.bases) if name not in self.bases.values()]

    def _below(self, name: str) -> list[str]:
        below, step = [], self.bases[name]
        while step is not None:
            below.append(step)
            step = self.bases[step]
        return below

    def _run(self, verb: str, name: str, **own: Any) -> dict[str, Any]:
        self.jobs += 1
        path, below = self.folder / name, [self.folder / one for one in self._below(name)]
        chain = [link(one, form=self.forms[one.name]) for one in below]
        answer = ask(verb, rewrite_args(path, format=self.forms[name], chain=chain, **own), job=f"j{self.jobs}")
        note(f"{verb} {own} of {name} on {below}: {answer.get('code') or answer.get('method')}")
        assert answer.get("code") in {None, "undo_written_to"}, answer
        if answer.get("swapped") and answer.get("held_bytes"):
            self.undoable[name] = (f"j{self.jobs}", self.bases[name])
        return answer

    @rule(options=st.sampled_from(OPTIONS), data=st.data())
    @precondition(lambda self: len(self.bases) < 5)
    def overlay(self, options: str, data: st.DataObject) -> None:
        base = data.draw(st.sampled_from(sorted(self.bases)))
        self._make(str(len(self.bases)), base, "qcow2", options)

    @rule(first=block, length=count, byte=pattern, data=st.data())
    def guest_writes(self, first: int, length: int, byte: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._leaves()))
        length = min(length, BLOCKS - first)
        write(self.folder / name, byte, f"{first * 64}k", f"{length * 64}k", self.forms[name])
        self.content[name][first * BLOCK : (first + length) * BLOCK] = bytes([byte]) * (length * BLOCK)
        self.undoable.pop(name, None)

    @rule(method=st.sampled_from(["compress", "copy", "in_place"]), hours=st.sampled_from([0, 24]), data=st.data())
    def reclaim(self, method: str, hours: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bases)))
        if self.forms[name] == "raw" and method == "compress":
            method = "copy"
        if self._run("reclaim", name, method=method, undo_hours=hours).get("changed"):
            self.undoable.pop(name, None)  # digging changes the file's times: an undo would have to be forced

    @rule(method=st.sampled_from(["rebase", "convert"]), data=st.data())
    def flatten(self, method: str, data: st.DataObject) -> None:
        deep = [name for name in sorted(self.bases) if self.bases[name] is not None]
        if not deep:
            return
        name = data.draw(st.sampled_from(deep))
        below = self._below(name)
        keep = data.draw(st.sampled_from([None, *range(2, len(below) + 1)])) if method == "rebase" else None
        answer = self._run("flatten", name, method=method, **({} if keep is None else {"keep": keep}))
        assert answer["swapped"]
        self.bases[name] = None if keep is None else below[keep - 1]

    @rule(level=st.sampled_from(["none", "leaks"]), data=st.data())
    def check(self, level: str, data: st.DataObject) -> None:
        names = [name for name in sorted(self.bases) if self.forms[name] == "qcow2"]
        if names:
            self._run("check", data.draw(st.sampled_from(names)), repair=level)

    @rule(data=st.data())
    @precondition(lambda self: self.undoable)
    def undo(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.undoable)))
        job, base = self.undoable.pop(name)
        self.jobs += 1
        answer = ask("undo", undo_args(self.folder / name, job), job=f"j{self.jobs}")
        note(f"undo {job} of {name}: {answer.get('code')}")
        if answer.get("code") == "undo_written_to":  # a base that it would stand on again is another one by now
            assert "the original has the backing file" in answer["detail"], answer
            return
        assert "code" not in answer, answer
        self.bases[name] = base

    @invariant()
    def every_image_reads_as_it_should(self) -> None:
        if not hasattr(self, "folder"):
            return
        for name, wanted in self.content.items():
            raw = self.folder.parent / f"{self.folder.name}.raw"
            qemu_img("convert", "-f", self.forms[name], "-O", "raw", self.folder / name, raw)
            assert raw.read_bytes() == bytes(wanted), name
            raw.unlink()
            if self.forms[name] == "qcow2":
                assert b"No errors" in qemu_img("check", "-f", "qcow2", self.folder / name)
                assert image_info(self.folder / name).get("backing-filename") == self.bases[name]
        assert not [left for left in leftovers(self.folder) if left.endswith(".new")]


Chains.TestCase.settings = settings(
    max_examples=12, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestAnySequence = Chains.TestCase
TestAnySequence.pytestmark = [pytest.mark.qemu]  # type: ignore[attr-defined]
