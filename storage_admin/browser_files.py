"""Which files the browser loads, and where a checkout has them: for the settings and for `setup/wheel`."""

from fnmatch import fnmatch

#: Folders beside the packages, by where their files go below ``static/``.
FOLDERS = {
    "": "static",
    "htmx": "node_modules/htmx.org/dist",
    "chartjs": "node_modules/chart.js/dist",
    "sha256": "node_modules/js-sha256/build",
    "tabler/css": "node_modules/@tabler/core/dist/css",
}
#: What pages name, and what that names in turn (a file's map). Libraries bring a hundred times as much, all of which
#: would be compressed before the first page is served.
LOADED = (
    "storage_admin/*",
    "tabler/css/tabler.min.css*",
    "htmx/htmx.min.js",
    "chartjs/chart.umd.min.js*",
    "sha256/sha256.min.js",
    "drf_spectacular_sidecar/swagger-ui-dist/favicon-32x32.png",
    "drf_spectacular_sidecar/swagger-ui-dist/swagger-ui.css*",
    "drf_spectacular_sidecar/swagger-ui-dist/swagger-ui-bundle.js*",
    "drf_spectacular_sidecar/swagger-ui-dist/swagger-ui-standalone-preset.js*",
    "account/js/*",
    "mfa/js/*",
)


def is_loaded(name: str) -> bool:
    """Whether a page loads a file.

    Args:
        name: its path below ``static/``.
    """
    return any(fnmatch(name, pattern) for pattern in LOADED)
