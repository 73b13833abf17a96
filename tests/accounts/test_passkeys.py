"""Passkeys: which of them open alone, and by what."""

import time
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from django.test import Client

from storage_admin.accounts.models import AuditEntry, User
from tests.accounts.security_key import HOST, TOUCHED, VERIFIED, SecurityKey
from tests.accounts.signing_in import PASSWORD, is_in, sign_in, signed_in

ADD = "/account/second-factor/passkeys/add/"
ALONE, SECOND = "/login/passkey/", "/login/second-step/"
RESIDENT: dict[str, Any] = {"credProps": {"rk": True}}


def added(user: User, *, alone: bool, extensions: dict[str, Any]) -> SecurityKey:
    """A key that its owner has added, to sign in with it alone or not; ``extensions`` are what the browser reports."""
    client = signed_in(user.username, HTTP_HOST=HOST)
    client.post(client.get(ADD)["Location"], {"password": PASSWORD})
    challenge = client.get(ADD).context["js_data"]["creation_options"]["publicKey"]["challenge"]
    key = SecurityKey(user)
    form = {"name": "key", "credential": key.registered(challenge, extensions)}
    form |= {"passwordless": "on"} if alone else {}
    assert client.post(ADD, form).status_code == 302
    assert Authenticator.objects.filter(user=user, type="webauthn").exists()
    return key


def asked_alone(client: Client) -> str:
    told = client.get(ALONE, headers={"X-Requested-With": "XMLHttpRequest"}).json()
    return str(told["request_options"]["publicKey"]["challenge"])


def asked_second(client: Client) -> str:
    return str(client.get(SECOND).context["js_data"]["request_options"]["publicKey"]["challenge"])


@pytest.mark.parametrize(
    ("alone", "extensions"), [(True, RESIDENT), (True, {}), (False, RESIDENT), (False, {"credProps": {"rk": False}})]
)
def test_what_was_added_for_that_opens_alone_and_nothing_else(
    bob: User, alone: bool, extensions: dict[str, Any]
) -> None:
    key = added(bob, alone=alone, extensions=extensions)
    client = Client(HTTP_HOST=HOST)
    answer = client.post(ALONE, {"credential": key.signed(asked_alone(client), VERIFIED)}, follow=True)
    assert is_in(client) is alone
    assert ("This code is wrong" in answer.content.decode()) is not alone
    assert AuditEntry.objects.filter(what="sign-in failed", refused=True).exists() is not alone
    second = Client(HTTP_HOST=HOST)
    assert sign_in(second) == SECOND
    second.post(SECOND, {"credential": key.signed(asked_second(second), TOUCHED)})
    assert is_in(second), "behind a password each of them opens"


def test_a_touch_opens_nothing_alone_with_the_challenge_of_a_second_step(
    bob: User, root: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = added(bob, alone=True, extensions=RESIDENT)
    added(root, alone=False, extensions={})
    client = Client(HTTP_HOST=HOST)
    sign_in(client, "root")
    signed = key.signed(asked_second(client), TOUCHED)
    now = time.time() + 16 * 60  # the sign-in that it was for has ended by then
    monkeypatch.setattr("allauth.account.internal.stagekit.time.time", lambda: now)
    client.post(ALONE, {"credential": signed})
    assert not is_in(client)
