"""Settings. Everything has a default: without any environment variable, Storage Admin runs on one machine."""

import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import environ
from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from storage_admin.brokers import BrokerUrls
from storage_admin.browser_files import FOLDERS
from storage_admin.job_kinds import JOB_KINDS  # noqa: F401 (a setting)
from storage_admin.key_files import key_in

# Whatever a process of the dashboard writes, keys and the database above all, is for its own user alone. What is for
# others (the agent on a host, demo images) gets its mode where it is made.
os.umask(0o077)

BASE_DIR = Path(__file__).resolve().parent.parent
#: Pages and files for the browser, where an installed package carries them; in a checkout they lie beside it.
SITE_DIR = Path(__file__).resolve().parent / "site"
INSTALLED = SITE_DIR.is_dir()
env = environ.Env()
#: What the units of the package read: a command that root types works on the same database.
ENVIRONMENT_FILE = Path("/etc/storage-admin/environment")
if INSTALLED and os.access(ENVIRONMENT_FILE, os.R_OK):
    env.read_env(ENVIRONMENT_FILE)


def _usual_data_dir() -> Path:
    """`var` in a checkout; else where this user's services keep their data."""
    if not INSTALLED:
        return BASE_DIR / "var"
    if os.geteuid() == 0:
        return Path("/var/lib/storage-admin")
    return Path(env.str("XDG_DATA_HOME", default="") or Path.home() / ".local/share") / "storage-admin"


USUAL_DATA_DIR = _usual_data_dir().resolve()
DATA_DIR = Path(env.str("STORAGE_ADMIN_DATA_DIR", default=str(USUAL_DATA_DIR))).resolve()
#: How somebody types a command of ours, and what starts all of it.
COMMAND = "storage-admin" if INSTALLED else ".venv/bin/python manage.py"
START = f"{COMMAND} up" if INSTALLED else "make run"
BIND = env.str("STORAGE_ADMIN_BIND", default="127.0.0.1:8000")


def _secret_key() -> str:
    """The key from ``SECRET_KEY``, else from the data folder, made there once and readable by its owner alone."""
    if given := env.str("SECRET_KEY", default=""):
        return str(given)
    path = DATA_DIR / "secret_key"
    try:
        key = key_in(path, lambda: secrets.token_urlsafe(64))
    except OSError as error:
        raise ImproperlyConfigured(
            f"The data folder {DATA_DIR} cannot be used ({error.strerror}). "
            "Make it writable or set STORAGE_ADMIN_DATA_DIR to a folder that is."
        ) from error
    if not key:
        raise ImproperlyConfigured(f"{path} is empty. Restore it from a backup, or delete it: all sign in again then.")
    return key


SECRET_KEY = _secret_key()
DEBUG = env.bool("DEBUG", default=False)
_bind_address = BIND.rsplit(":", 1)[0]
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]", _bind_address])
if _bind_address in {"0.0.0.0", "[::]", ""}:  # noqa: S104 (the admin chose to listen everywhere)
    ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["*"])
CSRF_TRUSTED_ORIGINS = env.list("CSRF_TRUSTED_ORIGINS", default=[])

INSTALLED_APPS = [
    "storage_admin.accounts",
    "storage_admin.events",
    "storage_admin.hosts",
    "storage_admin.jobs",
    "storage_admin.guests",
    "images",
    "storage_admin.web",
    "benchmarks",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "axes",
    "django_filters",
    "django_htmx",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "rest_framework",
    "template_partials",
]

#: Every list whose filters can be kept under a name, by what it says of itself (storage_admin/accounts/saved_views.py).
LIST_PAGES = [
    f"storage_admin.web.pages.{name}.PAGE"
    for name in ("images", "orphans", "jobs", "ledger", "hosts", "guests", "alerts", "audit", "benchmarks")
]
#: Filters of lists that name a thing: the rows of which it is one, as far as they exist for somebody, and the columns
#: by which it is named. Whoever does not see it is not offered another's view that names it.
NAMED_BY_FILTERS = {
    "host": ("storage_admin.hosts.selectors.hosts_for", "pk", "slug"),
    "pool": ("storage_admin.hosts.selectors.pools_for", "pk"),
    "image": ("images.selectors.images_for", "pk"),
    "guest": ("images.selectors.guests_for", "pk"),
    "policy": ("images.policies.scope.policies_for", "name"),
}

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "storage_admin.accounts.middleware.SessionRules",
    "storage_admin.accounts.middleware.ReadersZone",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "axes.middleware.AxesMiddleware",
]

ROOT_URLCONF = "storage_admin.urls"
WSGI_APPLICATION = "storage_admin.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [SITE_DIR / "templates" if INSTALLED else BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "storage_admin.web.sidebar.sidebar",
            ],
            "builtins": [
                "django.templatetags.i18n",
                "template_partials.templatetags.partials",
                "storage_admin.web.templatetags.storage",
                "storage_admin.web.templatetags.icons",
                "storage_admin.web.templatetags.parts",
                "storage_admin.web.templatetags.lists",
                "storage_admin.web.templatetags.busy",
                "storage_admin.web.templatetags.forms",
            ],
        },
    }
]

# --- Database -------------------------------------------------------------------------------------------------------
#: Whether this is a process of the web server. Each of its threads keeps its connection for a minute: to open SQLite
#: anew for each request, and read the schema again, takes as long as a short answer.
WEB_SERVER = env.bool("STORAGE_ADMIN_WEB_SERVER", default=False)
# Immediate transactions and a write-ahead log: writers queue instead of failing with "database is locked". The cache
# (32 MB, taken as it is needed) keeps the pages that a scan's last transaction touches from being written twice; for
# connections that are kept it is smaller, as there are many.
SQLITE_OPTIONS: dict[str, Any] = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": (
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON; "
        f"PRAGMA cache_size=-{8_000 if WEB_SERVER else 32_000};"
    ),
}
#: The host that this process runs on, where a worker was started on a hypervisor itself (``worker --host SLUG``).
WORKER_HOST = env.str("STORAGE_ADMIN_WORKER_HOST", default="")
#: Seconds that whoever submits or plans a job waits for a look at its images on their hosts; 0 for no looks at all.
LOOK_SECONDS = 1.0
#: Whether this process may do the work of the host ``local``, where it runs on that very machine. Not so in a
#: container, and beside a worker that was started for ``local`` alone.
LOCAL_MACHINE = env.bool("STORAGE_ADMIN_LOCAL", default=True)
DATABASES = {"default": env.db_url("DATABASE_URL", default=f"sqlite:///{DATA_DIR / 'db.sqlite3'}")}
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"] |= {"ENGINE": "storage_admin.sqlite", "OPTIONS": SQLITE_OPTIONS}
    DATABASES["default"]["CONN_MAX_AGE"] = 60 if WEB_SERVER else 0
else:
    DATABASES["default"]["CONN_MAX_AGE"] = 60
DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- Who may come in ------------------------------------------------------------------------------------------------
from storage_admin.sign_in_settings import *  # noqa: E402, F403 (the other half of this part)

SESSION_ENGINE = "storage_admin.accounts.sessions"
#: How long somebody stays signed in: without doing anything, and at all.
SESSION_IDLE = timedelta(minutes=env.int("SESSION_IDLE_MINUTES", default=12 * 60))
SESSION_LIFETIME = timedelta(hours=env.int("SESSION_LIFETIME_HOURS", default=14 * 24))
SESSION_COOKIE_AGE = int(SESSION_LIFETIME.total_seconds())
#: Proxies (addresses or networks) whose ``X-Forwarded-For`` is believed; nobody else's is.
TRUSTED_PROXIES = env.list("TRUSTED_PROXIES", default=[])
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
#: Behind a proxy that speaks TLS, set HTTPS=1: cookies are then sent over TLS only.
HTTPS = env.bool("HTTPS", default=False)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_SSL_REDIRECT = HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
if HTTPS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
        "base-uri": [NONE],
    }
}

# --- REST -----------------------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "storage_admin.accounts.authentication.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["storage_admin.rest.parsers.JsonParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "storage_admin.rest.pagination.LimitPagination",
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "EXCEPTION_HANDLER": "storage_admin.rest.errors.handle",
}
SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Storage Admin",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "COMPONENT_SPLIT_REQUEST": True,
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "storage_admin.rest.schema.finish",
    ],
    "ENUM_NAME_OVERRIDES": {
        "HostKind": "storage_admin.hosts.models.Host.Kind",
        "HostStatus": "storage_admin.hosts.models.Host.Status",
        "PoolKind": "storage_admin.hosts.models.StoragePool.Kind",
        "GuestKind": "storage_admin.guests.models.Guest.Kind",
        "ImageState": "images.models.Image.State",
        "JobState": "storage_admin.jobs.models.Job.State",
        "PolicyRunState": "images.models.PolicyRun.State",
        "PolicyPickState": "images.models.PolicyPick.State",
        "PolicyKind": "images.policies.shape.KINDS",
        "DeliveryState": "storage_admin.events.models.Delivery.State",
        "UndoState": "storage_admin.jobs.models.Job.UndoState",
        "BenchmarkKind": "benchmarks.models.BenchmarkKind",
        "RoleName": "storage_admin.accounts.models.ROLE_CHOICES",
    },
}

# --- Celery and Redis -----------------------------------------------------------------------------------------------
# The job's row is the truth and Celery its doorbell: nothing is acknowledged late, nothing prefetched, no result kept.
_broker = BrokerUrls.parse(env.str("REDIS_URL", default=f"unix://{DATA_DIR / 'redis' / 'redis.sock'}"))
REDIS_URL = _broker.redis
CELERY_BROKER_URL = _broker.kombu
CELERY_TASK_ACKS_LATE = False
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_DISABLE_PREFETCH = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
_VISIBILITY = {"visibility_timeout": 12 * 3600}
CELERY_BROKER_TRANSPORT_OPTIONS = _VISIBILITY | {
    "socket_timeout": 30,
    "socket_connect_timeout": 5,
    # A request must not wait for a broker that is away: the sweeper rings again for what nobody heard.
    "max_retries": 1,
    "interval_start": 0,
    "interval_max": 0.2,
}
CELERY_RESULT_BACKEND_TRANSPORT_OPTIONS = _VISIBILITY
CELERY_VISIBILITY_TIMEOUT = _VISIBILITY["visibility_timeout"]
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULER = "storage_admin.jobs.scheduler:Table"
CELERY_BEAT_SCHEDULE = {
    "tidy": {"task": "storage_admin.accounts.tasks.tidy", "schedule": 60.0},
    "reap": {"task": "storage_admin.jobs.tasks.reap", "schedule": 10.0},
    "sweep": {"task": "storage_admin.jobs.tasks.sweep", "schedule": 15.0},
    "scan every host": {"task": "images.tasks.scan_hosts", "schedule": 15 * 60.0},
    "expire undo copies": {"task": "images.tasks.expire_undo", "schedule": 60.0},
    "guests of undo copies": {"task": "images.tasks.look_at_users_of_undo_copies", "schedule": 60.0},
    "tidy uploads": {"task": "images.tasks.tidy_uploads", "schedule": 60.0},
    "wait for guests": {"task": "images.tasks.look_at_guests", "schedule": 10.0},
    "space of pools": {"task": "images.tasks.look_at_space", "schedule": 30.0},
    "stopped guests": {"task": "images.tasks.look_for_stopped_guests", "schedule": 30.0},
    "policies": {"task": "images.tasks.advance_policies", "schedule": 15.0},
    "alerts": {"task": "images.tasks.look_for_trouble", "schedule": 60.0},
    "forget vanished images": {"task": "images.tasks.forget_vanished", "schedule": 3600.0},
    "deliveries": {"task": "storage_admin.events.tasks.deliver", "schedule": 10.0},
    "forget events": {"task": "storage_admin.events.tasks.forget", "schedule": 3600.0},
    "benchmark watches": {"task": "benchmarks.tasks.start_watches", "schedule": 10 * 60.0},
}

# --- Telling others -------------------------------------------------------------------------------------------------
#: Who is told of alerts by mail; nobody where it is empty.
ALERT_EMAILS = [address.strip() for address in env.list("ALERT_EMAILS", default=[]) if address.strip()]
_mail = env.email_url_config(env.str("EMAIL_URL", default="") or "smtp://localhost:25")
EMAIL_BACKEND = _mail["EMAIL_BACKEND"]
EMAIL_USE_TLS, EMAIL_USE_SSL = _mail.get("EMAIL_USE_TLS", False), _mail.get("EMAIL_USE_SSL", False)
EMAIL_HOST = _mail["EMAIL_HOST"]
EMAIL_PORT = _mail["EMAIL_PORT"] or (465 if EMAIL_USE_SSL else 587 if EMAIL_USE_TLS else 25)
EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = _mail["EMAIL_HOST_USER"] or "", _mail["EMAIL_HOST_PASSWORD"] or ""
EMAIL_TIMEOUT = 15
#: Where people reach the dashboard, for links in mails.
PUBLIC_URL = env.str("STORAGE_ADMIN_URL", default="").rstrip("/")
#: For so many days images that vanished are listed; 0 for ever.
VANISHED_KEEP_DAYS = env.int("VANISHED_KEEP_DAYS", default=90)
#: For so many days events and how they were delivered are kept.
EVENTS_KEEP_DAYS = env.int("EVENTS_KEEP_DAYS", default=30)
DEFAULT_FROM_EMAIL = env.str("EMAIL_FROM", default="") or "Storage Admin <storage-admin@localhost>"

# --- Files, language, log -------------------------------------------------------------------------------------------
STATIC_URL = "static/"
STATIC_ROOT = DATA_DIR / "static"
STATICFILES_DIRS = [("", SITE_DIR / "static")] if INSTALLED else [(to, BASE_DIR / at) for to, at in FOLDERS.items()]
STATICFILES_FINDERS = [f"storage_admin.supervisor.static_files.{name}" for name in ("OfFolders", "OfApps")]
FILE_UPLOAD_PERMISSIONS = 0o600  # of what collectstatic writes into the data folder
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English")]
LOCALE_PATHS = [Path(__file__).resolve().parent / "locale"]
TIME_ZONE = "UTC"
USE_I18N = True
USE_TZ = True
MESSAGE_STORAGE = "django.contrib.messages.storage.cookie.CookieStorage"
#: The classes that messages wear on a page: debug, info, success, warning, error.
MESSAGE_TAGS = {10: "info", 20: "info", 25: "good", 30: "warn", 40: "bad"}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "{levelname} {name}: {message}", "style": "{"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"handlers": ["stderr"], "level": env.str("LOG_LEVEL", default="INFO")},
    "loggers": {"axes": {"level": "WARNING"}},  # sign-ins stand in the audit trail
}
