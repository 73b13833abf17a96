"""Encrypted images are created and their passphrases changed; no passphrase is seen by anybody but qemu."""

import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.agent.harness import (
    Agent,
    ask,
    heard,
    image_info,
    leftovers,
    qemu_img,
    recovered,
    rewrite_args,
    undo_args,
)
from tests.agent.test_create import create_args
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu
MIB = 1 << 20
FIRST, SECOND = "Ümlaut, and a comma=1", "second passphrase"
ALONE, BOTH = {"passphrase": FIRST}, {"passphrase": FIRST, "new_passphrase": SECOND}
FORMATS = pytest.mark.parametrize("form", ["qcow2", "luks"])


def create(path: Path, form: str, passphrase: str = FIRST, **more: Any) -> dict[str, Any]:
    return ask("create", encrypted_args(path, form) | {"secrets": {"passphrase": passphrase}} | more)


def encrypted_args(path: Path, form: str = "qcow2") -> dict[str, Any]:
    name = path.with_suffix(".raw") if form == "luks" else path
    return create_args(name, name.suffix[1:]) | {"secrets": ALONE, "iter_time": 20}


@functools.cache
def _made(form: str) -> bytes:
    """What was made once: for that qemu-img measures the processor for seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result = create(Path(folder) / "vm.qcow2", form)
        assert result.get("format") == form, result
        return next(Path(folder).iterdir()).read_bytes()


def made(pool: Path, form: str) -> Path:
    return new_file(pool / ("vm.raw" if form == "luks" else "vm.qcow2"), _made(form))


def args_for(path: Path, form: str, **more: Any) -> dict[str, Any]:
    return rewrite_args(path, format=form, **{"undo_hours": 24, "iter_time": 20, **more})


def by_hand(path: Path, form: str, passphrase: str, program: str, *words: str, out: tuple[Path, ...] = ()) -> int:
    """The exit code of qemu's own program, with the passphrase in a file."""
    key = new_file(path.parent.parent / "key", passphrase)
    driver = "driver=luks,key-secret=s" if form == "luks" else "driver=qcow2,encrypt.key-secret=s"
    command = [*program.split(), "--object", f"secret,id=s,file={key}", *words, "--image-opts"]
    done = subprocess.run([*command, f"{driver},file.filename={path}", *out], capture_output=True)
    key.unlink()
    return done.returncode


def opens(path: Path, form: str, passphrase: str) -> bool:
    return by_hand(path, form, passphrase, "qemu-io", "-c", "read 0 4k") == 0


def fill(path: Path, form: str, passphrase: str) -> None:
    assert by_hand(path, form, passphrase, "qemu-io", "-c", "write -P 7 1M 3M") == 0


def content(path: Path, form: str, passphrase: str) -> bytes:
    out = path.parent.parent / "content"
    assert by_hand(path, form, passphrase, "qemu-img convert", "-O", "raw", out=(out,)) == 0
    return out.read_bytes()


class Watcher:
    """Looks at what every process below this one shows of itself, as long as something goes on."""

    def __init__(self, *secrets: str) -> None:
        self._secrets, self.looks = [one.encode() for one in secrets], 0
        self.seen: list[bytes] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                for name in ("cmdline", "environ"):
                    try:
                        shown = Path(f"/proc/{process.pid}/{name}").read_bytes()
                    except OSError:
                        continue
                    self.looks += b"qemu-img" in shown
                    self.seen += [shown for secret in self._secrets if secret in shown]


@FORMATS
def test_an_encrypted_image_opens_with_its_passphrase_alone(pool: Path, form: str) -> None:
    with Watcher(FIRST) as watcher:
        result, events = heard("create", encrypted_args(pool / "vm.qcow2", form))
    (name,) = pool.iterdir()
    assert name.name == ("vm.raw" if form == "luks" else "vm.qcow2")
    assert (result.get("format"), result.get("virtual_size")) == (form, 8 * MIB), result
    assert image_info(name, form)["encrypted"] is True
    assert (opens(name, form, FIRST), opens(name, form, SECOND)) == (True, False)
    assert (watcher.seen, watcher.looks > 0, FIRST in str(events)) == ([], True, False)
    assert leftovers(pool) == set()


@pytest.mark.parametrize("passphrase", ["", "a\nb", "a\0b", "x" * 513, "\ud800", 5])
def test_a_passphrase_that_none_can_be_is_refused(pool: Path, passphrase: Any) -> None:
    assert create(pool / "vm.qcow2", "qcow2", passphrase)["code"] == "invalid"
    assert list(pool.iterdir()) == []


def test_other_formats_and_options_are_not_encrypted(pool: Path) -> None:
    assert ask("create", create_args(pool / "vm.vmdk", "vmdk") | {"secrets": ALONE})["code"] == "invalid"
    full = create_args(pool / "vm.raw", "raw", options={"preallocation": "full"})
    assert ask("create", full | {"secrets": ALONE})["code"] == "invalid"
    two = {"secrets": ALONE | {"other": SECOND}}
    assert ask("create", create_args(pool / "vm.qcow2", "qcow2") | two)["code"] == "invalid"


@FORMATS
def test_a_passphrase_is_added_and_the_old_ones_slot_emptied(pool: Path, form: str) -> None:
    path = made(pool, form)
    fill(path, form, FIRST)
    before = content(path, form, FIRST)
    with Watcher(FIRST, SECOND) as watcher:
        added, events = heard("keys", args_for(path, form, secrets=BOTH, undo_hours=0))
    assert (added.get("swapped"), added.get("key_slots")) == (True, [0, 1]), added
    assert (watcher.seen, FIRST in str(events), SECOND in str(events)) == ([], False, False)
    assert (opens(path, form, FIRST), opens(path, form, SECOND)) == (True, True)
    emptied = ask("keys", args_for(path, form, secrets={"passphrase": SECOND}, slot=0), job="j2")
    assert emptied.get("key_slots") == [1], emptied
    assert (opens(path, form, FIRST), opens(path, form, SECOND)) == (False, True)
    assert content(path, form, SECOND) == before
    assert "code" not in ask("undo", undo_args(path, "j2"), job="u2")
    assert (content(path, form, FIRST) == before, leftovers(pool)) == (True, set())


@FORMATS
def test_the_last_key_and_the_one_that_is_needed_are_never_erased(pool: Path, form: str) -> None:
    path = made(pool, form)
    before = path.read_bytes()
    assert ask("keys", args_for(path, form, secrets=ALONE, slot=0))["code"] == "stale_plan"
    assert ask("keys", args_for(path, form, secrets=ALONE, slot=3))["code"] == "stale_plan"
    assert ask("keys", args_for(path, form, secrets={"passphrase": SECOND}, slot=0))["code"] == "wrong_passphrase"
    assert path.read_bytes() == before
    assert "code" not in ask("keys", args_for(path, form, secrets=BOTH, undo_hours=0), job="j2")
    before = path.read_bytes()
    # The passphrase that opens only the slot which is to go; one that a guest needs; one that opens already.
    assert ask("keys", args_for(path, form, secrets=ALONE, slot=0), job="j3")["code"] == "wrong_passphrase"
    needed = {"secrets": {"passphrase": SECOND}, "slot": 0, "must_open": [FIRST]}
    assert ask("keys", args_for(path, form, **needed), job="j4")["code"] == "wrong_passphrase"
    assert ask("keys", args_for(path, form, secrets=BOTH), job="j5")["code"] == "stale_plan"
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())


def test_what_has_no_key_slots_is_refused(pool: Path) -> None:
    path = pool / "plain.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", path, "8M")
    assert ask("keys", args_for(path, "qcow2", secrets=BOTH))["code"] == "unsupported_subformat"
    for wrong in ({}, {"new_passphrase": SECOND}, {"passphrase": 5, "new_passphrase": SECOND}, BOTH | {"x": "y"}):
        assert ask("keys", args_for(path, "qcow2", secrets=wrong))["code"] == "invalid", wrong


def test_a_kill_while_keys_change_leaves_an_image_that_opens(pool: Path) -> None:
    path = made(pool, "qcow2")
    for number, wait in enumerate((0.2, 0.35, 0.5, 0.7)):
        with Agent() as agent:
            agent.request("keys", args_for(path, "qcow2", secrets=BOTH, undo_hours=0), f"k{number}")
            time.sleep(wait)
            agent.process.kill()
        assert opens(path, "qcow2", FIRST)
        recovered(pool)
        assert opens(path, "qcow2", FIRST)
        assert leftovers(pool) == set()


def test_hostile_names_are_no_arguments(pool: Path) -> None:
    path = pool / "a,b=c,file.driver=nbd.qcow2"
    result = ask("create", encrypted_args(path))
    assert result.get("format") == "qcow2", result
    assert os.listdir(pool) == [path.name]  # noqa: PTH208


@pytest.mark.parametrize("how", ["namespaces", "nothing"])
def test_hosts_that_confine_otherwise_encrypt_as_well(pool: Path, how: str) -> None:
    agent = [sys.executable, "-m", "tests.agent.other_confinement", how]
    path, before = pool / "vm.qcow2", set(os.listdir("/run"))  # noqa: PTH208
    assert ask("create", encrypted_args(path), command=agent).get("format") == "qcow2"
    assert ask("keys", args_for(path, "qcow2", secrets=BOTH), job="j2", command=agent).get("key_slots") == [0, 1]
    assert opens(path, "qcow2", SECOND)
    assert not {name for name in os.listdir("/run") if name.startswith("storage-admin-key-")} - before  # noqa: PTH208
