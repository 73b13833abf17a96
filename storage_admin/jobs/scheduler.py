"""What rings for all that is due at a time, by the table in the settings."""

from datetime import timedelta
from typing import Any

from celery.beat import Scheduler
from django.conf import settings

#: Its time of change says when the scheduler on this machine was last at work.
BEAT = settings.DATA_DIR / "scheduler-beat"


class Table(Scheduler):
    """Rings for everything once when it starts, as nobody knows how long it was away, and then at each entry's time."""

    def setup_schedule(self) -> None:
        BEAT.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().setup_schedule()
        for entry in self.schedule.values():
            entry.last_run_at = entry.default_now() - timedelta(days=1)

    def tick(self, *args: Any, **options: Any) -> float:
        BEAT.touch(mode=0o600)
        return float(super().tick(*args, **options))
