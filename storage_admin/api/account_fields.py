"""Users, tokens and the audit trail as the API shows them."""

from typing import Any

from django.utils.translation import gettext_lazy as _
from rest_framework import serializers

from storage_admin.accounts.models import ROLE_CHOICES, AuditEntry, Session, Token, User
from storage_admin.rest.fields import Body, StrictBoolean, StrictText, TextOrNull


class TokenSerializer(serializers.ModelSerializer[Token]):
    """An API token. Its secret is not stored."""

    hosts = serializers.ListField(
        child=serializers.CharField(), read_only=True, help_text="Slugs of hosts; empty for all hosts."
    )

    class Meta:
        model = Token
        fields = ("id", "name", "role", "hosts", "expires", "created", "created_by", "last_used")
        read_only_fields = fields


class NewTokenSerializer(TokenSerializer):
    """A new token with its secret, which is shown only once."""

    secret = serializers.CharField(
        read_only=True, help_text=_("Secret for the header “Authorization: Bearer …”. It is not shown again.")
    )

    class Meta:
        model = Token
        fields = (*TokenSerializer.Meta.fields, "secret")
        read_only_fields = fields


class TokenBody(Body):
    """A token to create."""

    name = StrictText(max_length=100)
    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    hosts = serializers.ListField(child=serializers.SlugField(), required=False, max_length=1000)
    expires = serializers.DateTimeField(required=False, allow_null=True)


class UserSerializer(serializers.ModelSerializer[User]):
    """A user of the dashboard."""

    email = TextOrNull()
    hosts = serializers.ListField(
        child=serializers.CharField(), read_only=True, help_text="Slugs of hosts; empty for all hosts."
    )

    class Meta:
        model = User
        fields = (
            "id", "username", "role", "hosts", "email", "is_active", "must_change_password", "date_joined",
            "last_login",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "must_change_password": {"help_text": "Whether the user still has a one-time password from an admin."}
        }


class NewUserSerializer(UserSerializer):
    """A new user with the one-time password, which is shown only once."""

    password = serializers.CharField(
        read_only=True, help_text=_("One-time password, which must be changed at the first sign-in.")
    )

    class Meta:
        model = User
        fields = (*UserSerializer.Meta.fields, "password")
        read_only_fields = fields


class UserChanges(Body):
    """Changes to a user; omitted fields stay unchanged."""

    role = serializers.ChoiceField(choices=ROLE_CHOICES, required=False)
    hosts = serializers.ListField(
        child=StrictText(max_length=100),
        required=False,
        max_length=1000,
        help_text=_("Slugs of hosts; empty for all hosts."),
    )
    email = serializers.EmailField(required=False, allow_blank=True, max_length=254)
    is_active = StrictBoolean(required=False)


class UserBody(Body):
    """A user to add."""

    username = StrictText(max_length=150)
    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    hosts = serializers.ListField(
        child=serializers.SlugField(),
        required=False,
        max_length=1000,
        help_text=_("Slugs of hosts; empty for all hosts."),
    )
    email = serializers.EmailField(required=False, allow_blank=True, max_length=254)


class NothingBody(Body):
    """An empty body."""


class PasswordSerializer(serializers.Serializer[Any]):
    """A one-time password, which is shown only once."""

    password = serializers.CharField()


class EndedSerializer(serializers.Serializer[Any]):
    """The number of sessions that were ended."""

    ended = serializers.IntegerField()


class RemovedSerializer(serializers.Serializer[Any]):
    """The second factors that were removed."""

    removed = serializers.ListField(child=serializers.CharField())


class SessionSerializer(serializers.ModelSerializer[Session]):
    """A browser session of a user."""

    id = serializers.UUIDField(source="uid", read_only=True)
    browser = TextOrNull()

    class Meta:
        model = Session
        fields = ("id", "since", "seen", "address", "browser")
        read_only_fields = fields


class LockoutSerializer(serializers.Serializer[Any]):
    """A user name that is locked for an address, whatever the password."""

    id = serializers.IntegerField()
    username = serializers.CharField()
    address = serializers.CharField(allow_null=True)
    failures = serializers.IntegerField(help_text=_("Wrong passwords since the last correct one."))
    until = serializers.DateTimeField(help_text=_("When the lockout ends."))


class AuditEntrySerializer(serializers.ModelSerializer[AuditEntry]):
    """An entry of the audit trail."""

    before = serializers.JSONField(read_only=True, allow_null=True)
    after = serializers.JSONField(read_only=True, allow_null=True)

    class Meta:
        model = AuditEntry
        fields = ("id", "at", "who", "what", "target", "before", "after", "refused", "address")
        read_only_fields = fields
