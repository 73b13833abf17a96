"""What the machines of a laboratory say where they were not built."""

from pathlib import Path

import pytest

from tests.machines import lab

pytestmark = pytest.mark.qemu


def test_without_its_machines_a_night_fails_and_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "KEPT", tmp_path / "kept")
    with pytest.raises(AssertionError, match="`make machines` builds them"), lab.machines():
        raise AssertionError("they run")


def test_they_are_built_anew_where_anything_that_they_are_made_from_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lab.built()
    assert lab.built() == before
    (tmp_path / "build.sh").write_text(lab.BUILD.read_text() + "\n")
    monkeypatch.setattr(lab, "BUILD", tmp_path / "build.sh")
    assert lab.built() != before
