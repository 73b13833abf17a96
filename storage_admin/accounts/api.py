"""Endpoints of tokens, users and the audit trail: for admins who are limited to no host."""

from typing import Any

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts.models import AuditEntry, Token, User
from storage_admin.accounts.roles import Role
from storage_admin.accounts.serializers import (
    AuditEntrySerializer,
    NewTokenSerializer,
    TokenBody,
    TokenSerializer,
    UserSerializer,
)
from storage_admin.accounts.services import create_token, delete_token
from storage_admin.api.views import EndpointSet


class AdminEndpoints(EndpointSet):
    """What concerns every host is not for a token that is limited to some."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        self.actor.require_everywhere(Role.ADMIN)


@extend_schema_view(
    list=extend_schema(summary="API tokens (admin)"), destroy=extend_schema(summary="Take a token away (admin)")
)
class TokenEndpoints(mixins.ListModelMixin, mixins.DestroyModelMixin, AdminEndpoints):
    queryset = Token.objects.all()
    serializer_class = TokenSerializer

    @extend_schema(
        summary="Make a token (admin)",
        description="The answer carries the token's secret. It is not kept, and cannot be shown again.",
        request=TokenBody,
        responses={201: NewTokenSerializer},
    )
    def create(self, request: Request) -> Response:
        body = TokenBody(data=request.data)
        body.is_valid(raise_exception=True)
        given = body.validated_data
        try:
            token, secret = create_token(
                self.actor,
                given["name"],
                Role.named(given["role"]),
                hosts=given.get("hosts", ()),
                expires=given.get("expires"),
            )
        except ValueError as error:
            raise ValidationError({"expires" if "later time" in str(error) else "name": str(error)}) from None
        token.secret = secret  # type: ignore[attr-defined]
        return Response(NewTokenSerializer(token).data, status=status.HTTP_201_CREATED)

    def perform_destroy(self, instance: Token) -> None:
        delete_token(self.actor, instance)


@extend_schema_view(list=extend_schema(summary="Users (admin)"), retrieve=extend_schema(summary="One user (admin)"))
class UserEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, AdminEndpoints):
    queryset = User.objects.order_by("username")
    serializer_class = UserSerializer


@extend_schema_view(list=extend_schema(summary="Who did what, newest first (admin)"))
class AuditEndpoints(mixins.ListModelMixin, AdminEndpoints):
    queryset = AuditEntry.objects.all()
    serializer_class = AuditEntrySerializer
