"""Every address of the dashboard, composed."""

from django.urls import URLPattern, URLResolver, include, path

from storage_admin.api.health import healthz
from storage_admin.api.metrics import metrics

handler500 = "storage_admin.rest.errors.server_error"

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("storage_admin.web.account_urls")),
    path("", include("storage_admin.web.urls")),
    path("", include("storage_admin.web.benchmark_urls")),
    path("api/v1/", include("storage_admin.api.urls")),
    path("healthz", healthz, name="healthz"),
    path("metrics", metrics, name="metrics"),
]
