"""A folder with an image to rewrite, every way to rewrite it, and what must be true of it after any fault."""

import os
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agent.harness import (
    NO_RESERVE,
    ask,
    leftovers,
    link,
    location,
    make_image,
    qemu_img,
    qemu_io,
    reads_as,
    recover_args,
    rewrite_args,
    same_content,
    undo_args,
    write,
)
from tests.agent.test_export import unpacked
from tests.harness.filesystems import new_folder

#: The formats that images are rewritten in and converted to here.
FORMATS = ("qcow2", "raw", "vmdk", "vdi")
_SIZE = "8M"


def build(folder: Path, options: str, form: str = "qcow2", *, based: bool = False) -> None:
    """A pool with an image and an overlay of it, and beside it copies of what a guest reads from both.

    Args:
        options: creation options of a qcow2 image.
        based: whether the image stands on a chain of two others, which it partly hides.
    """
    pool = new_folder(folder / "pool", parents=True)
    image, overlay, noise = pool / f"vm.{form}", pool / "overlay.qcow2", folder / "noise"
    if based:
        make_image(pool / "root.qcow2", _SIZE)
        write(pool / "root.qcow2", 0x52, "7M", "512k")
        qemu_img("create", "-q", "-f", "qcow2", "-b", "root.qcow2", "-F", "qcow2", pool / "middle.qcow2")
        write(pool / "middle.qcow2", 0x53, "7424k", "256k")
    if form == "qcow2":
        make_image(image, _SIZE, options, "middle.qcow2" if based else None)
    else:
        qemu_img("create", "-q", "-f", form, image, _SIZE)
        write(image, 0x61, "0", "2M", form)
        write(image, 0, "3M", "2M", form)
    noise.write_bytes(os.urandom(512 << 10))
    qemu_io(image, f"write -s {noise} 0 512k", form=form)
    qemu_img("create", "-q", "-f", "qcow2", "-b", image.name, "-F", form, overlay)
    write(overlay, 0x44, "1M", "512k")
    qemu_img("convert", "-f", form, "-O", "qcow2", image, folder / "before.qcow2")
    qemu_img("convert", "-f", "qcow2", "-O", "qcow2", overlay, folder / "overlay-before.qcow2")


@dataclass(frozen=True)
class Work:
    """Something that an agent is asked to do to the image.

    Args:
        name: in a few words.
        own: what is its own in the arguments; not used for work on an undo copy.
        first: what has to be done before: the name of another work, whose undo copy this one is about.
    """

    name: str
    verb: str
    own: dict[str, Any] = field(default_factory=dict)
    first: str = ""

    @property
    def replaces(self) -> bool:
        """Whether the new file gets another name, so that nothing may stand on the image."""
        return bool(self.own.get("target", {}).get("replaces"))

    @property
    def in_place(self) -> bool:
        """Whether it changes the very file."""
        return self.own.get("method") == "in_place"

    @property
    def swaps(self) -> bool:
        """Whether another file stands in the image's place afterwards."""
        beside = self.verb in {"create", "export"} or (self.verb == "convert" and not self.replaces)
        return not (self.verb == "discard_undo" or self.in_place or beside)

    @property
    def seconds(self) -> float:
        """About how long it takes: faults come within that, and a little later."""
        return 0.55 if self.swaps else 0.2


class Scene:
    """A fresh copy of what :func:`build` made; ``pool`` is where its images come to, if not beside the rest."""

    def __init__(self, folder: Path, template: Path, pool: Path | None = None) -> None:
        subprocess.run(["cp", "-r", "--sparse=never", template, folder], check=True)
        self.pool = folder / "pool"
        if pool is not None:
            self.pool = self.pool.rename(pool)
        (self.image,) = self.pool.glob("vm.*")
        self.form = self.image.suffix[1:]
        self.bases = [path for name in ("middle", "root") if (path := self.pool / f"{name}.qcow2").exists()]
        self.overlay = self.pool / "overlay.qcow2"
        self._before = folder / "before.qcow2"
        self._overlay_before = folder / "overlay-before.qcow2"
        self.original = self.image.stat()
        #: The name that the image has after a conversion that takes its place.
        self.successor = self.image.with_suffix(".raw" if self.form != "raw" else ".qcow2")
        self._work: Work | None = None
        #: The id of the job that rewrites it, by which its files are named.
        self.job = "j1"

    def works(self) -> list[Work]:
        """Every way to rewrite the image, and to undo that."""
        works = [Work("reclaim by copy", "reclaim", {"method": "copy"})]
        if self.form == "qcow2":
            works += [
                Work("reclaim by compress", "reclaim", {"method": "compress"}),
                Work("repair of leaks", "check", {"repair": "leaks"}),
                Work("repair of all", "check", {"repair": "all"}),
                Work("growth", "grow", {"size": 12 << 20}),
                Work("another base", "flatten", {"method": "rebase"}),
            ]
        if self.form in {"qcow2", "raw"}:
            works.append(Work("reclaim in place", "reclaim", {"method": "in_place"}))
        if self.bases:
            works += [
                Work("flatten by rebase", "flatten", {"method": "rebase"}),
                Work("flatten down to the root", "flatten", {"method": "rebase", "keep": len(self.bases)}),
                Work("flatten by convert", "flatten", {"method": "convert"}),
            ]
        works += [self._conversion(f"convert to {form}", self.pool / f"converted.{form}") for form in FORMATS]
        works += [self._overlay(), self._export("ova", "converted.ova")]
        if not self.bases:
            works.append(self._export("gzip", "converted.gz.001", part_bytes=1 << 20))
        replacement = self._conversion("convert in its place", self.successor, replaces=True)
        return [
            *works,
            replacement,
            Work("undo of a reclaim", "undo", first=works[0].name),
            Work("undo of a replacement", "undo", first=replacement.name),
            Work("discard of an undo copy", "discard_undo", first=works[0].name),
        ]

    def work(self, name: str) -> Work:
        """The one of that name."""
        return next(one for one in self.works() if one.name == name)

    @staticmethod
    def _conversion(name: str, target: Path, **more: bool) -> Work:
        return Work(name, "convert", {"target": {**location(target), "format": target.suffix[1:], **more}})

    def _overlay(self) -> Work:
        """A new overlay on the image, which reads what that reads."""
        target = location(self.pool / "converted.qcow2") | {"format": "qcow2"}
        return Work("create an overlay", "create", {"target": target, "virtual_size": 8 << 20, "reserve": NO_RESERVE})

    def _export(self, packing: str, name: str, **more: int) -> Work:
        return Work(
            f"export by {packing}", "export", {"target": location(self.pool / name), "packing": packing, **more}
        )

    def begin(self, work: Work) -> Callable[..., tuple[str, dict[str, Any], str]]:
        """Does what has to be done before a work.

        Returns:
            A function that makes the request for it: the verb, the arguments and the job's id. It takes arguments that
            all rewrites share, such as ``bandwidth_bytes_sec``; work on an undo copy has no use for them.
        """
        self._work = work
        first = self.work(work.first) if work.first else work
        if first.replaces:
            self.overlay.unlink()
        if first is not work:
            answer = ask(first.verb, self._args(first))
            assert answer.get("swapped"), answer

        def request(**more: Any) -> tuple[str, dict[str, Any], str]:
            if work.first:
                return work.verb, undo_args(self.there), "u1"
            if work.verb == "create":
                more.pop("undo_hours", None)  # there is nothing to undo
            return work.verb, self._args(work) | more, "j1"

        return request

    def _args(self, work: Work) -> dict[str, Any]:
        if work.verb == "create":
            base, *chain = (link(path, self.pool, path.suffix[1:]) for path in (self.image, *self.bases))
            return work.own | {"base": base, "chain": chain}
        args = rewrite_args(self.image, *self.bases, format=self.form)
        if work.name == "another base":
            if not self.other.exists():
                make_image(self.other, "8M")
            args["onto"] = [link(self.other, self.pool)]
        return args | work.own

    @property
    def other(self) -> Path:
        """A base that the image did not stand on."""
        return self.pool / "other.qcow2"

    @property
    def there(self) -> Path:
        """The image, under the name that it has now."""
        return self.image if self.image.exists() else self.successor

    @property
    def swapped(self) -> bool:
        """Whether another file stands in the image's place."""
        return self.there.stat().st_ino != self.original.st_ino

    @property
    def recovery_args(self) -> dict[str, Any]:
        """As a dashboard asks that knows what was done before the fault."""
        args = recover_args(self.pool)
        if self._work is not None and self._work.first:
            copy = {"job": "j1", **location(self.there, self.pool)}
            args |= {"jobs_recorded": ["j1"], "undo_copies": [copy]}
        return args

    def recover(self) -> list[str]:
        """How ``recover`` settles what is left in the pool."""
        return [row["outcome"] for row in ask("recover", self.recovery_args)["recovered"]]

    def verify(self, *, dug: bool = False) -> None:
        """The original or the result, whole, and nothing else but a valid undo copy.

        Args:
            dug: holes may have been dug; who is killed at that has no time to set the file's time back.
        """
        image = self.there
        assert self.reads(image)
        if image.suffix != ".raw":
            assert b"No errors" in qemu_img("check", "-f", image.suffix[1:], image)
        if self.overlay.exists():
            assert same_content(self.overlay, self._overlay_before)
        for converted in self.pool.glob("converted.*"):
            assert self.reads(converted)
            assert converted.stat().st_nlink == 1
        left = leftovers(self.pool)
        if self.swapped:
            undo_copy = self.pool / f".sa-{self.job}.orig"
            assert left in ({f".sa-{self.job}.journal", undo_copy.name}, set()), left
            if left:
                copy = undo_copy.stat()
                assert (copy.st_ino, copy.st_mtime_ns) == (self.original.st_ino, self.original.st_mtime_ns)
                assert self.reads(undo_copy, self.form)
        else:
            assert left == set(), left
            dug = dug or (self._work is not None and self._work.in_place)
            assert dug or image.stat().st_mtime_ns == self.original.st_mtime_ns
        assert image.stat().st_nlink == 1
        known = {image, self.overlay, self.other, *self.bases, *self.pool.glob("converted.*"), *self.pool.glob(".sa-*")}
        assert set(self.pool.iterdir()) <= known

    def reads(self, path: Path, form: str = "") -> bool:
        """Whether a guest reads from a file what it read from the image, perhaps once it is unpacked."""
        form = form or path.suffix[1:]
        if form.isdigit():
            first = path.with_suffix(".001")
            return first.exists() and unpacked(first, "gzip") == self.image.read_bytes()
        if form == "ova":
            with tarfile.open(path) as tar:
                path, form = path.parent.parent / "exported", "vmdk"
                path.write_bytes(tar.extractfile(tar.getmembers()[-1]).read())  # type: ignore[union-attr]
        return reads_as(path, self._before, form)
