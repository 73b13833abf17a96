"""Benchmarks as the API shows them."""

from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from benchmarks.models import Benchmark, BenchmarkKind, Watch
from benchmarks.services import LONGEST_PASTE, LONGEST_WAIT_HOURS
from storage_admin.jobs.models import Job
from storage_admin.rest.fields import Body, StrictInteger, StrictText, TextOrNull

SETTING = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}


@extend_schema_field(SETTING)
class SettingField(serializers.DictField):
    """What names a step: ``{"cluster_size": "64K"}``."""


class DropSerializer(serializers.Serializer[Any]):
    """A figure that is worse than it usually is on this pool."""

    metric = serializers.CharField()
    unit = serializers.CharField()
    setting = SettingField()
    value = serializers.FloatField()
    usual = serializers.FloatField(help_text=_("Median of earlier runs."))
    usual_worst = serializers.FloatField(help_text=_("Worst value that still counts as usual."))
    ratio = serializers.FloatField(help_text=_("Factor by which the value is worse than usual."))
    runs = serializers.IntegerField(help_text=_("Number of earlier runs that it is compared with."))


class BenchmarkSerializer(serializers.ModelSerializer[Benchmark]):
    """One run, or pasted result lines."""

    state = serializers.SerializerMethodField(help_text=_("State of the job of the run; `succeeded` for pasted lines."))
    host_name = serializers.CharField(source="host.name", read_only=True, default=None, allow_null=True)
    pool_name = serializers.CharField(source="pool.name", read_only=True, default=None, allow_null=True)
    options = serializers.DictField(read_only=True)
    environment = serializers.DictField(read_only=True, help_text=_("Facts of the host when the run started."))
    environment_after = serializers.DictField(read_only=True)
    caches = TextOrNull(
        help_text="What was done about caches: dropped, direct (bypassed) or not dropped; null if not known."
    )
    notes = serializers.ListField(child=serializers.CharField(), read_only=True)
    regressions = DropSerializer(many=True, read_only=True)

    class Meta:
        model = Benchmark
        fields = (
            "id", "kind", "quick", "source", "label", "job", "state", "host", "host_name", "pool", "pool_name",
            "options", "environment", "environment_after", "notes", "caches", "regressions", "created_by", "created",
            "finished",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(serializers.ChoiceField(choices=Job.State.choices))
    def get_state(self, benchmark: Benchmark) -> str:
        return benchmark.job.state if benchmark.job else Job.State.SUCCEEDED


class ResultSerializer(serializers.Serializer[Any]):
    """One metric of one setting, over all repetitions; null where nothing could be measured, and ``note`` says why."""

    metric = serializers.CharField()
    unit = serializers.CharField()
    setting = SettingField()
    median = serializers.FloatField(allow_null=True)
    min = serializers.FloatField(allow_null=True)
    max = serializers.FloatField(allow_null=True)
    repetitions = serializers.IntegerField()
    note = serializers.CharField(allow_blank=True)


class AdviceSerializer(serializers.Serializer[Any]):
    """What to choose, in a sentence."""

    topic = serializers.CharField()
    sentence = serializers.CharField()
    measurable = serializers.BooleanField(help_text=_("False if the difference is too small to measure."))


class ResultsSerializer(serializers.Serializer[Any]):
    """A run's figures."""

    results = ResultSerializer(many=True)
    advice = AdviceSerializer(many=True)
    regressions = DropSerializer(many=True)
    environment = serializers.DictField()


class PublishedSerializer(serializers.Serializer[Any]):
    """Figures that an article published: another machine, another year, one measurement each."""

    key = serializers.CharField()
    title = serializers.CharField()
    kind = serializers.ChoiceField(choices=BenchmarkKind.choices)
    measured_on = serializers.CharField()
    origin = serializers.CharField(help_text=_("Where the figures were published."))
    note = serializers.CharField(allow_blank=True)
    results = ResultSerializer(many=True)


class ComparedSerializer(serializers.Serializer[Any]):
    """One run of a comparison."""

    benchmark = BenchmarkSerializer()
    results = ResultSerializer(many=True)


class ComparisonSerializer(serializers.Serializer[Any]):
    """Runs side by side, in the order asked for, and what was published of their kinds."""

    runs = ComparedSerializer(many=True)
    published = PublishedSerializer(many=True)


class CostSerializer(serializers.Serializer[Any]):
    """What a run costs, before it starts."""

    bytes_written = serializers.IntegerField(help_text=_("Estimate, over all repetitions."))
    scratch_bytes = serializers.IntegerField(
        help_text=_("Most space that the run takes in the pool. All of it is freed afterwards.")
    )
    seconds_about = serializers.IntegerField()


class ProfileSerializer(serializers.Serializer[Any]):
    """A kind in one variant, worked out for a pool."""

    kind = serializers.ChoiceField(choices=BenchmarkKind.choices)
    quick = serializers.BooleanField()
    title = serializers.CharField()
    question = serializers.CharField(allow_blank=True)
    steps = serializers.SerializerMethodField()
    repetitions = serializers.IntegerField()
    cost = CostSerializer()
    available = serializers.SerializerMethodField()
    missing = serializers.CharField(allow_blank=True, help_text=_("Why the profile is not offered there."))
    package = serializers.CharField(allow_blank=True, help_text=_("The Debian package that provides what is missing."))
    warnings = serializers.ListField(child=serializers.CharField())

    @extend_schema_field({"type": "array", "items": SETTING})
    def get_steps(self, profile: Any) -> list[dict[str, Any]]:
        """What names each step."""
        return [step["setting"] for step in profile.steps]

    def get_available(self, profile: Any) -> bool:
        return not profile.missing


class ProfilesSerializer(serializers.Serializer[Any]):
    """Every profile, as it would be on the pool."""

    pool = serializers.IntegerField()
    results = ProfileSerializer(many=True)


class WatchSerializer(serializers.ModelSerializer[Watch]):
    """A quick profile that is run on a pool again and again."""

    problem = serializers.CharField(
        read_only=True, help_text=_("Why the last scheduled run did not start; empty otherwise.")
    )

    class Meta:
        model = Watch
        fields = ("id", "pool", "kind", "every_hours", "last_started", "problem", "created_by", "created")
        read_only_fields = fields


class BenchmarkBody(Body):
    """``options`` as those of the job kind ``benchmark``, without ``kind``."""

    kind = serializers.ChoiceField(choices=BenchmarkKind.choices)
    pool = StrictInteger(min_value=1)
    host = StrictInteger(
        required=False, min_value=1, help_text=_("Optional. If given, it must be the host of the pool.")
    )
    options = serializers.DictField(required=False)


class PasteBody(Body):
    """Result lines of bonnie++ (CSV, formats 1.96 to 2.00), one machine and size."""

    text = StrictText(max_length=LONGEST_PASTE, trim_whitespace=False)


class WatchBody(Body):
    """How often the quick profile of a kind is run on a pool."""

    pool = StrictInteger(min_value=1)
    kind = serializers.ChoiceField(choices=BenchmarkKind.choices)
    every_hours = StrictInteger(min_value=1, max_value=LONGEST_WAIT_HOURS)
