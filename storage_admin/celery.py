"""The Celery app: a doorbell that carries job ids. Imported by name by manage.py, the worker and the scheduler."""

import os

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES

# By its usual names, so that addresses of Redis stay what they are.
TRANSPORT_ALIASES |= dict.fromkeys(("redis", "rediss"), "storage_admin.redis_transport:Transport")

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "storage_admin.settings")
app = Celery("storage_admin")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
