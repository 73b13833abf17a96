"""Snapshots of Proxmox VE that are files: no chain is cut, and no file of one is an orphan, whatever its state."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from images.rewrite import neighbours, planning
from storage_admin.agent.protocol import RefusedError, Request, b64
from storage_admin.agent.rewrite import volume_chains as on_the_spot
from storage_admin.agent.verbs import aside, reclaim, rewrites
from tests.agent.aside import aside_args
from tests.agent.harness import rewrite_args
from tests.agent.recording import RecordingIO, request
from tests.chance import seed
from tests.faults.figures import trials_of
from tests.images.chain_states import KINDS, TEMPLATE, State, make
from tests.images.node import NODE, config, scanned
from tests.working import ADMIN, create, register, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_reserve")]

CHAIN = "in_snapshot_chain"


@pytest.fixture
def store(pve: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the VMs' images, in a storage whose snapshots are files; the agent finds /etc/pve in the test's."""
    (pve / "storage.cfg").write_text(
        f"dir: store\n\tpath {pve.parents[2] / 'store'}\n\tcontent images\n\tsnapshot-as-volume-chain 1\n"
    )
    monkeypatch.setattr(on_the_spot, "ETC_PVE", str(pve))
    return pve.parents[2] / "store/images"


def codes(kind: str, image: Image, **options: Any) -> set[str]:
    plan = planning.plan_for(ADMIN, planning.image_kind(kind), image, options)
    return {refusal.code for refusal in plan.refusals}


def refused(verb: Callable[[Request, Any], Any], args: dict[str, Any]) -> str:
    """The code that the agent itself refuses with; it gets no word to go on in any case."""
    try:
        verb(request("verb", **args), RecordingIO())
    except RefusedError as error:
        return error.code
    except AssertionError:
        return "nothing"
    return "done"


def target(path: Path) -> dict[str, Any]:
    wanted = {"path_b64": b64(bytes(path)), "pool_path_b64": b64(bytes(path.parent)), "format": "qcow2"}
    return {"target": {**wanted, "options": {}, "replaces": True}}


def asked(state: State, image: Path, **own: Any) -> dict[str, Any]:
    """The agent's arguments, as a plan would make them that knew of no chain."""
    return rewrite_args(image, *state.ancestors(image), pool=image.parent.parent, **own)


def cut_by_the_agent(state: State) -> list[str]:
    """What the agent would have cut, or replaced below a disk."""
    found = []
    stands = [state.disk] if state.disk is not None and set(state.ancestors(state.disk)) & set(state.inner) else []
    for image in (*state.inner, *stands):
        tried = {"convert": refused(rewrites.convert, asked(state, image, **target(image)))}
        if state.ancestors(image):
            tried["flatten"] = refused(rewrites.flatten, asked(state, image, method="rebase"))
        if image in state.inner:
            tried["reclaim"] = refused(reclaim.run, asked(state, image, method="copy"))
            tried["in place"] = refused(reclaim.run, asked(state, image, method="in_place"))
        found += [f"{state.kind}: {verb} of {image.name}: {code}" for verb, code in tried.items() if code != CHAIN]
    # Taken away in the instant after the plan, when only the host knows.
    for image in state.inner:
        code = refused(aside.set_aside, aside_args(image))
        if code not in {CHAIN, "has_overlays"} and image not in state.left:
            found.append(f"{state.kind}: {image.name} set aside: {code}")
    return found


def cut_by_a_plan(state: State, rows: dict[str, Image]) -> list[str]:
    found = []
    on_it = state.disk is not None and bool(set(state.ancestors(state.disk)) & set(state.inner))
    for image in filter(None, [*state.inner, state.disk, *state.others]):
        row, inner = rows[str(image)], image in state.inner
        expected = inner or (on_it and image == state.disk)
        told = {
            "flatten": CHAIN in codes("flatten", row) or not (state.ancestors(image) or not expected),
            "convert": CHAIN in codes("convert", row, replace=True),
        }
        if not state.ancestors(image):
            told["flatten"] = expected
        found += [f"{state.kind}: {kind} of {image.name}: {was}" for kind, was in told.items() if was != expected]
        if (CHAIN in codes("reclaim", row)) != inner:
            found.append(f"{state.kind}: reclaim of {image.name}")
        if image in state.needed and not codes("set_aside", row):
            found.append(f"{state.kind}: {image.name} could be set aside")
        part = neighbours.snapshot_part(row)
        if (part is not None) != expected or (part is not None and part.number != str(state.vmid)):
            found.append(f"{state.kind}: {image.name} is shown as {part}")
    return found


@pytest.mark.faults
def test_no_chain_is_cut_and_no_file_of_one_is_an_orphan(store: Path, pve: Path, tmp_path: Path) -> None:
    trials, number = trials_of("chains"), seed()
    print(f"{trials} states")
    rng = random.Random(number)
    elsewhere = tmp_path / "libvirt"
    elsewhere.mkdir()
    (store / "999").mkdir()
    create(store / "999" / TEMPLATE, "1M")
    config(pve, f"name: t\ntemplate: 1\nscsi0: store:999/{TEMPLATE},size=1M\n", 999)
    states = [make(KINDS[one % len(KINDS)], 1000 + one, store, elsewhere, rng) for one in range(trials)]
    for state in states:
        if state.config:
            config(pve, state.config, state.vmid, NODE if rng.random() < 0.9 else "other")
    host = this_machine()
    register(host, elsewhere)
    scanned(host)
    images = list(Image.objects.select_related("host", "pool"))
    neighbours.share(images)
    rows = {os.fsdecode(bytes(row.path_bytes)): row for row in images}
    false_orphans = [f"{one.kind}: {path.name}" for one in states for path in one.needed if rows[str(path)].orphan]
    cut = [what for one in states for what in (*cut_by_a_plan(one, rows), *cut_by_the_agent(one))]
    assert (false_orphans, cut) == ([], []), f"STORAGE_ADMIN_SEED={number}"
    here = [one for one in states if (pve / f"nodes/{NODE}/qemu-server/{one.vmid}.conf").exists()]
    left = [rows[str(path)].orphan for one in here for path in one.left]
    assert left
    assert set(left) == {True}
