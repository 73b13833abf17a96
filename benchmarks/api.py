"""Endpoints of benchmarks: start, results, compare, costs before the start, pasted lines, watches."""

from typing import Any, ClassVar

from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from benchmarks import advice, profiles, published, results, selectors, services
from benchmarks.filters import BenchmarkFilters, WatchFilters
from benchmarks.models import Benchmark, Watch
from benchmarks.serializers import (
    BenchmarkBody,
    BenchmarkSerializer,
    ComparisonSerializer,
    PasteBody,
    ProfilesSerializer,
    ResultsSerializer,
    WatchBody,
    WatchSerializer,
)
from storage_admin.accounts.models import Role
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import pools_for
from storage_admin.rest.pagination import LARGEST, whole_number
from storage_admin.rest.views import EndpointSet

_IDS = f"Comma-separated ids of runs, at most {selectors.MOST_COMPARED}."
#: The schema's own hook says so of addresses with an id in them; here the ids stand in the query.
_NOT_FOUND = OpenApiResponse({"$ref": "#/components/schemas/Error"}, "Not found, or no access.")


@extend_schema_view(list=extend_schema(summary="Benchmarks, newest first"), retrieve=extend_schema(summary="One run"))
class BenchmarkEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, EndpointSet):
    queryset = Benchmark.objects.none()
    serializer_class = BenchmarkSerializer
    filterset_class = BenchmarkFilters
    parameters: ClassVar[dict[str, frozenset[str]]] = {
        "compare": frozenset({"ids"}), "profiles": frozenset({"pool"}),
    }  # fmt: skip
    roles: ClassVar[dict[str, Role]] = {"create": Role.OPERATOR, "paste": Role.OPERATOR}

    def get_queryset(self) -> QuerySet[Any]:
        return selectors.benchmarks_for(self.actor)

    @extend_schema(
        summary=_("Start a benchmark on a pool"),
        description="Returns 202 with the run, whose `job` can be followed and cancelled. If the run is refused, "
                    "it returns 409 with a code. For the cost of a run, see `benchmarks/profiles/`, or `jobs/` "
                    "with `dry_run`.",
        request=BenchmarkBody,
        parameters=[
            OpenApiParameter(
                "Idempotency-Key", OpenApiTypes.STR, OpenApiParameter.HEADER,
                description=_("A request with the same key returns the run of the first one."),
            )
        ],
        responses={202: BenchmarkSerializer},
    )  # fmt: skip
    def create(self, request: Request) -> Response:
        given = BenchmarkBody.of(self.request)
        pool = pool_of(self, given["pool"])
        if given.get("host", pool.host_id) != pool.host_id:
            raise ValidationError(
                {"host": gettext("Pool {pool} is on another host: {host}.").format(pool=pool.pk, host=pool.host_id)}
            )
        run = services.submit(
            self.actor, given["kind"], pool.pk, given.get("options"),
            idempotency_key=request.headers.get("Idempotency-Key", ""),
        )  # fmt: skip
        return Response(BenchmarkSerializer(run).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(summary=_("The results of a run and its recommendation"), responses=ResultsSerializer)
    @action(detail=True, methods=["get"], pagination_class=None, filter_backends=[])
    def results(self, _request: Request, **_where: Any) -> Response:
        run = self.get_object()
        rows = results.of(run)
        where = run.pool.name if run.pool else run.label or "this machine"
        told = {
            "results": rows,
            "advice": advice.of(run.kind, rows, where) if run.finished else [],
            "regressions": run.regressions,
            "environment": run.environment,
        }
        return Response(ResultsSerializer(told).data)

    @extend_schema(
        summary=_("Compare runs"),
        parameters=[
            OpenApiParameter(
                "ids", {"type": "string", "pattern": "^[0-9]+(,[0-9]+)*$"}, required=True, description=_IDS
            )
        ],
        responses={200: ComparisonSerializer, 404: _NOT_FOUND},
    )
    @action(detail=False, methods=["get"], pagination_class=None, filter_backends=[])
    def compare(self, request: Request) -> Response:
        asked = _ids(request.query_params.get("ids", ""))
        found = {run.pk: run for run in selectors.with_samples(self.get_queryset().filter(pk__in=asked))}
        if missing := [number for number in asked if number not in found]:
            raise NotFoundError(gettext("There is no run {missing}.").format(missing=missing[0]))
        runs = [{"benchmark": found[number], "results": results.of(found[number])} for number in asked]
        kinds = dict.fromkeys(found[number].kind for number in asked)
        told = {"runs": runs, "published": [series for kind in kinds for series in published.of_kind(kind)]}
        return Response(ComparisonSerializer(told).data)

    @extend_schema(
        summary=_("What each profile does on a pool, and what it costs"),
        parameters=[
            OpenApiParameter(
                "pool",
                {"type": "integer", "minimum": 1, "maximum": LARGEST},
                required=True,
                description=_("Id of a pool."),
            )
        ],
        responses={200: ProfilesSerializer, 404: _NOT_FOUND},
    )
    @action(detail=False, methods=["get"], pagination_class=None, filter_backends=[])
    def profiles(self, request: Request) -> Response:
        if "pool" not in request.query_params:
            raise ValidationError({"pool": gettext("Specify the id of a pool.")})
        pool = pool_of(self, whole_number(request, "pool", 0, 1, LARGEST))
        return Response(ProfilesSerializer({"pool": pool.pk, "results": profiles.every(pool)}).data)

    @extend_schema(summary="Save old result lines of bonnie++", request=PasteBody, responses={201: BenchmarkSerializer})
    @action(detail=False, methods=["post"])
    def paste(self, _request: Request) -> Response:
        run = services.paste(self.actor, PasteBody.of(self.request)["text"])
        return Response(BenchmarkSerializer(run).data, status=status.HTTP_201_CREATED)


def pool_of(endpoints: EndpointSet, pool_id: int) -> StoragePool:
    """The pool of a body.

    Raises:
        NotFoundError: there is none, or not for who asks.
    """
    pool = pools_for(endpoints.actor).filter(pk=pool_id).first()
    if pool is None:
        raise NotFoundError(gettext("There is no pool {pool}.").format(pool=pool_id))
    return pool


def _ids(text: str) -> list[int]:
    """Raises: ValidationError."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise ValidationError({"ids": _IDS})
    numbers = list(dict.fromkeys(map(int, parts)))
    if len(numbers) > selectors.MOST_COMPARED:
        raise ValidationError({"ids": _IDS})
    return numbers


@extend_schema_view(list=extend_schema(summary=_("Scheduled benchmarks")))
class WatchEndpoints(mixins.ListModelMixin, EndpointSet):
    queryset = Watch.objects.none()
    serializer_class = WatchSerializer
    filterset_class = WatchFilters
    roles: ClassVar[dict[str, Role]] = {"create": Role.OPERATOR, "destroy": Role.OPERATOR}

    def get_queryset(self) -> QuerySet[Any]:
        return selectors.watches_for(self.actor)

    @extend_schema(
        summary=_("Schedule the quick profile of a kind on a pool"),
        description=_("A second request for the same pool and kind changes the interval."),
        request=WatchBody,
        responses={201: WatchSerializer},
    )
    def create(self, request: Request) -> Response:
        given = WatchBody.of(request)
        row = services.watch(self.actor, pool_of(self, given["pool"]), given["kind"], given["every_hours"])
        return Response(WatchSerializer(row).data, status=status.HTTP_201_CREATED)

    @extend_schema(summary=_("End a scheduled benchmark; its results are kept"), responses={204: None})
    def destroy(self, _request: Request, **where: Any) -> Response:
        services.unwatch(self.actor, get_object_or_404(self.get_queryset(), pk=where["pk"]))
        return Response(status=status.HTTP_204_NO_CONTENT)
