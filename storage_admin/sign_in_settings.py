"""The settings of signing in: passwords and lockouts, the second factor, a site's own directory (docs/access.md)."""

from datetime import timedelta

import environ
from django.core.exceptions import ImproperlyConfigured

from storage_admin.directory_settings import groups, ldap_settings, require_tls

env = environ.Env()

AUTH_USER_MODEL = "accounts.User"
# The first stops who tries too often, before anything is hashed; the second who is locked out.
AUTHENTICATION_BACKENDS = [
    "storage_admin.accounts.tries.TriesBackend",
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
#: For each address (of IPv6, each network of 64 bits), in each web process.
SIGN_IN_TRIES_PER_MINUTE = env.int("SIGN_IN_TRIES_PER_MINUTE", default=20)
PASSWORD_HASHERS = ["storage_admin.accounts.tries.Hasher"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"
# django-allauth has the second step of signing in: no sign-up, no mail, no password by mail.
ACCOUNT_ADAPTER = "storage_admin.accounts.adapters.AccountAdapter"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
# A second line behind lockouts: of codes and passwords asked for again, from however many addresses.
ACCOUNT_RATE_LIMITS = {"login_failed": "30/m/ip,10/5m/key"}
MFA_ADAPTER = "storage_admin.accounts.adapters.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
#: Roles that have to have a second factor, besides those that admins choose on the page Users.
SECOND_FACTOR_ROLES = [role.strip() for role in env.list("SECOND_FACTOR_ROLES", default=[])]
if wrong := set(SECOND_FACTOR_ROLES) - {"viewer", "operator", "admin"}:
    raise ImproperlyConfigured(f"SECOND_FACTOR_ROLES: {wrong.pop()!r} is no role: choose of viewer, operator, admin.")
# Codes that were used, and tries of them, are counted for all web processes together.
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "cache",
        "OPTIONS": {"MAX_ENTRIES": 10_000},
    }
}
# --- A site's own directory (docs/access.md) ------------------------------------------------------------------------
#: Groups of it and what they give: {"admins": {"role": "admin"}, "berlin": {"role": "operator", "hosts": ["hv1"]}}.
SIGN_IN_GROUPS = groups(env.str("SIGN_IN_GROUPS", default=""))
OIDC_URL = env.str("OIDC_URL", default="")
OIDC_NAME = env.str("OIDC_NAME", default="") or "single sign-on"
OIDC_CLIENT_ID, OIDC_CLIENT_SECRET = env.str("OIDC_CLIENT_ID", default=""), env.str("OIDC_CLIENT_SECRET", default="")
OIDC_SCOPES = env.str("OIDC_SCOPES", default="").split() or ["openid", "profile", "email"]
OIDC_GROUPS_CLAIM = env.str("OIDC_GROUPS_CLAIM", default="") or "groups"
SOCIALACCOUNT_ADAPTER = "storage_admin.accounts.oidc.SiteAdapter"
SOCIALACCOUNT_LOGIN_ON_GET = True  # a form's redirect elsewhere would need a hole in the policy for forms
SOCIALACCOUNT_EMAIL_AUTHENTICATION = SOCIALACCOUNT_STORE_TOKENS = SOCIALACCOUNT_QUERY_EMAIL = False
LDAP_URL = env.str("LDAP_URL", default="")
LDAP_NAME_ATTRIBUTE = env.str("LDAP_NAME_ATTRIBUTE", default="") or "uid"
LDAP_ID_ATTRIBUTE = env.str("LDAP_ID_ATTRIBUTE", default="") or "entryUUID"
if LDAP_URL:
    AUTHENTICATION_BACKENDS.append("storage_admin.accounts.ldap.LdapBackend")
globals().update(ldap_settings(env, LDAP_URL, [LDAP_NAME_ATTRIBUTE, LDAP_ID_ATTRIBUTE, "mail"]))
require_tls("OIDC_URL", OIDC_URL)

AXES_FAILURE_LIMIT = 6
AXES_COOLOFF_TIME = timedelta(minutes=15)
# Who tries again while locked out does not wait longer for that: the page says until when.
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_CLIENT_IP_CALLABLE = "storage_admin.accounts.addresses.tries_of"
AXES_USERNAME_CALLABLE = "storage_admin.accounts.lockouts.username_of"
AXES_LOCKOUT_CALLABLE = "storage_admin.accounts.lockouts.answer"
AXES_DISABLE_ACCESS_LOG = True  # sign-ins stand in the audit trail
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS = True
AXES_SENSITIVE_PARAMETERS = ["username", "ip_address", "old_password", "new_password1", "new_password2"]
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False  # no greeting at each start
