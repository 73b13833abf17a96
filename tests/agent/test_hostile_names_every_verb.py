# ruff: noqa: PTH102, PTH103, PTH113, PTH116, PTH118, PTH119, PTH123, PTH208
# Paths are bytes here: names need not be UTF-8.
"""Names that strangers chose: each verb works on the file that has the name, or refuses, and touches no other."""

import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64, unb64
from tests.agent.every_verb import APPLIANCE, CLEAN, READS, REWRITES, Answer, Crew, pool_request, request
from tests.agent.harness import ask, image_info, qemu_img, reclaim_args, same_content, undo_args
from tests.agent.hostile import CLUSTER, DATA, qcow2
from tests.agent.hostile_names import KNOWN, RESERVED, is_reserved, names
from tests.agent.stranger import fingerprints
from tests.agent.tracing import TOOLS, Trace
from tests.chance import seed
from tests.harness.filesystems import new_file, new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

NAMES = 1000
#: Of these, how many go through each way to ask a rewriting verb.
SHARE = 10
#: Ways that have nothing to do on such an image: it has no bitmap, no key slot, names its base; no device, appliance.
NOTHING_TO_DO = APPLIANCE | {
    "bitmaps",
    "add a passphrase",
    "empty a key slot",
    "shrink",
    "relink",
    "to_device",
    "file_to_volume",
}


def test_a_scan_tells_every_name_as_it_is(tmp_path: Path) -> None:
    chance = random.Random(seed())
    pool = bytes(tmp_path / "pool")
    os.mkdir(pool)
    made = names(chance, NAMES)
    for number, name in enumerate(made):
        # A folder in ten is as hostile as the file in it.
        place = os.path.join(pool, name) if number % 10 == 0 and not is_reserved(name) else pool
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, name), "wb") as file:
            file.write(_numbered(number))
    before = _tree(pool)
    inodes = {path: os.stat(path).st_ino for path in before}
    longer = [os.path.join(pool, b"z" * 300), os.path.join(pool, b"x" * 255, b"y" * 256), pool + b"/../pool/x"]
    paths = [path for path in before if os.path.isfile(path)]
    args = pool_request("scan", Path(os.fsdecode(pool)))
    # Guests name half of them, and what would be none by its name or place.
    named = [
        path for number, path in enumerate(paths) if number % 2 or path.endswith((b".iso", b".vmdk", b"lost+found"))
    ]
    longer += [path.replace(pool + b"/", pool + b"//./") for path in named]
    args |= {"named_b64": [b64(path) for path in [*named, *longer, b"relative", b"", b"/"]]}
    args |= {"probe_b64": [b64(path) for path in [*paths, *longer, b"nul\0", b""]]}
    with Crew() as crew:
        answer = crew.ask("scan", args)
        assert answer.code == "", answer.detail
        recovered = crew.ask("recover", pool_request("recover", Path(os.fsdecode(pool))))
        assert recovered.code == "", recovered.detail
    events = [event for event in answer.events if event["event"] == "image"]
    told = {unb64(event["path_b64"]): event for event in events}
    assert len(told) == len(events)
    # A job's own file is told where a guest has it as its disk; that no verb works on it is shown below.
    assert set(told) == {path for path in paths if not is_reserved(os.path.basename(path)) or path in named}
    for path, event in told.items():
        assert (event["inode"], event["format"]) == (inodes[path], "qcow2")
    # Files that only an agent makes are its own: a temporary one without a journal is removed, and nothing else.
    gone = set(before) - set(_tree(pool))
    assert {os.path.basename(path) for path in gone} <= {name for name in RESERVED if name.endswith(b".new")}
    assert all(fingerprint == before[path] for path, fingerprint in _tree(pool).items() if os.path.isfile(path))


def test_a_folder_with_any_name_is_found_and_no_other(tmp_path: Path) -> None:
    here = bytes(tmp_path)
    folders = [os.path.join(here, name) for name in KNOWN]
    for folder in folders:
        os.mkdir(folder)
    with Crew() as crew:
        for folder in folders:
            told = crew.ask("folder", {"path_b64": b64(folder)}).result
            assert told is not None
            assert (told["kind"], told["path_b64"], told["detail"]) == ("folder", b64(folder), "")
        for name in (b"a\0b", b"x" * 300, b"y/" * 3000, b"not there"):
            answer = crew.ask("folder", {"path_b64": b64(os.path.join(here, name))})
            assert answer.code == "", answer.detail
            assert answer.result["kind"] in {"missing", "unknown"}


def test_each_verb_works_on_the_file_with_the_name_and_on_no_other(tmp_path: Path) -> None:
    chance, began = random.Random(seed()), time.monotonic()
    pool = new_folder(tmp_path / "pool")
    qemu_img("create", "-q", "-f", "qcow2", tmp_path / "expected.qcow2", "1M")
    made, asked, outcomes = names(chance, NAMES), 0, dict[str, int]()
    with Crew(tmp_path / "trace") as crew:
        for how in (one for one in (*READS, *REWRITES) if one not in NOTHING_TO_DO):
            for name in [
                *chance.sample(KNOWN, SHARE // 2),
                *chance.sample(made, SHARE // 2 - 1),
                chance.choice(RESERVED),
            ]:
                folder = pool / str(asked)
                answer = _one(crew, how, folder, name, chance.choice(made))
                asked, outcome = asked + 1, answer.code or "done"
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(f"{asked} requests in {time.monotonic() - began:.0f} s: {outcomes}")
    trace = Trace.read(tmp_path / "trace")
    assert trace.outside(pool) == set()
    assert trace.connected == ()
    assert trace.started <= TOOLS
    assert outcomes["done"] > asked * 0.7


def _one(crew: Crew, how: str, folder: Path, name: bytes, base: bytes) -> Answer:
    """Ask for an overlay with that name on a base with another one, both in a folder with a neighbour."""
    folder.mkdir()
    here = bytes(folder)
    base = b"base " + base[:200] if base == name or is_reserved(base) else base
    path, below, neighbour = (os.path.join(here, one) for one in (name, base, b"neighbour"))
    for place, content in ((below, _numbered(1)), (neighbour, _numbered(2)), (path, _overlay(base))):
        with open(place, "wb") as file:
            file.write(content)
    qemu_img("convert", "-f", "qcow2", "-O", "qcow2", path, folder / "expected")
    before = fingerprints(folder)
    verb, args = request(how, path, folder, "qcow2")
    beside = verb in {"convert", "create", "export"}
    form = {"convert": "raw", "export": "ova"}.get(verb, "qcow2")
    target = b"new " + name[:244] + b"." + form.encode()
    if beside:
        args["target"]["path_b64"] = b64(os.path.join(here, target))
    answer = crew.ask(verb, args)
    assert answer.code in CLEAN | {""}, answer.detail
    after = fingerprints(folder)
    if is_reserved(name) and how not in READS:
        assert answer.code == protocol.INVALID, (how, name, answer)
    elif not (beside and b"\n" in target):
        assert answer.code == "", (how, name, base, answer.detail)
    allowed = {name, *_own(crew)} if not answer.code else set()
    allowed |= {target} if beside and not answer.code else set()
    allowed |= {base} if verb == "commit" else set()
    assert {one for one in {*before, *after} if before.get(one) != after.get(one)} <= allowed, (how, name)
    if answer.code == "":
        if verb != "export":
            _assert_same(os.path.join(here, target) if beside else path, form, folder / "expected")
        assert b"\x1b" not in answer.text().encode()
    return answer


def _own(crew: Crew) -> set[bytes]:
    return {f".sa-{crew.last_job}.{kind}".encode() for kind in ("journal", "orig")}


def _assert_same(path: bytes, form: str, expected: Path) -> None:
    if form == "qcow2":
        assert same_content(path, expected)
    else:
        qemu_img("compare", "-f", form, "-F", "qcow2", path, expected)


def _numbered(number: int) -> bytes:
    """A sound image unlike any other."""
    image = bytearray(qcow2())
    struct.pack_into(">I", image, DATA * CLUSTER, number)
    return bytes(image)


def _overlay(base: bytes) -> bytes:
    # As whoever makes such an overlay has to write it: before a slash, a colon would end a protocol's name.
    return qcow2(b"./" + base, b"qcow2")


def _tree(folder: bytes) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for place, _, _ in os.walk(folder):
        found |= {os.path.join(place, name): what for name, what in fingerprints(Path(os.fsdecode(place))).items()}
    return found


def test_an_undo_and_giving_it_up_go_by_the_name_alone(tmp_path: Path) -> None:
    chance = random.Random(seed())
    chosen = [name for name in [*chance.sample(KNOWN, SHARE), *names(chance, NAMES)[-SHARE:]] if not is_reserved(name)]
    with Crew() as crew:
        for number, name in enumerate(chosen):
            folder = new_folder(tmp_path / str(number))
            path = os.path.join(bytes(folder), name)
            for place in (path, bytes(folder / "neighbour")):
                with open(place, "wb") as file:
                    file.write(_numbered(number))
            before = fingerprints(folder)
            assert crew.ask(*request("reclaim compress", path, folder, "qcow2")).code == ""
            args = undo_args(path, crew.last_job)
            if number % 2:
                assert crew.ask("undo", args).code == ""
                assert fingerprints(folder) == before
            else:
                assert crew.ask("discard_undo", args).result["found"]
                after = fingerprints(folder)
                assert after.keys() == before.keys()
                assert after[b"neighbour"] == before[b"neighbour"]


def test_a_name_never_becomes_part_of_a_vmdk_descriptor(tmp_path: Path) -> None:
    chance = random.Random(seed())
    injected = b'x"\nparentFileNameHint="/etc/passwd'.replace(b"/", b"|")
    qemu_img("create", "-q", "-f", "vmdk", tmp_path / "template", "1M")
    with Crew() as crew:
        for number, name in enumerate([injected, b'a"b', *chance.sample(KNOWN, SHARE)]):
            folder = new_folder(tmp_path / str(number))
            path = os.path.join(bytes(folder), name)
            with open(path, "wb") as file:
                file.write((tmp_path / "template").read_bytes())
            for how in ("reclaim copy", "convert"):
                verb, args = request(how, path, folder, "vmdk")
                if how == "convert":
                    args["target"] |= {
                        "path_b64": b64(os.path.join(bytes(folder), b"new " + name + b".vmdk")),
                        "format": "vmdk",
                    }
                answer = crew.ask(verb, args)
                assert answer.code in CLEAN | {""}, (how, name, answer.detail)
                for one in os.listdir(bytes(folder)):
                    if not one.endswith(b".journal"):
                        info = image_info(os.path.join(bytes(folder), one), "vmdk")
                        assert "backing-filename" not in info
                        assert len(info["format-specific"]["data"]["extents"]) == 1


def test_a_flattened_image_does_not_name_a_protocol(tmp_path: Path) -> None:
    """The lower base is named from the image's folder: what was a name with a colon must not become a protocol."""
    folder = new_folder(tmp_path / "nbd:127.0.0.1:9")
    middle, base, image = folder / "middle", folder / "base", tmp_path / "vm.qcow2"
    base.write_bytes(_numbered(7))
    middle.write_bytes(qcow2(b"base", b"qcow2"))
    image.write_bytes(qcow2(b"./nbd:127.0.0.1:9/middle", b"qcow2"))
    expected = tmp_path / "expected"
    qemu_img("convert", "-f", "qcow2", "-O", "qcow2", image, expected)
    args = reclaim_args(image, middle, base, pool=tmp_path, method="rebase", keep=2)
    assert ask("flatten", args)["swapped"]
    assert image_info(image)["backing-filename"] == "./nbd:127.0.0.1:9/base"
    assert same_content(image, expected)


def test_a_job_never_takes_an_image_for_one_of_its_own_files(tmp_path: Path) -> None:
    """A job makes its new file under such a name, and puts it back by that name."""
    path = new_file(tmp_path / ".sa-j1.new", _numbered(1))
    args: dict[str, Any] = reclaim_args(path)
    assert ask("reclaim", args, job="j1")["code"] == protocol.INVALID
    assert path.read_bytes() == _numbered(1)
