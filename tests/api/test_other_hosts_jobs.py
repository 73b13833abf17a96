"""What a refusal says of a job on another host that holds the same image."""

from collections.abc import Callable

import pytest
from rest_framework.test import APIClient

from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.factories import HostFactory, ImageFactory, StoragePoolFactory
from tests.working import OPERATOR

pytestmark = pytest.mark.sql


@pytest.mark.usefixtures("quiet")
def test_a_job_of_another_host_that_holds_the_image_is_not_named(client_of: Callable[..., APIClient]) -> None:
    alpha, beta = HostFactory.create(slug="alpha"), HostFactory.create(slug="beta")
    template = ImageFactory.create(pool=StoragePoolFactory.create(host=beta), name="payroll.qcow2")
    clone = ImageFactory.create(pool=StoragePoolFactory.create(host=alpha), backing=template)
    holder = services.submit(OPERATOR, "reclaim", template.pk, {})
    body = {"kind": "reclaim", "image": clone.pk}
    refused = client_of("operator", hosts=["alpha"]).post("/api/v1/jobs/", body, format="json")
    assert (refused.status_code, refused.json()["code"]) == (409, "busy"), refused.json()
    assert refused.json()["detail"].startswith("A job on another host needs the same image")
    services.cancel(OPERATOR, holder)
    assert services.submit(OPERATOR, "reclaim", clone.pk, {}).state == Job.State.QUEUED
