"""What a job's page says of its method, its options and its commands."""

from typing import Any

import pytest

from images.rewrite import planning
from images.rewrite.kind import IDENTICAL
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from storage_admin.web.pages.jobs import status_of
from storage_admin.web.templatetags.job_words import asked_for, method_word, moment, shell
from tests.factories import ImageFactory, JobFactory


def job(kind: str, plan: dict[str, Any] | None = None, **options: Any) -> Job:
    return Job(kind=kind, options=kinds.get(kind).clean(options), plan=plan or {})


@pytest.mark.parametrize(
    ("kind", "method", "options", "kept"),
    [
        ("reclaim", "compress", {}, True), ("reclaim", "in_place", {}, False), ("grow", "in_place", {}, False),
        ("commit", "commit", {}, False), ("check", "repair leaks", {"repair": "leaks"}, True),
        ("convert", "convert", {"format": "raw"}, False), ("export", "export", {}, False),
    ],
)  # fmt: skip
def test_only_a_copy_that_was_given_up_leaves_the_image_as_it_was(
    db: None, kind: str, method: str, options: dict[str, Any], kept: bool
) -> None:
    result = {"before_bytes": 5, "after_bytes": 4, "method": method, "swapped": False}
    done = JobFactory.create(
        kind=kind, state="succeeded", result=result, plan={"method": method}, target=ImageFactory.create(),
        options=kinds.get(kind).clean(options),
    )  # fmt: skip
    assert status_of(done)["original_kept"] is kept
    done.result = result | {"swapped": True}
    assert not status_of(done)["original_kept"]


def test_only_a_copy_that_is_compared_as_a_whole_is_promised_to_be_identical() -> None:
    same, found = str(IDENTICAL), set()
    for kind in planning.rewriting_kinds():
        repairs = kind.properties.get("repair", {}).get("enum", [None])
        for options in ({"repair": repair} for repair in repairs):
            if kind.promise("copy", options) != same:
                found.add((kind.name, options["repair"]))
            assert kind.promise("in_place", options)
    assert found == {("shrink", None), ("relink", None), ("commit", None), ("sparsify", None), ("check", "none"),
                     ("check", "all"), ("convert", None), ("export", None),
                     ("to_device", None), ("move", None)}  # fmt: skip


def test_only_options_that_say_something_are_shown() -> None:
    assert asked_for(job("reclaim")) == [("Undo copy kept for", "24 hours")]
    asked = asked_for(job("reclaim", undo_hours=0, bandwidth_bytes_sec=3 << 20, idle_io=False))
    assert asked == [("Undo copy kept for", "none kept"), ("Bandwidth limit", "3 MiB/s"), ("Idle I/O priority", "no")]


def test_what_it_waits_for_and_does_afterwards_is_said_in_words() -> None:
    asked = dict(asked_for(job("reclaim", when_running="wait", wait_hours=2, start_after=True)))
    assert asked["If a guest is running"] == "wait for shutdown, at most 2 hours"
    assert asked["Afterwards"] == "start the guest again"


def test_an_image_is_called_by_the_name_that_the_plan_knew() -> None:
    plan = {"affected_images": [{"id": 7, "name": "base.qcow2", "how": "read"}]}
    assert ("Flatten down to", "base.qcow2") in asked_for(job("flatten", plan, down_to=7))
    assert ("Flatten down to", "image 8") in asked_for(job("flatten", plan, down_to=8))


@pytest.mark.parametrize("kind", ["check", "convert"])
def test_what_replaces_nothing_speaks_of_no_undo_copy(kind: str) -> None:
    assert "Undo copy kept for" not in dict(asked_for(job(kind)))


def test_digging_in_place_keeps_no_undo_copy_and_a_replacing_conversion_does() -> None:
    assert asked_for(job("reclaim", {"method": "in_place"})) == []
    asked = dict(asked_for(job("convert", format="raw", replace=True, repoint_guest=True, undo_hours=5)))
    assert asked["Undo copy kept for"] == "5 hours"
    assert (asked["Original image"], asked["Guest definitions"]) == ("replaced", "switched to the new file")


def test_the_options_of_a_format_are_those_that_qemu_img_takes() -> None:
    asked = dict(asked_for(job("convert", format="vmdk", format_options={"subformat": "streamOptimized"})))
    assert asked == {"Target format": "vmdk", "Format options": "subformat=streamOptimized"}


def test_a_job_of_a_kind_that_is_gone_still_says_what_it_was_asked() -> None:
    assert asked_for(Job(kind="polish", options={"how_much": 3}, plan={})) == [("How much", "3")]


def test_a_command_can_be_typed_as_it_is_shown() -> None:
    assert shell(["qemu-img", "rebase", "-b", "", "/p/a b.qcow2"]) == "qemu-img rebase -b '' '/p/a b.qcow2'"
    assert shell(["qemu-img", "compare", "a", "b", "(in 16 parts)"]) == "qemu-img compare a b  # in 16 parts"
    assert shell([]) == ""


def test_methods_have_the_word_of_their_button() -> None:
    words = {
        ("in_place", "reclaim"): "Punch holes in place", ("compress", "reclaim"): "Compress",
        ("convert", "flatten"): "Flatten into a new copy", ("convert", "convert"): "Convert",
        ("trim", "trim"): "Trim in the guest", ("discard_undo", "discard_undo"): "Discard undo",
        ("melt_down", "gone"): "Melt down",
    }  # fmt: skip
    assert {asked: method_word(*asked) for asked in words} == words


def test_a_time_of_a_result_is_a_time() -> None:
    found = moment("2026-11-21T22:21:00+00:00")
    assert found is not None
    assert (found.hour, moment(None), moment("")) == (22, None, None)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("create", "virtual_size", {"name": "a.qcow2"}),
        ("upload", "size", {"name": "a.qcow2"}),
        ("grow", "size_bytes", {}),
    ],
)
def test_sizes_are_told_in_units_and_to_the_byte(kind: str, name: str, options: dict[str, Any]) -> None:
    shown = [value for _, value in asked_for(job(kind, **{**options, name: 3 << 29}))]
    assert [value for value in shown if "GiB" in value and "1,610,612,736" in value]
    assert not [value for value in shown if "1610612736" in value]
