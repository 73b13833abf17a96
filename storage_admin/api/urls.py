"""The REST API, composed: /api/v1/."""

from django.urls import include, path, re_path
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter

import storage_admin.rest.schema  # noqa: F401 (names the token's scheme to drf-spectacular)
from benchmarks.api import BenchmarkEndpoints, WatchEndpoints
from images.api.images import ImageEndpoints
from images.api.ledger import LedgerEndpoints
from images.api.others import (
    AttachedEndpoint,
    GuestEndpoints,
    HostScanEndpoint,
    OverviewEndpoint,
    SnapshotEndpoints,
)
from images.api.policies import AutomationEndpoint, PolicyEndpoints
from images.api.pools import PoolEndpoints
from images.api.uploads import UploadEndpoints
from storage_admin.api.accounts import AuditEndpoints, LockoutEndpoints, TokenEndpoints, UserEndpoints
from storage_admin.api.docs import Docs, Schema
from storage_admin.api.saved_views import SavedViewEndpoints
from storage_admin.events.api import AlertEndpoints, WebhookEndpoints
from storage_admin.hosts.api import HostEndpoints
from storage_admin.jobs.api import JobEndpoints, JobKindEndpoints
from storage_admin.rest.views import Endpoint

router = SimpleRouter(use_regex_path=False)
for name, endpoints in (
    ("hosts", HostEndpoints),
    ("pools", PoolEndpoints),
    ("guests", GuestEndpoints),
    ("snapshots", SnapshotEndpoints),
    ("images", ImageEndpoints),
    ("job-kinds", JobKindEndpoints),
    ("jobs", JobEndpoints),
    ("uploads", UploadEndpoints),
    ("policies", PolicyEndpoints),
    ("ledger", LedgerEndpoints),
    ("benchmarks", BenchmarkEndpoints),
    ("benchmark-watches", WatchEndpoints),
    ("alerts", AlertEndpoints),
    ("webhooks", WebhookEndpoints),
    ("views", SavedViewEndpoints),
    ("tokens", TokenEndpoints),
    ("users", UserEndpoints),
    ("lockouts", LockoutEndpoints),
    ("audit", AuditEndpoints),
):
    router.register(name, endpoints, basename=f"api-{name}")


class Root(Endpoint):
    """What there is."""

    @extend_schema(exclude=True)
    def get(self, request: Request) -> Response:
        names = [*(prefix for prefix, _, _ in router.registry), "attached", "automation", "overview", "schema", "docs"]
        return Response({name: request.build_absolute_uri(f"{name}/") for name in names})


class Nothing(Endpoint):
    """Any other address: an error in the API's own shape."""

    @extend_schema(exclude=True)
    def get(self, _request: Request, **_where: str) -> Response:
        raise NotFound

    post = put = patch = delete = get

    def known_parameters(self, _action: str) -> frozenset[str]:
        return frozenset(self.request.query_params)


urlpatterns = [
    path("", Root.as_view(), name="api-root"),
    path("hosts/<int:pk>/scan/", HostScanEndpoint.as_view(), name="api-hosts-scan"),
    path("attached/", AttachedEndpoint.as_view(), name="api-attached"),
    path("automation/", AutomationEndpoint.as_view(), name="api-automation"),
    path("overview/", OverviewEndpoint.as_view(), name="api-overview"),
    path("schema/", Schema.as_view(), name="schema"),
    path("docs/", Docs.as_view(), name="docs"),
    path("", include(router.urls)),
    re_path(r"^(?P<rest>[\s\S]*)$", Nothing.as_view()),  # a line break is no other address
]
