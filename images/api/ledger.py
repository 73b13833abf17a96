"""``ledger/``: what jobs won and lost, line by line and added up."""

from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema, extend_schema_field, extend_schema_view
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from images import selectors
from images.ledger.filters import LedgerFilters
from images.ledger.selectors import POLICY, lines_for
from images.ledger.sums import Summary, summary
from storage_admin.jobs.models import Job
from storage_admin.rest.shown import Shown
from storage_admin.rest.views import EndpointSet


class LineSerializer(Shown, serializers.ModelSerializer[Job]):
    """One job that changed space. Sizes are bytes of allocated space, on the disk."""

    job = serializers.IntegerField(
        source="id", help_text=_("Id of the job. It stays the same when the host of the job is removed.")
    )
    image = serializers.IntegerField(
        source="image_number", allow_null=True, help_text=_("Id of the image; null if it is no longer listed.")
    )
    image_name = serializers.CharField(source="target_label")
    host = serializers.SerializerMethodField(help_text=_("Id of the host; null if it was removed."))
    host_name = serializers.SerializerMethodField()
    pool = serializers.SerializerMethodField(help_text="Id of the pool whose space changed; null if it was removed.")
    pool_name = serializers.SerializerMethodField()
    by = serializers.CharField(source="created_by")
    policy = serializers.SerializerMethodField(help_text="Name of the policy that requested the job; null if none did.")
    predicted_bytes = serializers.IntegerField(allow_null=True, help_text=_("Savings that the plan expected."))
    predicted_after_bytes = serializers.SerializerMethodField()
    before_bytes = serializers.IntegerField(
        allow_null=True, help_text=_("Size before the job; 0 for a new file beside an image.")
    )
    after_bytes = serializers.IntegerField(allow_null=True)
    held_bytes = serializers.IntegerField(source="undo_bytes", help_text=_("Bytes that the undo copy holds now."))
    freed_bytes = serializers.IntegerField(
        help_text="Bytes freed permanently. Negative if the job consumed space. 0 while an undo copy holds them, "
        "and if the job was undone."
    )
    freed_at = serializers.DateTimeField(
        allow_null=True, help_text="When the space was freed; null while it is held, and if the job was undone."
    )
    at = serializers.DateTimeField(allow_null=True, help_text=_("`freed_at`, or when the job ended."))
    seconds = serializers.SerializerMethodField(help_text=_("Duration of the job."))
    undo = serializers.ChoiceField(source="undo_state", choices=Job.UndoState.choices)

    class Meta:
        model = Job
        fields = (
            "job", "kind", "state", "image", "image_name", "host", "host_name", "pool", "pool_name", "by", "policy",
            "predicted_bytes", "predicted_after_bytes", "before_bytes", "after_bytes", "held_bytes", "freed_bytes",
            "freed_at", "at", "started", "finished", "seconds", "undo",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field({"type": ["integer", "null"]})
    def get_host(self, line: Any) -> int | None:
        return None if line.host_now is None else int(line.host_id)

    def get_host_name(self, line: Any) -> str:
        return host_of(line)

    @extend_schema_field({"type": ["integer", "null"]})
    def get_pool(self, line: Any) -> int | None:
        return None if line.pool_now is None else int(line.space_pool_id)

    def get_pool_name(self, line: Any) -> str:
        return pool_of(line)

    @extend_schema_field({"type": ["string", "null"]})
    def get_policy(self, line: Job) -> str | None:
        return policy_of(line)

    @extend_schema_field({"type": ["integer", "null"]})
    def get_predicted_after_bytes(self, line: Job) -> int | None:
        known = line.before_bytes is not None and line.predicted_bytes is not None
        return (line.before_bytes or 0) - (line.predicted_bytes or 0) if known else None

    @extend_schema_field({"type": ["number", "null"]})
    def get_seconds(self, line: Job) -> float | None:
        return seconds_of(line)


def host_of(line: Any) -> str:
    """The name of a line's host: as it is now, or as it was when it was removed."""
    return str(line.host_now or line.host_name)


def pool_of(line: Any) -> str:
    """The name of the pool whose space a line changed, in the same way; empty where nobody knows it."""
    return str(line.pool_now or line.pool_name)


def policy_of(line: Job) -> str | None:
    """The policy that asked for a line's job."""
    return line.created_by.removeprefix(POLICY) if line.created_by.startswith(POLICY) else None


def seconds_of(line: Job) -> float | None:
    """How long a line's job took."""
    if line.started is None or line.finished is None:
        return None
    return round((line.finished - line.started).total_seconds(), 3)


class SumsSerializer(serializers.Serializer[Any]):
    """What some lines come to, in bytes."""

    freed_bytes = serializers.IntegerField(help_text=_("Freed minus consumed: the net decrease of allocated space."))
    won_bytes = serializers.IntegerField(help_text=_("Freed by jobs that freed space."))
    taken_bytes = serializers.IntegerField(help_text="Consumed by jobs, for example by a new image.")
    copies_bytes = serializers.IntegerField(help_text=_("The part of `taken_bytes` that new files consumed."))
    held_bytes = serializers.IntegerField(help_text=_("Held by undo copies now, not yet freed."))
    pending_bytes = serializers.IntegerField(help_text=_("Freed once the undo copies expire."))
    predicted_bytes = serializers.IntegerField(help_text=_("Savings that the plans expected."))
    jobs_count = serializers.IntegerField(help_text=_("Jobs that freed or consumed space permanently."))
    held_count = serializers.IntegerField(help_text=_("Jobs whose undo copies still exist."))


class OfHostSerializer(SumsSerializer):
    """What came of the jobs on one host."""

    id = serializers.IntegerField(allow_null=True, help_text=_("Null if the host was removed."))
    name = serializers.CharField(allow_blank=True)


class OfPoolSerializer(SumsSerializer):
    """What came of the jobs in one pool."""

    id = serializers.IntegerField(allow_null=True, help_text=_("Null if the pool was removed or is not known."))
    name = serializers.CharField(allow_blank=True)
    host_id = serializers.IntegerField(allow_null=True)
    host = serializers.CharField(allow_blank=True)


class OfMonthSerializer(SumsSerializer):
    """What became free or was taken in a month; what is held is in none."""

    month = serializers.CharField(help_text=_("Month in UTC, such as `2026-11`."))


class SummarySerializer(SumsSerializer):
    """The ledger, added up: in all, and by host, pool and month."""

    hosts = OfHostSerializer(many=True)
    pools = OfPoolSerializer(many=True)
    months = OfMonthSerializer(many=True)


def told(found: Summary) -> dict[str, Any]:
    """Sums as the API shows them: beside the name of what they are of."""
    groups = {"hosts": found.hosts, "pools": found.pools, "months": found.months}
    total: dict[str, Any] = vars(found.total)
    return total | {name: [_flat(one) for one in of_each] for name, of_each in groups.items()}


def _flat(one: Any) -> dict[str, Any]:
    return {**{name: value for name, value in vars(one).items() if name != "sums"}, **vars(one.sums)}


@extend_schema_view(
    list=extend_schema(
        summary=_("Every job that freed or consumed space, newest first"),
        description="When no undo copy is left, the sum of `freed_bytes` is exactly the change of allocated bytes "
        "on the disks.",
    )
)
class LedgerEndpoints(mixins.ListModelMixin, EndpointSet):
    queryset = Job.objects.none()
    serializer_class = LineSerializer
    filterset_class = LedgerFilters
    #: The sums are of what the list's filters leave, and have no order.
    parameters: ClassVar[dict[str, frozenset[str]]] = {"summary": frozenset(LedgerFilters.base_filters)}

    def get_queryset(self) -> QuerySet[Any]:
        return lines_for(self.actor)

    def filter_queryset(self, queryset: Any) -> Any:
        return super(EndpointSet, self).filter_queryset(queryset)

    def listed(self, rows: QuerySet[Any]) -> Any:
        """What is cut into pages."""
        return selectors.Matches(rows)

    @extend_schema(
        summary=_("Totals by host, pool and month"),
        description=_("Covers the jobs that match the filters."),
        filters=True,
        responses=SummarySerializer,
    )
    @action(detail=False, methods=["get"], pagination_class=None)
    def summary(self, _request: Request) -> Response:
        return Response(SummarySerializer(told(summary(self.filter_queryset(self.get_queryset())))).data)
