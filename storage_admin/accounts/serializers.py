"""Users, tokens and the audit trail as the API shows them."""

from rest_framework import serializers

from storage_admin.accounts.models import AuditEntry, Token, User
from storage_admin.accounts.roles import ROLE_CHOICES
from storage_admin.api.fields import Body, StrictText, TextOrNull


class TokenSerializer(serializers.ModelSerializer[Token]):
    """A token; its secret is not kept."""

    hosts = serializers.ListField(child=serializers.CharField(), read_only=True, help_text="Slugs; empty: every host.")

    class Meta:
        model = Token
        fields = ("id", "name", "role", "hosts", "expires", "created", "created_by", "last_used")
        read_only_fields = fields


class NewTokenSerializer(TokenSerializer):
    """A token right after it was made, with its secret, which is shown here only."""

    secret = serializers.CharField(read_only=True, help_text="For “Authorization: Bearer …”. It is not shown again.")

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

    class Meta:
        model = User
        fields = ("id", "username", "role", "email", "is_active", "date_joined", "last_login")
        read_only_fields = fields


class AuditEntrySerializer(serializers.ModelSerializer[AuditEntry]):
    """One thing that somebody did."""

    before = serializers.JSONField(read_only=True, allow_null=True)
    after = serializers.JSONField(read_only=True, allow_null=True)

    class Meta:
        model = AuditEntry
        fields = ("id", "at", "who", "what", "target", "before", "after")
        read_only_fields = fields
