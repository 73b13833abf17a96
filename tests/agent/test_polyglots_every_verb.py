"""What an image is declared to be counts: content that says otherwise is refused by every verb, changing nothing."""

import time
from pathlib import Path

import pytest

from storage_admin.agent.main import VERBS
from storage_admin.agent.protocol import unb64
from tests.agent.every_verb import ALL, READS, UNDOES, Crew, covered
from tests.agent.polyglots import polyglots
from tests.agent.stranger import Scene

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

AT_LEAST = 20


def test_no_verb_is_left_out_here() -> None:
    assert covered() == set(VERBS), "a new verb wants its line in every_verb.py"


def test_no_verb_takes_an_image_for_what_its_content_says(tmp_path: Path) -> None:
    began, scene = time.monotonic(), Scene(tmp_path)
    # A fixed VHD has its mark at its end alone: declared raw, it is a raw disk like any other.
    images = [image for image in polyglots(scene.outside, scene.scratch) if "fixed vhd" not in image.what]
    assert len(images) >= AT_LEAST
    placed = [(bytes(scene.place(number, image)), image) for number, image in enumerate(images)]
    with Crew(tmp_path / "trace") as crew:
        for path, image in placed:
            answers = scene.each(crew, path, image.form)
            for how in set(ALL) - set(UNDOES):
                # Where zeros stand in a raw disk does not depend on what they mean: it is read, and nothing else is.
                expected = "" if how in READS and image.form == "raw" else "format_mismatch"
                assert answers[how].code == expected, (image.what, how, answers[how].detail)
        told = scene.whole_pool(crew, [(path, image.form) for path, image in placed])["scan"].events
    records = [event for event in told if event["event"] == "image" and "/vm." in _path(event)]
    assert len(records) == len(images)
    for record in records:
        # That is how the dashboard knows of the contradiction.
        declared = _path(record).rpartition(".")[2]
        assert record["format"] != declared, record
    scene.report(f"{len(images)} polyglots", began)
    scene.check_outside(tmp_path / "trace")


def _path(event: dict[str, str]) -> str:
    return unb64(event["path_b64"]).decode()
