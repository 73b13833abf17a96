"""The addresses of the pages of benchmarks."""

from django.urls import path

from benchmarks import pool_views, start_views, views

urlpatterns = [
    path("benchmarks/", views.benchmarks, name="benchmarks"),
    path("benchmarks/export.csv", views.benchmarks_csv, name="benchmarks_csv"),
    path("benchmarks/start/", start_views.benchmark_start, name="benchmark_start"),
    path("benchmarks/paste/", start_views.benchmark_paste, name="benchmark_paste"),
    path("benchmarks/compare.csv", views.benchmark_compare_csv, name="benchmark_compare_csv"),
    path("benchmarks/compare/", views.benchmark_compare, name="benchmark_compare"),
    path("benchmarks/<int:run_id>/", views.benchmark, name="benchmark"),
    path("benchmarks/<int:run_id>/status/", views.benchmark_status, name="benchmark_status"),
    path("benchmarks/<int:run_id>/figures/", views.benchmark_figures, name="benchmark_figures"),
    path("benchmarks/<int:run_id>/results.csv", views.benchmark_csv, name="benchmark_csv"),
    path("benchmarks/pools/<int:pool_id>/", pool_views.benchmark_history, name="benchmark_history"),
    path("benchmarks/pools/<int:pool_id>/watch/", pool_views.benchmark_watch, name="benchmark_watch"),
    path("benchmarks/watches/<int:watch_id>/end/", pool_views.benchmark_unwatch, name="benchmark_unwatch"),
]
