"""What gunicorn serves."""

from django.core.wsgi import get_wsgi_application

import storage_admin.celery  # noqa: F401 (names the settings, and the app that tasks are sent by)

application = get_wsgi_application()
