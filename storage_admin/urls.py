"""Every address of the dashboard, composed."""

from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("storage_admin.accounts.urls")),
    path("", include("images.urls")),
]
