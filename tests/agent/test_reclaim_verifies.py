"""A tool that does not do what it says: the copy never takes the image's place."""

import os
import shutil
from pathlib import Path

import pytest

from tests.agent.harness import UNCONFINED, ask, leftovers, reclaim_args, write
from tests.harness.filesystems import new_program

pytestmark = pytest.mark.qemu

REAL = shutil.which("qemu-img")


def with_broken_convert(folder: Path, image: Path, script: str, *ancestors: Path) -> dict[str, object]:
    """What the agent answers where ``convert`` does something else; ``$source`` is the image, ``$target`` the copy."""
    fake = folder / "bin" / "qemu-img"
    fake.parent.mkdir()
    new_program(
        fake,
        f'#!/bin/bash\nif [ "$1" != convert ]; then exec {REAL} "$@"; fi\n'
        "source=${@: -2:1}\ntarget=$(grep -o '/proc/self/fd/[0-9]*' <<< \"${@: -1}\" | head -1)\n"
        f'convert() {{ {REAL} "$@"; }}\n{script}\n',
    )
    inode = image.stat().st_ino
    path = f"{fake.parent}:{os.environ['PATH']}"
    answer = ask("reclaim", reclaim_args(image, *ancestors), command=UNCONFINED, env={"PATH": path})
    assert image.stat().st_ino == inode
    assert leftovers(image.parent) == set()
    return answer


ZERO_REFCOUNTS = """convert "$@"
table=$(od -An -tu8 --endian=big -j48 -N8 "$target" | tr -d ' ')
block=$(od -An -tu8 --endian=big -j$table -N8 "$target" | tr -d ' ')
dd if=/dev/zero of="$target" bs=1 seek=$block count=4096 conv=notrunc status=none"""

BROKEN = {
    "fails": ('convert "$@"; exit 1', "convert failed"),
    "is killed": ("kill -9 $$", "signal 9"),
    "writes nothing": ("exit 0", "cannot be read"),
    "changes one byte": (
        'convert "$@"; qemu-io -f qcow2 -c "write -P 1 7M 1" "$target"',
        "content of the copy differs",
    ),
    "forgets a part": ('convert "$@"; qemu-io -f qcow2 -c "discard 0 64k" "$target"', "content of the copy differs"),
    "makes it larger": ('convert "$@"; qemu-img resize -q -f qcow2 "$target" 9M', "virtual_size"),
    "loses the options": (
        'convert convert -U -O qcow2 -o cluster_size=2M "$source" "$target"',
        "cluster_size",
    ),
    "does not compress as asked": (
        'convert convert -U -c -O qcow2 "$source" "$target"',
        "compression",
    ),
    "cuts the end off": ('convert "$@"; truncate -s -200k "$target"', "cannot be read"),
    "damages its tables": (ZERO_REFCOUNTS, "corruptions"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_convert_that_goes_wrong_is_noticed(tmp_path: Path, image: Path, how: str) -> None:
    script, said = BROKEN[how]
    answer = with_broken_convert(tmp_path, image, script)
    assert answer.get("code") == "tool_failed", answer
    assert said in str(answer["detail"])


def test_a_convert_that_pulls_the_base_in_is_noticed(tmp_path: Path, image: Path, overlay: Path) -> None:
    write(overlay, 0x44, "2M", "3M")
    script = 'convert convert -U -c -o compression_type=zstd -O qcow2 "$source" "$target"'
    answer = with_broken_convert(tmp_path, overlay, script, image)
    assert answer.get("code") == "tool_failed", answer
    assert "backing_file" in str(answer["detail"])
