"""Undo copies that stay after their windows because they may be the last good copies, and a clock that was set."""

from collections.abc import Iterator

from images.rewrite import holding
from storage_admin.events import services as events
from storage_admin.events.services import Trouble
from storage_admin.jobs.models import Elapsed
from storage_admin.words import size

#: So many copies have an alert each; the page of each pool lists all.
EACH = 100


def kept() -> Iterator[Trouble]:
    """Undo copies of which nobody but a user can say that they are not needed."""
    for job, why in holding.kept(EACH):
        name = job.target_label
        yield Trouble(
            f"{events.UNDO_KEPT}:{job.pk}", "warning", f"The undo copy of {name} may be the last good copy",
            f"{why} It holds {size(job.undo_bytes)}. An admin can undo job {job.pk}, or force the removal on its page.",
            job.host.slug, "job", job.pk, str(job),
        )  # fmt: skip


def clock() -> Iterator[Trouble]:
    """This machine's clock was set while it ran."""
    if step := Elapsed.clock_jump():
        yield Trouble(
            events.CLOCK_JUMPED, "danger", f"The dashboard's clock was changed by {step:+,.0f} s",
            f"Nothing expires until the clock is right again, or has been stable for {Elapsed.SETTLED / 3600:.0f} "
            "hours. Check the time service of the dashboard's machine.",
        )  # fmt: skip
