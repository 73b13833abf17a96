"""What the product keeps outside of its data folder, tests and all they start keep elsewhere, and leave nothing of it.

The agent works in no folder that root has not listed: they have a list of their own. So is the folder that agents are
installed in on hosts that are reached by ssh.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from storage_admin.agent.folders import image_folders

AGENTS = "STORAGE_ADMIN_AGENT_FOLDER"

if image_folders.VARIABLE not in os.environ:
    _folder = Path(tempfile.mkdtemp(prefix="storage-admin-tests-"))
    _folder.chmod(0o755)  # agents are started by other users as well
    LISTED = _folder / "image-folders"
    LISTED.write_text("/tmp\n/var/tmp\n/dev/shm\n/mnt\n")
    os.environ[image_folders.VARIABLE] = str(LISTED)
    os.environ[AGENTS] = str(_folder / "agents")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
