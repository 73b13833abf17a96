"""Settings of a dashboard whose clock the test moves."""

from tests.nights import clock

clock.install()

from storage_admin.settings import *  # noqa: E402, F403 (settings are all of them; the clock comes first)

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
