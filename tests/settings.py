"""Settings for tests: a data folder of their own, so that nothing of a running Storage Admin is touched."""

import atexit
import os
import shutil
import tempfile

if "STORAGE_ADMIN_DATA_DIR" not in os.environ:
    os.environ["STORAGE_ADMIN_DATA_DIR"] = _folder = tempfile.mkdtemp(prefix="storage-admin-tests-")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)

from storage_admin.brokers import BrokerUrls
from storage_admin.settings import *  # noqa: F403 (settings are all of them)
from storage_admin.settings import DATA_DIR, DATABASES, STORAGES

os.umask(0o022)  # tests make files for guests and other users
DATA_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
(DATA_DIR / "static").mkdir(exist_ok=True)
if DATABASES["default"]["ENGINE"].endswith("sqlite"):
    # A file, as in real life: threads and processes of a test then see one database.
    DATABASES["default"]["TEST"] = {"NAME": str(DATA_DIR / "test.sqlite3")}

if "REDIS_URL" not in os.environ:
    # Test processes that run side by side share the data folder, and have a Redis each.
    _broker = BrokerUrls.parse(f"unix://{DATA_DIR}/redis-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.sock")
    REDIS_URL, CELERY_BROKER_URL = _broker.redis, _broker.kombu

STORAGES = STORAGES | {"staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
SIGN_IN_TRIES_PER_MINUTE = 1_000_000  # all tests come from one address
LOOK_SECONDS = 0.0  # most tests' hosts and images are rows alone; tests/images/test_look.py has real ones
ALLOWED_HOSTS = ["*"]
LOGGING = {"version": 1, "disable_existing_loggers": False}
