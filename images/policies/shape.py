"""A policy's rules as they are applied: a copy of the row's columns, kept with each run."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from images.ledger.selectors import POLICY
from images.models import Policy
from images.policies.windows import Schedule
from storage_admin.accounts.models import Actor, Role

#: The kinds of jobs that a policy may start, by what they work on.
IMAGE_KINDS = ("reclaim", "flatten", "check", "analyze")
TARGETS = dict.fromkeys(IMAGE_KINDS, "image") | {
    "benchmark": "pool", "trim": "guest", "live_flatten": "guest", "delete_old_snapshots": "guest",
}  # fmt: skip
KINDS = tuple(TARGETS)
#: Of them, those that put another file in an image's place, or need nobody to use it meanwhile.
ALONE = frozenset({"reclaim", "flatten", "check"})


@dataclass(frozen=True)
class Rules:
    """What a policy does, when and to what; see :class:`images.models.Policy` for each."""

    name: str
    cron: str
    timezone: str
    window_minutes: int
    quiet_minutes: int
    hosts: tuple[int, ...]
    pools: tuple[int, ...]
    name_pattern: str
    formats: tuple[str, ...]
    min_reclaimable_bytes: int
    min_reclaimable_percent: int
    min_age_hours: int
    min_chain_depth: int
    include_decayed: bool
    kind: str
    options: dict[str, Any]
    max_jobs_per_host: int
    #: Runs of earlier versions were kept without these.
    include_preallocated: bool = False
    backup_max_days: int | None = None

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """The rules as they stand in a policy's row, which may not be saved yet."""
        return cls.from_json({field.name: getattr(policy, field.name) for field in fields(cls)})

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Self:
        """The rules that were kept with a run."""
        lists = {name: tuple(kept[name]) for name in ("hosts", "pools", "formats")}
        return cls(**{field.name: kept[field.name] for field in fields(cls) if field.name in kept} | lists)

    def as_json(self) -> dict[str, Any]:
        """The rules for a run's row, or the audit trail."""
        return asdict(self) | {name: list(getattr(self, name)) for name in ("hosts", "pools", "formats")}

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.cron, self.timezone, self.window_minutes, self.quiet_minutes)

    @property
    def target_kind(self) -> str:
        """What it works on: ``image``, ``pool`` or ``guest``."""
        return TARGETS.get(self.kind, "image")

    @property
    def on_images(self) -> bool:
        """Whether it works on images."""
        return self.target_kind == "image"

    @property
    def waits_for_guests(self) -> bool:
        """Whether its jobs wait until the guests that run have been shut down."""
        return self.options.get("when_running") == "wait"

    @property
    def least_depth(self) -> int:
        """How many images a chain has at least."""
        return max(self.min_chain_depth, 2 if self.kind in {"flatten", "live_flatten"} else 1)

    @property
    def actor(self) -> Actor:
        """Who submits its jobs."""
        return actor_named(self.name)


def actor_named(name: str) -> Actor:
    """Who a policy of that name acts as."""
    return Actor(name=f"{POLICY}{name}", role=Role.OPERATOR)
