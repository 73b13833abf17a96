"""Endpoints of tokens, users and the audit trail: for admins who are limited to no host."""

from typing import Any, ClassVar
from uuid import UUID

from axes.models import AccessAttempt
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from storage_admin.accounts import lockouts, second_factor, selectors, users
from storage_admin.accounts.filters import AuditFilters
from storage_admin.accounts.models import AuditEntry, Role, Token, User
from storage_admin.accounts.services import create_token, delete_token
from storage_admin.api.account_fields import (
    AuditEntrySerializer,
    EndedSerializer,
    LockoutSerializer,
    NewTokenSerializer,
    NewUserSerializer,
    NothingBody,
    PasswordSerializer,
    RemovedSerializer,
    SessionSerializer,
    TokenBody,
    TokenSerializer,
    UserBody,
    UserChanges,
    UserSerializer,
)
from storage_admin.rest.views import EndpointSet


class AdminEndpoints(EndpointSet):
    """Requires access to all hosts."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        self.actor.require_everywhere(Role.ADMIN)


@extend_schema_view(
    list=extend_schema(summary=_("API tokens (admin)")), destroy=extend_schema(summary=_("Delete a token (admin)"))
)
class TokenEndpoints(mixins.ListModelMixin, mixins.DestroyModelMixin, AdminEndpoints):
    queryset = Token.objects.all()
    serializer_class = TokenSerializer

    @extend_schema(
        summary=_("Create a token (admin)"),
        description=_("The response contains the token's secret. It is not stored and cannot be shown again."),
        request=TokenBody,
        responses={201: NewTokenSerializer},
    )
    def create(self, request: Request) -> Response:
        given = TokenBody.of(request)
        token, secret = create_token(
            self.actor,
            given["name"],
            Role.named(given["role"]),
            hosts=given.get("hosts", ()),
            expires=given.get("expires"),
        )
        token.secret = secret  # type: ignore[attr-defined]
        return Response(NewTokenSerializer(token).data, status=status.HTTP_201_CREATED)

    def perform_destroy(self, instance: Token) -> None:
        delete_token(self.actor, instance)


@extend_schema_view(
    list=extend_schema(summary=_("Users (admin)")), retrieve=extend_schema(summary=_("One user (admin)"))
)
class UserEndpoints(mixins.ListModelMixin, mixins.RetrieveModelMixin, AdminEndpoints):
    queryset = User.objects.order_by("username")
    serializer_class = UserSerializer
    parameters: ClassVar[dict[str, frozenset[str]]] = {"sessions": frozenset({"limit", "offset"})}

    @extend_schema(
        summary=_("Add a user (admin)"),
        description="The response contains a one-time password. It is not stored, and must be changed at the first "
        "sign-in.",
        request=UserBody,
        responses={201: NewUserSerializer},
    )
    def create(self, request: Request) -> Response:
        given = UserBody.of(request)
        user, password = users.add_user(
            self.actor, given["username"], Role.named(given["role"]), hosts=given.get("hosts", ()),
            email=given.get("email", ""),
        )  # fmt: skip
        user.password = password  # shown, not saved
        return Response(NewUserSerializer(user).data, status=status.HTTP_201_CREATED)

    @extend_schema(
        summary=_("Change a user (admin)"),
        description="Takes effect with the user's next request. A deactivated user is signed out everywhere. Refused "
        "with `last_admin` if no active local admin of all hosts would remain, and with `own_account` for changes to "
        "your own account other than the email.",
        request=UserChanges,
        responses=UserSerializer,
    )
    def partial_update(self, request: Request, **_where: Any) -> Response:
        user = self.get_object()
        given = UserChanges.of(request)
        if "role" in given:
            given["role"] = Role.named(given["role"])
        return Response(UserSerializer(users.change_user(self.actor, user, **given)).data)

    @extend_schema(
        summary=_("Reset a user's password to a one-time password (admin)"),
        description=_("Ends all sessions of the user."),
        request=NothingBody,
        responses=PasswordSerializer,
    )
    @action(detail=True, methods=["post"], url_path="reset-password", url_name="reset-password")
    def reset_password(self, request: Request, **_where: Any) -> Response:
        user = self.get_object()
        NothingBody.of(request)
        return Response({"password": users.reset_password(self.actor, user)})

    @extend_schema(
        summary=_("Remove a user's second factor (admin)"),
        description=_(
            "Removes the authenticator app, passkeys and recovery codes, for a lost device. Ends all sessions of the "
            "user."
        ),
        request=NothingBody,
        responses=RemovedSerializer,
    )
    @action(detail=True, methods=["post"], url_path="reset-second-factor", url_name="reset-second-factor")
    def reset_second_factor(self, request: Request, **_where: Any) -> Response:
        user = self.get_object()
        NothingBody.of(request)
        return Response({"removed": second_factor.reset(self.actor, user)})

    @extend_schema(summary=_("Active sessions of a user (admin)"), responses=SessionSerializer(many=True))
    @action(detail=True, methods=["get"])
    def sessions(self, _request: Request, **_where: Any) -> Response:
        rows = self.paginate_queryset(selectors.sessions_of(self.get_object()))
        return self.get_paginated_response(SessionSerializer(rows, many=True).data)

    @extend_schema(
        summary=_("Sign a user out of one browser (admin)"),
        responses={204: None},
        parameters=[OpenApiParameter("uid", UUID, OpenApiParameter.PATH, description=_("The session's `id`."))],
    )
    @action(detail=True, methods=["delete"], url_path="sessions/<uuid:uid>", url_name="session")
    def end_session(self, _request: Request, uid: UUID, **_where: Any) -> Response:
        if not users.end_session(self.actor, self.get_object(), uid):
            raise NotFound
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        summary=_("Sign a user out everywhere (admin)"),
        description=_("Tokens are not affected."),
        request=NothingBody,
        responses=EndedSerializer,
    )
    @action(detail=True, methods=["post"], url_path="end-sessions", url_name="end-sessions")
    def end_sessions(self, request: Request, **_where: Any) -> Response:
        user = self.get_object()
        NothingBody.of(request)
        return Response({"ended": users.end_sessions(self.actor, user)})


@extend_schema_view(list=extend_schema(summary=_("Locked accounts (admin)")))
class LockoutEndpoints(AdminEndpoints):
    queryset = AccessAttempt.objects.none()
    serializer_class = LockoutSerializer

    def list(self, _request: Request) -> Response:
        rows: Any = self.paginate_queryset(lockouts.lockouts())
        return self.get_paginated_response(LockoutSerializer(rows, many=True).data)

    @extend_schema(summary=_("Unlock an account (admin)"), responses={204: None})
    def destroy(self, _request: Request, pk: int) -> Response:
        found = next((one for one in lockouts.lockouts() if one.id == pk), None)
        if found is None:
            raise NotFound
        lockouts.unlock(self.actor, found)
        return Response(status=status.HTTP_204_NO_CONTENT)


@extend_schema_view(
    list=extend_schema(
        summary=_("Audit trail, newest first (admin)"),
        description="A request that is refused repeatedly is recorded once, and again after ten minutes with the "
        "number of times.",
    )
)
class AuditEndpoints(mixins.ListModelMixin, AdminEndpoints):
    queryset = AuditEntry.objects.all()
    serializer_class = AuditEntrySerializer
    filterset_class = AuditFilters
