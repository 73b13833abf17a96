"""Policies, runs and previews as the API shows them, and the bodies that it takes."""

from typing import Any

from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from images.filters import FORMATS
from images.models import Policy, PolicyPick, PolicyRun
from images.policies import selectors
from images.policies.planned import Planned
from images.policies.preview import LeftOut, Preview
from images.policies.reasons import Skip
from images.policies.selectors import Sums
from images.policies.shape import KINDS
from images.policies.validation import BOUNDS
from storage_admin.jobs.models import Automation
from storage_admin.rest.fields import Body, StrictBoolean, StrictInteger, StrictText


class WindowSerializer(serializers.Serializer[Any]):
    """When jobs may run; no new jobs start after ``last_start``."""

    opens = serializers.DateTimeField()
    last_start = serializers.DateTimeField()
    closes = serializers.DateTimeField()


class RunSummarySerializer(serializers.ModelSerializer[PolicyRun]):
    """A run, and what it came to. Sizes in bytes."""

    counts = serializers.SerializerMethodField()
    predicted_bytes = serializers.SerializerMethodField()
    won_bytes = serializers.SerializerMethodField()
    held_bytes = serializers.SerializerMethodField()

    class Meta:
        model = PolicyRun
        fields: tuple[str, ...] = (
            "id", "due", "ends", "state", "detail", "by", "by_hand", "started", "finished", "counts",
            "predicted_bytes", "won_bytes", "held_bytes",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "due": {"help_text": "When the window opened."},
            "ends": {"help_text": "When the window closes."},
            "detail": {"help_text": "Why the run was missed, stopped or failed; empty otherwise."},
        }

    def _sums(self, run: PolicyRun) -> Sums:
        found: Sums = self.context["sums"][run.pk]
        return found

    @extend_schema_field({"type": "object", "additionalProperties": {"type": "integer"}, "description": "By state."})
    def get_counts(self, run: PolicyRun) -> dict[str, int]:
        return self._sums(run).counts

    @extend_schema_field({"type": ["integer", "null"], "description": "Savings expected of the jobs of the run."})
    def get_predicted_bytes(self, run: PolicyRun) -> int | None:
        return self._sums(run).predicted

    @extend_schema_field({"type": "integer", "description": "Space freed by the jobs of the run."})
    def get_won_bytes(self, run: PolicyRun) -> int:
        return self._sums(run).won

    @extend_schema_field({"type": "integer", "description": "Space held by undo copies of the jobs of the run."})
    def get_held_bytes(self, run: PolicyRun) -> int:
        return self._sums(run).held


class PolicySerializer(serializers.ModelSerializer[Policy]):
    """A policy; empty lists mean all."""

    hosts = serializers.ListField(child=serializers.IntegerField(), read_only=True)
    pools = serializers.ListField(child=serializers.IntegerField(), read_only=True)
    formats = serializers.ListField(child=serializers.CharField(), read_only=True)
    options = serializers.DictField(read_only=True)
    next_window = serializers.SerializerMethodField()
    last_run = serializers.SerializerMethodField()

    class Meta:
        model = Policy
        fields = (
            "id", "name", "enabled", "cron", "timezone", "window_minutes", "quiet_minutes", "hosts", "pools",
            "name_pattern", "formats", "min_reclaimable_bytes", "min_reclaimable_percent", "min_age_hours",
            "min_chain_depth", "include_decayed", "include_preallocated", "backup_max_days", "kind", "options",
            "max_jobs_per_host", "created", "created_by", "next_window", "last_run",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(WindowSerializer(allow_null=True))
    def get_next_window(self, policy: Policy) -> Any:
        found, _why = selectors.coming(policy, self.context.get("now") or timezone.now(), 1)
        return WindowSerializer(found[0]).data if found else None

    @extend_schema_field(RunSummarySerializer(allow_null=True))
    def get_last_run(self, policy: Policy) -> Any:
        run = self.context["last"].get(policy.pk)
        return RunSummarySerializer(run, context=self.context).data if run else None


#: Whose columns have their defaults.
_DEFAULTS = Policy()


def _whole(name: str, text: str = "") -> StrictInteger:
    least, most = BOUNDS[name]
    default = getattr(_DEFAULTS, name)
    return StrictInteger(min_value=least, max_value=most, default=default, help_text=text)


class PolicyBody(Body):
    """A new policy; what is not given has its default."""

    name = StrictText(max_length=100)
    enabled = StrictBoolean(default=True)
    cron = StrictText(max_length=100, help_text="Five fields: minute, hour, day of the month, month, day of the week.")
    timezone = StrictText(
        max_length=64, default="UTC", help_text=_("A name of the IANA time zone database, such as Europe/Berlin.")
    )
    window_minutes = _whole("window_minutes", "A window ends early if the next one opens.")
    quiet_minutes = _whole("quiet_minutes", "No job starts in these last minutes of a window.")
    hosts = serializers.ListField(child=StrictInteger(), default=list, max_length=1000, help_text="Ids; empty for all.")
    pools = serializers.ListField(child=StrictInteger(), default=list, max_length=1000, help_text="Ids; empty for all.")
    name_pattern = StrictText(
        max_length=500, allow_blank=True, default="",
        help_text=_("Shell patterns separated by white space; a pattern that starts with ! excludes."),
    )  # fmt: skip
    formats = serializers.ListField(child=serializers.ChoiceField(FORMATS), default=list, max_length=len(FORMATS))
    min_reclaimable_bytes = _whole("min_reclaimable_bytes")
    min_reclaimable_percent = _whole("min_reclaimable_percent", "Minimum savings in percent of the physical size.")
    min_age_hours = _whole("min_age_hours", "Minimum hours since the last job of this kind on the image.")
    min_chain_depth = _whole("min_chain_depth")
    include_decayed = StrictBoolean(
        default=False, help_text=_("Include images that grew back after they were reclaimed.")
    )
    include_preallocated = StrictBoolean(
        default=False,
        help_text="Include images recognised as preallocated. A reclaim or flatten undoes their preallocation.",
    )
    backup_max_days = StrictInteger(
        min_value=BOUNDS["backup_max_days"][0],
        max_value=BOUNDS["backup_max_days"][1],
        allow_null=True,
        default=None,
        help_text=_(
            "Skip images and guests without a known backup that is at most this many days old; null: not required."
        ),
    )
    kind = serializers.ChoiceField(KINDS, default="reclaim")
    options = serializers.DictField(default=dict, help_text=_("Options of the kind, see `job-kinds/`."))
    max_jobs_per_host = _whole("max_jobs_per_host", "Maximum number of concurrent jobs per host.")


class PolicyPatch(PolicyBody):
    """What is to be changed of a policy."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for field in fields.values():
            field.required, field.default = False, serializers.empty
        return fields


class PlannedSerializer(serializers.Serializer[Any]):
    """An image (of other kinds, a pool or a guest) whose job would be submitted."""

    image = serializers.IntegerField(allow_null=True)
    pool = serializers.IntegerField(allow_null=True)
    guest = serializers.IntegerField(allow_null=True)
    host = serializers.IntegerField()
    label = serializers.CharField()  # type: ignore[assignment]  # a field of that name
    method = serializers.CharField(allow_blank=True)
    waits = serializers.BooleanField(
        help_text=_("Another job is using the image now. The job is submitted when that one has ended.")
    )
    predicted_bytes = serializers.IntegerField(allow_null=True)
    scratch_bytes = serializers.IntegerField(allow_null=True)


class SkipSerializer(serializers.Serializer[Any]):
    """One that is left out."""

    image = serializers.IntegerField(allow_null=True)
    pool = serializers.IntegerField(allow_null=True)
    guest = serializers.IntegerField(allow_null=True)
    host = serializers.IntegerField()
    label = serializers.CharField()  # type: ignore[assignment]  # a field of that name
    code = serializers.CharField()
    reason = serializers.CharField()


class LeftOutSerializer(serializers.Serializer[Any]):
    """How many one rule leaves out; ``meant`` tells whether the policy is for them at all."""

    code = serializers.CharField()
    word = serializers.CharField()
    count = serializers.IntegerField()
    meant = serializers.BooleanField()


class PreviewSerializer(serializers.Serializer[Any]):
    """What a policy would do now."""

    windows = WindowSerializer(many=True)
    chosen = PlannedSerializer(many=True)
    chosen_count = serializers.IntegerField(
        help_text="Number of images that no rule skips, before their plans are made."
    )
    predicted_bytes = serializers.IntegerField(allow_null=True, help_text=_("Expected savings of all of these."))
    skipped = SkipSerializer(many=True)
    skipped_count = serializers.IntegerField(help_text=_("Number of images that a rule skips."))
    left_out = LeftOutSerializer(many=True)


def preview_of(found: Preview, target_kind: str = "image") -> dict[str, Any]:
    """A preview as its serializer wants it."""
    refused = [
        _target(one, target_kind) | {"code": one.refusal.code, "reason": one.refusal.detail}
        for one in found.chosen
        if one.refusal is not None and found.code in {"", one.refusal.code}
    ]
    skipped = [_target(skip, target_kind) | {"code": skip.code, "reason": skip.reason} for skip in found.skipped]
    return {
        "windows": found.windows,
        "chosen": [
            _target(one, target_kind)
            | {
                "method": one.plan.method if one.plan else "",
                "waits": one.candidate.waits,
                "predicted_bytes": one.won_bytes,
                "scratch_bytes": one.plan.scratch_bytes if one.plan else None,
            }
            for one in found.accepted
        ],
        "chosen_count": found.chosen_count,
        "predicted_bytes": found.predicted_bytes,
        "skipped": [*refused, *skipped],
        "skipped_count": found.skipped_count,
        "left_out": found.left_out,
    }


def _target(one: Planned | Skip, target_kind: str) -> dict[str, Any]:
    what = one.candidate if isinstance(one, Planned) else one
    ids = {"image": None, "pool": what.pool_id, "guest": None, target_kind: what.id}
    return ids | {"host": what.host_id, "label": what.label}


class PickSerializer(serializers.ModelSerializer[PolicyPick]):
    """What a run looked at. ``reason`` says why it was left out or failed, ``freed_bytes`` what its job has won."""

    image = serializers.IntegerField(source="image_id", read_only=True, allow_null=True)
    pool = serializers.IntegerField(source="pool_id", read_only=True, allow_null=True)
    guest = serializers.IntegerField(source="guest_id", read_only=True, allow_null=True)
    host = serializers.IntegerField(source="host_id", read_only=True, allow_null=True)
    job = serializers.IntegerField(source="job_id", read_only=True, allow_null=True)
    freed_bytes = serializers.SerializerMethodField()

    class Meta:
        model = PolicyPick
        fields = (
            "id", "place", "image", "pool", "guest", "host", "label", "state", "code", "reason", "job",
            "predicted_bytes", "freed_bytes",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field({"type": ["integer", "null"]})
    def get_freed_bytes(self, pick: PolicyPick) -> int | None:
        return pick.job.freed_bytes if pick.job else None


class RunSerializer(RunSummarySerializer):
    """A run with the first hundred of its jobs, and how many were left out by which rule; the rest is in ``picks/``."""

    policy = serializers.IntegerField(source="policy_id", read_only=True)
    jobs = serializers.SerializerMethodField()
    left_out = serializers.SerializerMethodField()
    rules = serializers.DictField(read_only=True, help_text=_("The rules of the policy at the time of the run."))

    class Meta(RunSummarySerializer.Meta):
        fields = (*RunSummarySerializer.Meta.fields, "policy", "jobs", "left_out", "rules")
        read_only_fields = fields

    @extend_schema_field(PickSerializer(many=True))
    def get_jobs(self, run: PolicyRun) -> Any:
        return PickSerializer(self.context["picks"].get(run.pk, []), many=True).data

    @extend_schema_field(LeftOutSerializer(many=True))
    def get_left_out(self, run: PolicyRun) -> Any:
        found: list[LeftOut] = self.context["skips"].get(run.pk, [])
        return LeftOutSerializer(found, many=True).data


class AutomationSerializer(serializers.ModelSerializer[Automation]):
    """The switch for all that starts by itself and changes something."""

    since = serializers.SerializerMethodField()

    class Meta:
        model = Automation
        fields = ("paused", "by", "reason", "since")
        read_only_fields = fields

    @extend_schema_field(
        {
            "type": ["string", "null"],
            "format": "date-time",
            "description": "When it was last paused or resumed; null: never.",
        }
    )
    def get_since(self, switch: Automation) -> Any:
        return switch.since if switch.by else None


class AutomationBody(Body):
    """Where the switch is to stand."""

    paused = StrictBoolean()
    reason = StrictText(max_length=300, allow_blank=True, required=False)
