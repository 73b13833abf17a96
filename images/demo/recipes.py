"""What the demo's images are: real ones, made by qemu-img and qemu-io, small, and the same on every machine."""

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 1024**2

#: Files that images are filled from: text that compresses about as well as a guest's files do, and data that does not.
TEXT, NOISE = "text.content", "noise.content"
_WORDS = 3000
#: Seconds that one call of a tool may take.
_TOOL_LIMIT = 120


class DemoError(Exception):
    """The demo cannot be made or taken away; the argument is a sentence that says why."""


@dataclass(frozen=True)
class Workshop:
    """A folder in which images are made before they are moved to where they belong.

    Args:
        folder: it holds the content files, and a link to every base that is made already.
    """

    folder: Path

    def prepare(self) -> None:
        """Writes the content files."""
        chance = random.Random(20140315)  # noqa: S311 (the same bytes each time are wanted)
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = ["".join(chance.choices(letters, k=chance.randint(2, 11))) for _ in range(_WORDS)]
        frequent = [1 / (rank + 1) for rank in range(_WORDS)]
        text = " ".join(chance.choices(words, weights=frequent, k=4 * MIB // 6)).encode()
        (self.folder / TEXT).write_bytes(text[: 2 * MIB])
        (self.folder / NOISE).write_bytes(chance.randbytes(2 * MIB))

    def run(self, *command: str) -> None:
        """Runs a tool in the folder.

        Raises:
            DemoError: it is not installed, or it failed; with its own words.
        """
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TOOL_LIMIT,
                check=False,
            )
        except FileNotFoundError:
            raise DemoError(f"{command[0]} is not installed: install the package qemu-utils, then try again.") from None
        except subprocess.TimeoutExpired:
            raise DemoError(f"{command[0]} did not end within {_TOOL_LIMIT} s.") from None
        if done.returncode or b"failed:" in done.stdout:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            raise DemoError(f"{' '.join(command[:3])} failed: {said[-300:]}")

    def create(self, name: str, form: str, size: str, *options: str, base: str = "") -> None:
        """An empty image of a virtual size such as ``4G``, over ``base`` if one is named."""
        backing = ["-b", base, "-F", "qcow2"] if base else []
        given = ["-o", ",".join(options)] if options else []
        self.run("qemu-img", "create", "-q", "-f", form, *given, *backing, name, size)

    def write(self, name: str, form: str, *parts: str) -> None:
        """Writes parts ``what offset length`` (what: text, noise or zeros) into an image, as a guest would."""
        commands: list[str] = []
        for part in parts:
            what, offset, length = part.split()
            source = {"text": f"-s {TEXT}", "noise": f"-s {NOISE}", "zeros": "-P 0"}[what]
            commands += ["-c", f"write -q {source} {offset} {length}"]
        self.run("qemu-io", "-f", form, *commands, name)

    def convert(self, source: str, name: str, form: str, *options: str) -> None:
        """Converts a raw image; ``-c`` may stand among the options."""
        self.run("qemu-img", "convert", "-q", "-f", "raw", "-O", form, *options, source, name)


@dataclass(frozen=True)
class Recipe:
    """Images that are made together.

    Args:
        names: the files that it makes.
        make: makes them, and perhaps others that are not kept, in a workshop.
        base: the file of another recipe that must be there first; empty for none.
    """

    names: tuple[str, ...]
    make: Callable[[Workshop], None]
    base: str = ""


def _image(
    name: str, form: str, size: str, *parts: str, options: tuple[str, ...] = (), base: str = "", beside: str = ""
) -> Recipe:
    """One image, with what a guest has written into it.

    Args:
        parts: as :meth:`Workshop.write` takes them.
        options: of qemu-img.
        base: what it stands on, which another recipe makes.
        beside: another file that qemu-img makes with it.
    """

    def make(at: Workshop) -> None:
        at.create(name, form, size, *options, base=base)
        at.write(name, form, *parts)

    return Recipe((name, beside) if beside else (name,), make, base)


def _overlay(name: str, base: str, *parts: str) -> Recipe:
    return _image(name, "qcow2", "10G", *parts, base=base)


def _appliance_export(at: Workshop) -> None:
    at.create("appliance.tmp", "raw", "2G")
    at.write("appliance.tmp", "raw", "text 0 8M", "noise 512M 1M")
    at.convert("appliance.tmp", "appliance-export.vmdk", "vmdk", "-o", "subformat=streamOptimized")


def _build_server(at: Workshop) -> None:
    at.create("build-server.qcow2", "qcow2", "12G")
    for number, snapshot in enumerate(["before-upgrade", "after-upgrade", "nightly"]):
        at.write("build-server.qcow2", "qcow2", f"text {number * 64}M 4M", "noise 0 1M")
        at.run("qemu-img", "snapshot", "-c", snapshot, "build-server.qcow2")


def _payroll(at: Workshop) -> None:
    secret = ["--object", "secret,id=demo,data=storage-admin-demo"]
    options = "encrypt.format=luks,encrypt.key-secret=demo,encrypt.iter-time=10"
    # qemu-img times its key derivation first, and gives up where that was too quick for the machine's clock.
    for attempts_left in range(9, -1, -1):
        try:
            at.run("qemu-img", "create", "-q", *secret, "-f", "qcow2", "-o", options, "payroll-encrypted.qcow2", "2G")
            break
        except DemoError as error:
            if not attempts_left or "CPU usage" not in str(error):
                raise
    opened = "driver=qcow2,encrypt.key-secret=demo,file.filename=payroll-encrypted.qcow2"
    at.run("qemu-io", *secret, "--image-opts", "-c", f"write -q -s {TEXT} 0 3M", opened)


def _archive(at: Workshop) -> None:
    at.create("archive.tmp", "raw", "5G")
    at.write("archive.tmp", "raw", "text 0 24M", "noise 2G 2M")
    at.convert("archive.tmp", "archive-zstd.qcow2", "qcow2", "-c", "-o", "compression_type=zstd")


def _damaged(at: Workshop) -> None:
    at.create("damaged.qcow2", "qcow2", "1G")
    with (at.folder / "damaged.qcow2").open("r+b") as image:
        image.seek(20)
        image.write((99).to_bytes(4, "big"))  # cluster_bits: the specification allows 9 to 21


ODD_NAME = "Müller & Söhne, Büro <neu>.qcow2"


def _lost_base(at: Workshop) -> None:
    at.create("template-deleted.qcow2", "qcow2", "6G")
    at.create("shop.qcow2", "qcow2", "6G", base="template-deleted.qcow2")
    at.write("shop.qcow2", "qcow2", "text 0 7M")


def _cycle(at: Workshop) -> None:
    at.create("cycle-a.qcow2", "qcow2", "2G")
    at.create("cycle-b.qcow2", "qcow2", "2G", base="cycle-a.qcow2")
    at.run("qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "cycle-b.qcow2", "-F", "qcow2", "cycle-a.qcow2")


RECIPES = (
    _image("debian-12-base.qcow2", "qcow2", "10G", "text 0 24M", "noise 64M 4M", "zeros 128M 6M"),
    _overlay("web-01.qcow2", "debian-12-base.qcow2", "text 256M 6M", "zeros 512M 4M"),
    _overlay("web-02.qcow2", "debian-12-base.qcow2", "text 256M 3M", "noise 300M 1M"),
    _overlay("web-02-staging.qcow2", "web-02.qcow2", "text 1G 4M"),
    _overlay("web-02-hotfix.qcow2", "web-02-staging.qcow2", "text 1G 1M", "zeros 2G 2M"),
    _image("mail.qcow2", "qcow2", "20G", "text 0 20M", "zeros 1G 48M"),
    _image("database.raw", "raw", "4G", "noise 0 4M", "text 1G 8M", "zeros 2G 12M"),
    _image("scratch.raw", "raw", "24M", "text 0 4M", options=("preallocation=full",)),
    _image("appliance.vmdk", "vmdk", "8G", "text 0 6M", "noise 512M 2M", options=("subformat=monolithicSparse",)),
    Recipe(("appliance-export.vmdk",), _appliance_export),
    _image(
        "point-of-sale.vmdk", "vmdk", "16M", "text 0 3M", options=("subformat=monolithicFlat",),
        beside="point-of-sale-flat.vmdk",
    ),
    _image("desktop.vdi", "vdi", "6G", "text 0 9M", "zeros 256M 4M"),
    _image("legacy-server.vhd", "vpc", "3G", "text 0 6M"),
    Recipe(("build-server.qcow2",), _build_server),
    Recipe(("payroll-encrypted.qcow2",), _payroll),
    Recipe(("archive-zstd.qcow2",), _archive),
    _image(
        "media-2M-clusters.qcow2", "qcow2", "40G", "noise 0 8M", "text 1G 64k", "text 2G 64k", "zeros 3G 12M",
        options=("cluster_size=2M",),
    ),
    _image(
        "ci-runner.qcow2", "qcow2", "8G", "text 0 6M", "noise 1G 4k", "zeros 2G 6M",
        options=("extended_l2=on", "cluster_size=128k"),
    ),
    Recipe(("damaged.qcow2",), _damaged),
    _image("uploaded-by-customer.img", "qcow2", "4G", "text 0 5M", "zeros 128M 8M"),
    _image(ODD_NAME, "qcow2", "3G", "text 0 2M"),
    Recipe(("shop.qcow2",), _lost_base),
    Recipe(("cycle-a.qcow2", "cycle-b.qcow2"), _cycle),
    _image("vm-104-disk-0.qcow2", "qcow2", "32G", "text 0 12M", "zeros 4G 16M"),
)  # fmt: skip
