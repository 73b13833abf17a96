"""What uses which of many block devices, looked for at once."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from storage_admin.agent.host import devices
from tests.harness.filesystems import loop_device, mounted, new_folder, sparse_file

pytestmark = pytest.mark.qemu
USES = {"idle": "", "read": "open in sleep", "mounted": "mounted at ", "below": "behind loop"}


def test_each_is_in_use_by_what_has_it_open_mounted_or_below_itself(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        paths = {}
        for how in USES:
            paths[how] = stack.enter_context(loop_device(sparse_file(tmp_path / how, 8 << 20)))
        stack.enter_context(loop_device(paths["below"]))
        subprocess.run(["mkfs.ext4", "-q", paths["mounted"]], check=True)
        stack.enter_context(mounted(paths["mounted"], new_folder(tmp_path / "at"), "-t", "ext4"))
        file = stack.enter_context(Path(paths["read"]).open("rb"))
        process = stack.enter_context(subprocess.Popen(["sleep", "60"], stdin=file))
        stack.callback(process.kill)
        file.close()
        nodes = {how: Path(path).stat() for how, path in paths.items()}
        found = devices.users([one.st_rdev for one in nodes.values()])
    told = {how: found.get(one.st_rdev, "") for how, one in nodes.items()}
    assert all(word in told[how] and bool(word) == bool(told[how]) for how, word in USES.items()), told
