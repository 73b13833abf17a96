"""What gunicorn serves."""

from django.core.wsgi import get_wsgi_application
from django.urls import get_resolver

import storage_admin.celery  # noqa: F401 (names the settings, and the app that tasks are sent by)
from storage_admin.overload import Refusing

application = Refusing(get_wsgi_application())
# All views are imported now, and not while whoever asks first waits.
_ = get_resolver().url_patterns
