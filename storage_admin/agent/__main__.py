"""``python -m storage_admin.agent``, and the entry point of the zipapp."""

from __future__ import annotations

import sys

from storage_admin.agent.main import main

sys.exit(main())
