"""Users, tokens and the audit trail as the API shows them."""

from typing import Any

from django.utils.translation import gettext_lazy as _
from rest_framework import serializers

from storage_admin.accounts.models import ROLE_CHOICES, AuditEntry, Session, Token, User
from storage_admin.rest.fields import Body, StrictBoolean, StrictText, TextOrNull


class TokenSerializer(serializers.ModelSerializer[Token]):
    """A token; its secret is not kept."""

    hosts = serializers.ListField(child=serializers.CharField(), read_only=True, help_text="Slugs; empty: every host.")

    class Meta:
        model = Token
        fields = ("id", "name", "role", "hosts", "expires", "created", "created_by", "last_used")
        read_only_fields = fields


class NewTokenSerializer(TokenSerializer):
    """A token right after it was made, with its secret, which is shown here only."""

    secret = serializers.CharField(read_only=True, help_text=_("For “Authorization: Bearer …”. It is not shown again."))

    class Meta:
        model = Token
        fields = (*TokenSerializer.Meta.fields, "secret")
        read_only_fields = fields


class TokenBody(Body):
    """What a token is to be."""

    name = StrictText(max_length=100)
    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    hosts = serializers.ListField(child=serializers.SlugField(), required=False, max_length=1000)
    expires = serializers.DateTimeField(required=False, allow_null=True)


class UserSerializer(serializers.ModelSerializer[User]):
    """Somebody who signs in with a password."""

    email = TextOrNull()
    hosts = serializers.ListField(child=serializers.CharField(), read_only=True, help_text="Slugs; empty: every host.")

    class Meta:
        model = User
        fields = (
            "id", "username", "role", "hosts", "email", "is_active", "must_change_password", "date_joined",
            "last_login",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "must_change_password": {"help_text": "Whether they still have the one-time password that an admin gave."}
        }


class NewUserSerializer(UserSerializer):
    """A user right after they were added, with the one-time password, which is shown here only."""

    password = serializers.CharField(read_only=True, help_text=_("Must be changed at the first sign-in."))

    class Meta:
        model = User
        fields = (*UserSerializer.Meta.fields, "password")
        read_only_fields = fields


class UserChanges(Body):
    """What is to change of a user; what is not given stays."""

    role = serializers.ChoiceField(choices=ROLE_CHOICES, required=False)
    hosts = serializers.ListField(
        child=StrictText(max_length=100), required=False, max_length=1000, help_text=_("Slugs; empty: every host.")
    )
    email = serializers.EmailField(required=False, allow_blank=True, max_length=254)
    is_active = StrictBoolean(required=False)


class UserBody(Body):
    """Who is to be added."""

    username = StrictText(max_length=150)
    role = serializers.ChoiceField(choices=ROLE_CHOICES)
    hosts = serializers.ListField(
        child=serializers.SlugField(), required=False, max_length=1000, help_text=_("Slugs; empty: every host.")
    )
    email = serializers.EmailField(required=False, allow_blank=True, max_length=254)


class NothingBody(Body):
    """The address says it all."""


class PasswordSerializer(serializers.Serializer[Any]):
    """A one-time password, which is shown here only."""

    password = serializers.CharField()


class EndedSerializer(serializers.Serializer[Any]):
    """How many sessions have ended."""

    ended = serializers.IntegerField()


class RemovedSerializer(serializers.Serializer[Any]):
    """What somebody had beside their password."""

    removed = serializers.ListField(child=serializers.CharField())


class SessionSerializer(serializers.ModelSerializer[Session]):
    """A browser in which somebody is signed in."""

    id = serializers.UUIDField(source="uid", read_only=True)
    browser = TextOrNull()

    class Meta:
        model = Session
        fields = ("id", "since", "seen", "address", "browser")
        read_only_fields = fields


class LockoutSerializer(serializers.Serializer[Any]):
    """A user name that cannot sign in from an address, whatever the password."""

    id = serializers.IntegerField()
    username = serializers.CharField()
    address = serializers.CharField(allow_null=True)
    failures = serializers.IntegerField(help_text=_("Wrong passwords since the last right one."))
    until = serializers.DateTimeField(help_text=_("When it expires."))


class AuditEntrySerializer(serializers.ModelSerializer[AuditEntry]):
    """One thing that somebody did."""

    before = serializers.JSONField(read_only=True, allow_null=True)
    after = serializers.JSONField(read_only=True, allow_null=True)

    class Meta:
        model = AuditEntry
        fields = ("id", "at", "who", "what", "target", "before", "after", "refused", "address")
        read_only_fields = fields
