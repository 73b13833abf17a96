"""Where a checkout has the files for the browser, for the settings and for `setup/wheel`."""

#: Folders beside the packages, by where their files go below ``static/``.
FOLDERS = {
    "": "static",
    "htmx": "node_modules/htmx.org/dist",
    "chartjs": "node_modules/chart.js/dist",
    "tabler/css": "node_modules/@tabler/core/dist/css",
    "tabler/js": "node_modules/@tabler/core/dist/js",
    "tabler/img": "node_modules/@tabler/core/dist/img",
}
