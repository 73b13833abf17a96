"""What everybody is offered: who may change it, and who is not told of it."""

from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from storage_admin.accounts import saved_views
from storage_admin.accounts.models import Actor, AuditEntry, DefaultView, ForbiddenError, Role, SavedView, User
from storage_admin.hosts.models import Host
from tests.factories import (
    HostFactory,
    ImageFactory,
    ImageUseFactory,
    PolicyFactory,
    SavedViewFactory,
    StoragePoolFactory,
    TokenFactory,
    UserFactory,
)
from tests.working import reread

pytestmark = pytest.mark.sql

BACKEND = "django.contrib.auth.backends.ModelBackend"


@pytest.fixture
def view(db: None) -> SavedView:
    owner = UserFactory.create(username="olga", role="operator")
    return SavedViewFactory.create(user=owner, name="night shift", query="state=ok", shared=True)


LESS = [{"role": "viewer"}, {"hosts": ["alpha"]}]


@pytest.mark.parametrize("less", LESS)
@pytest.mark.parametrize("change", [{"name": "x"}, {"query": "state=missing"}, {"query": "", "shared": True}])
def test_who_may_not_share_any_more_does_not_change_what_everybody_sees(
    view: SavedView, less: dict[str, Any], change: dict[str, Any]
) -> None:
    User.objects.filter(username=view.by).update(**less)
    with pytest.raises(ForbiddenError):
        saved_views.change(User.objects.get().actor, view, **change)
    assert (reread(view).name, view.query, view.shared) == ("night shift", "state=ok", True)
    assert not AuditEntry.objects.exists()


@pytest.mark.parametrize("less", LESS)
def test_who_may_not_share_any_more_ends_the_sharing_and_deletes(view: SavedView, less: dict[str, Any]) -> None:
    User.objects.filter(username=view.by).update(**less)
    owner = User.objects.get().actor
    saved_views.change(owner, view, name=view.name, query=view.query)  # as it is already
    assert not saved_views.change(owner, view, name="mine", shared=False).shared
    assert saved_views.change(owner, view, name="mine alone").name == "mine alone"
    SavedView.objects.update(shared=True)
    saved_views.delete(owner, SavedView.objects.get())
    assert not SavedView.objects.exists()


def test_a_refused_change_of_a_view_has_changed_nothing(db: None) -> None:
    token = TokenFactory.create(name="nightly", role="operator", secret="sa_x")
    view = SavedViewFactory.create(user=None, by=f"token {token.name}", name="old", shared=True)
    client = APIClient(HTTP_AUTHORIZATION="Bearer sa_x")
    answer = client.patch(f"/api/v1/views/{view.pk}/", {"name": "new", "default": True}, format="json")
    assert answer.status_code == 400
    assert reread(view).name == "old"
    assert not AuditEntry.objects.exists()


def filters_on(host: Host) -> list[tuple[str, str]]:
    """Pages and filters that each name something on a host."""
    pool = StoragePoolFactory.create(host=host)
    image = ImageFactory.create(pool=pool)
    guest = ImageUseFactory.create(image=image, disk__guest__host=host).disk.guest
    policy = PolicyFactory.create(name=f"{host.slug}-nights", hosts=[host.pk])
    return [
        ("images", f"host={host.slug}&search=payroll-db"), ("images", f"host={host.pk}"), ("images", f"pool={pool.pk}"),
        ("images", f"guest={guest.pk}"), ("jobs", f"image={image.pk}&state=failed"), ("alerts", f"host={host.slug}"),
        ("ledger", f"policy={policy.name}"),
    ]  # fmt: skip


def test_a_shared_view_that_names_what_is_on_another_host_does_not_exist_for_who_is_limited(db: None) -> None:
    alpha, beta = HostFactory.create(slug="alpha"), HostFactory.create(slug="beta")
    for slug, host in (("alpha", alpha), ("beta", beta)):
        for number, (page, query) in enumerate(filters_on(host)):
            SavedViewFactory.create(page=page, query=query, name=f"{slug} {number}", shared=True)
    SavedViewFactory.create(name="all", query="state=ok", shared=True)
    limited = Actor("ann", Role.OPERATOR, frozenset({"alpha"}), user_id=UserFactory.create().pk)
    names = set(saved_views.views_for(limited).values_list("name", flat=True))
    assert names == {"all", *(f"alpha {number}" for number in range(7))}
    assert saved_views.views_for(Actor("ada", Role.ADMIN)).count() == 15


def test_ones_own_view_stays_whatever_it_names(db: None) -> None:
    HostFactory.create(slug="beta")
    user = UserFactory.create(hosts=["alpha"])
    SavedViewFactory.create(user=user, query="host=beta")
    assert saved_views.views_for(user.actor).count() == 1


def test_no_page_opens_with_a_view_that_does_not_exist_for_its_user(db: None) -> None:
    HostFactory.create(slug="alpha")
    user = UserFactory.create()
    view = SavedViewFactory.create(query="host=beta&search=payroll-db", shared=True)
    HostFactory.create(slug="beta")
    DefaultView.objects.create(user=user, page="images", view=view)
    client = Client()
    client.force_login(user, BACKEND)
    assert "payroll-db" in client.get("/images/")["Location"]
    User.objects.filter(pk=user.pk).update(hosts=["alpha"])
    page = client.get("/images/")
    assert page.status_code == 200
    assert "payroll-db" not in page.content.decode()
