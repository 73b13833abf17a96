"""The schema, and a page to try it."""

from functools import cache
from typing import Any

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.renderers import OpenApiJsonRenderer2, OpenApiYamlRenderer2
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView


@cache
def schema() -> dict[str, Any]:
    """All of it, which is the same for everybody, and takes a second to be made."""
    found: dict[str, Any] = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
    return found


class _Kept(SchemaGenerator):
    def get_schema(self, request: Any = None, public: bool = False) -> dict[str, Any]:  # noqa: ARG002 (for all the same)
        return schema()


class Schema(SpectacularAPIView):
    """OpenAPI 3.1 as JSON, or as YAML where that is asked for."""

    generator_class = _Kept
    renderer_classes = [OpenApiJsonRenderer2, OpenApiYamlRenderer2]


class Docs(SpectacularSwaggerSplitView):
    """Swagger UI from our own server, without inline script or style."""

    template_name = "api/docs.html"
    url_name = "schema"
