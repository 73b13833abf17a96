"""What django-allauth asks this dashboard: how a sign-in ends, what is said, where secrets are kept."""

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.account.internal.flows.login import get_authentication_records
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from storage_admin import sealing
from storage_admin.accounts import second_factor, sessions
from storage_admin.accounts.addresses import tries_of
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.directory import DeniedError
from storage_admin.accounts.models import User, audit

#: In a session: what stands for the password of a sign-in's first step.
_PASSWORD = "password_at_first_step"  # noqa: S105 (a name)
#: What is said when something was changed, by the name that it has there.
SENTENCES = {
    "mfa/messages/totp_activated.txt": _("The authenticator app was set up."),
    "mfa/messages/totp_deactivated.txt": _("The authenticator app was removed."),
    "mfa/messages/webauthn_added.txt": _("The passkey was added."),
    "mfa/messages/webauthn_removed.txt": _("The passkey was removed."),
    "mfa/messages/recovery_codes_generated.txt": _(
        "New recovery codes were created. Store them where you can reach them without your device."
    ),
}


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]
    """Nobody signs up and no mail is sent."""

    def is_open_for_signup(self, _request: HttpRequest) -> bool:
        return False

    def send_mail(self, *_mail: Any, **_more: Any) -> None:
        """Nothing is ever sent to a user's address."""

    def send_notification_mail(self, *_mail: Any, **_more: Any) -> None:
        """Changes stand in the audit trail."""

    def get_client_ip(self, request: HttpRequest) -> str:
        return tries_of(request) or "unknown"

    def respond_user_inactive(self, _request: HttpRequest, _user: User) -> HttpResponse:
        raise DeniedError(gettext("An admin has deactivated your account."))

    def pre_login(self, request: HttpRequest, user: User, **about: Any) -> HttpResponse | None:
        """The first step of each sign-in."""
        request.session[_PASSWORD] = user.get_session_auth_hash()
        answer: HttpResponse | None = super().pre_login(request, user, **about)
        return answer

    def login(self, request: HttpRequest, user: User) -> None:
        """The end of each sign-in, however it began. Much may have changed since its first step."""
        if not user.is_active or request.session.pop(_PASSWORD, "") != user.get_session_auth_hash():
            request.session.flush()
            if not user.is_active:
                self.respond_user_inactive(request, user)
            raise DeniedError(gettext("Your password has changed in the meantime. Sign in again."))
        records = get_authentication_records(request, user)
        # Whatever proved them: this one looks at each request whether the account is still active.
        user.backend = "django.contrib.auth.backends.ModelBackend"
        super().login(request, user)
        if second_factor.is_missing(user):
            request.session[second_factor.FIRST] = True
        sessions.begin(request)
        how = [second_factor.KINDS.get(record.get("type", ""), record["method"]) for record in records]
        after = {"browser": sessions.about(request)["browser"], "with": how}
        audit(actor_of(request), "signed in", after=after)

    def add_message(
        self, request: HttpRequest, level: int, message_template: str | None = None, *_context: Any,
        message: str | None = None, **_more: Any,
    ) -> None:  # fmt: skip
        if sentence := message or SENTENCES.get(message_template or ""):
            messages.add_message(request, level, sentence)


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]
    """Secrets are sealed as those of hosts are; a role's last second factor stays."""

    error_messages = DefaultMFAAdapter.error_messages | {
        "cannot_delete_authenticator": _("Your role requires a second factor. Set up another one first."),
        "incorrect_code": _("This code is wrong, or was already used."),
    }

    def encrypt(self, text: str) -> str:
        return sealing.lock(text).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return sealing.unlock(encrypted_text.encode())

    def can_delete_authenticator(self, authenticator: Any) -> bool:
        return second_factor.may_remove(authenticator)

    def generate_authenticator_name(self, user: User, type: Any) -> str:  # noqa: A002 (its name there)
        count = Authenticator.objects.filter(user=user, type=type).count()
        return gettext("Passkey {count}").format(count=count + 1) if count else gettext("Passkey")

    def get_totp_label(self, user: User) -> str:
        return user.username

    def _get_user_identifier(self, user: User) -> str:
        return user.username

    def _get_site_name(self) -> str:
        return "Storage Admin"
