"""The schema, and a page to try it."""

from drf_spectacular.renderers import OpenApiJsonRenderer2, OpenApiYamlRenderer2
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView


class Schema(SpectacularAPIView):
    """OpenAPI 3.1 as JSON, or as YAML where that is asked for."""

    renderer_classes = [OpenApiJsonRenderer2, OpenApiYamlRenderer2]


class Docs(SpectacularSwaggerSplitView):
    """Swagger UI from our own server, without inline script or style."""

    template_name = "api/docs.html"
    url_name = "schema"
