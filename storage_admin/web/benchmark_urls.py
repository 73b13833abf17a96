"""The addresses of the pages of benchmarks."""

from django.urls import path

from storage_admin.web.pages import benchmark_pool, benchmark_start, benchmarks

urlpatterns = [
    path("benchmarks/", benchmarks.benchmarks, name="benchmarks"),
    path("benchmarks/export.csv", benchmarks.benchmarks_csv, name="benchmarks_csv"),
    path("benchmarks/start/", benchmark_start.benchmark_start, name="benchmark_start"),
    path("benchmarks/paste/", benchmark_start.benchmark_paste, name="benchmark_paste"),
    path("benchmarks/compare.csv", benchmarks.benchmark_compare_csv, name="benchmark_compare_csv"),
    path("benchmarks/compare/", benchmarks.benchmark_compare, name="benchmark_compare"),
    path("benchmarks/<int:run_id>/", benchmarks.benchmark, name="benchmark"),
    path("benchmarks/<int:run_id>/status/", benchmarks.benchmark_status, name="benchmark_status"),
    path("benchmarks/<int:run_id>/figures/", benchmarks.benchmark_figures, name="benchmark_figures"),
    path("benchmarks/<int:run_id>/results.csv", benchmarks.benchmark_csv, name="benchmark_csv"),
    path("benchmarks/pools/<int:pool_id>/", benchmark_pool.benchmark_history, name="benchmark_history"),
    path("benchmarks/pools/<int:pool_id>/watch/", benchmark_pool.benchmark_watch, name="benchmark_watch"),
    path("benchmarks/watches/<int:watch_id>/end/", benchmark_pool.benchmark_unwatch, name="benchmark_unwatch"),
]
