# mypy: disable-error-code="no-untyped-call"
"""Rows for tests, plausible by default: sizes in bytes, names unique, everything known unless said otherwise."""

import hashlib
import uuid
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db.models import Model
from django.utils import timezone
from factory.declarations import LazyAttribute, LazyFunction, Maybe, SelfAttribute, Sequence, SubFactory, Trait
from factory.django import DjangoModelFactory, Password
from factory.helpers import post_generation

from images.models import Image, ImageSample, ImageUse, Policy, PolicyPick, PolicyRun
from images.policies.shape import Rules
from storage_admin import sealing
from storage_admin.accounts.models import AuditEntry, SavedView, Token, User
from storage_admin.accounts.services import digest_of
from storage_admin.events.models import Alert, Delivery, Event, Webhook
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host, PoolSample, StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs import kinds
from storage_admin.jobs.models import IdempotentAnswer, Job, JobLog, ResourceLock, Worker

MIB = 1 << 20
GIB = 1 << 30

M = TypeVar("M", bound=Model)


class Rows(DjangoModelFactory[M]):
    """Rows of one model."""

    class Meta:
        abstract = True

    @classmethod
    def create(cls, **values: Any) -> M:
        return super().create(**values)


class UserFactory(Rows[User]):
    class Meta:
        model = User
        skip_postgeneration_save = True

    username = Sequence(lambda n: f"user{n}")
    password = Password("correct horse battery staple")
    role = "viewer"


class SavedViewFactory(Rows[SavedView]):
    """A view of the images page that is its user's own."""

    class Meta:
        model = SavedView

    user = SubFactory(UserFactory)
    by = LazyAttribute(lambda view: view.user.username if view.user else "token nightly")
    page = "images"
    name = Sequence(lambda n: f"view{n}")
    query = "state=ok"


class TokenFactory(Rows[Token]):
    """``TokenFactory(secret="x")`` makes a token that ``Authorization: Bearer x`` opens."""

    class Meta:
        model = Token

    class Params:
        secret = Sequence(lambda n: f"sa_secret-{n}")

    name = Sequence(lambda n: f"token{n}")
    digest = LazyAttribute(lambda token: digest_of(token.secret))
    role = "viewer"
    created_by = "admin"


class AuditEntryFactory(Rows[AuditEntry]):
    class Meta:
        model = AuditEntry

    who = "admin"
    what = "token created"
    target = Sequence(lambda n: f"token{n}")


class AlertFactory(Rows[Alert]):
    """A pool that is over its threshold, open; ``host`` is a slug."""

    class Meta:
        model = Alert

    key = Sequence(lambda n: f"pool_over_threshold:{n}")
    kind = LazyAttribute(lambda alert: alert.key.partition(":")[0])
    severity = "warning"
    title = Sequence(lambda n: f"pool {n} is over its threshold of 85 %")
    detail = "91 % used: 91 of 100 GiB."


class WebhookFactory(Rows[Webhook]):
    """A webhook to nobody, with the secret ``whsec_of-the-tests``."""

    class Meta:
        model = Webhook

    name = Sequence(lambda n: f"webhook{n}")
    url = "http://127.0.0.1:9/hook"
    secret_locked = LazyFunction(lambda: sealing.lock("whsec_of-the-tests"))
    created_by = "admin"


class EventFactory(Rows[Event]):
    class Meta:
        model = Event

    name = "job.finished"


class DeliveryFactory(Rows[Delivery]):
    class Meta:
        model = Delivery

    event = SubFactory(EventFactory)
    webhook = SubFactory(WebhookFactory)


class HostFactory(Rows[Host]):
    """A host that answers and whose guests are known."""

    class Meta:
        model = Host

    slug = Sequence(lambda n: f"host{n}")
    name = LazyAttribute(lambda host: f"Host {host.slug}")
    kind = Host.Kind.LOCAL
    transport = "local"
    status = Host.Status.OK
    status_detail = ""
    owners_unknown = ""
    last_seen = LazyFunction(timezone.now)
    capabilities = LazyFunction(lambda: {"qemu_img": "7.2.22", "zstd": True, "uid": 0})


class StoragePoolFactory(Rows[StoragePool]):
    """A folder of 100 GiB with 40 GiB free, on a filesystem of its own; or one of Proxmox VE's storages of volumes."""

    class Meta:
        model = StoragePool

    class Params:
        volumes = Trait(
            source="proxmox", path_bytes=b"", path_key=SelfAttribute("name"), capacity_bytes=None, available_bytes=None
        )

    host = SubFactory(HostFactory)
    name = Sequence(lambda n: f"pool{n}")
    path = LazyAttribute(lambda pool: f"/srv/{pool.name}")
    path_bytes = LazyAttribute(lambda pool: pool.path.encode())
    path_key = LazyAttribute(lambda pool: path_key(pool.path.encode()))
    shared_key = LazyAttribute(lambda pool: f"{pool.host.slug}:{pool.path}")
    fs_key = LazyAttribute(lambda pool: f"{pool.host.slug}:{pool.name}")
    filesystem = "ext4"
    state = "ok"
    capacity_bytes = 100 * GIB
    available_bytes = 40 * GIB
    last_scanned = LazyFunction(timezone.now)


class PoolSampleFactory(Rows[PoolSample]):
    class Meta:
        model = PoolSample

    pool = SubFactory(StoragePoolFactory)
    at = LazyFunction(timezone.now)
    capacity_bytes = 100 * GIB
    available_bytes = 40 * GIB


class WorkerFactory(Rows[Worker]):
    """A worker that was alive this very moment."""

    class Meta:
        model = Worker

    name = Sequence(lambda n: f"worker{n}")


class JobFactory(Rows[Job]):
    """A queued scan; ``JobFactory(kind="reclaim", target=image)`` aims at an image."""

    class Meta:
        model = Job

    class Params:
        target: Any = None

    kind = "scan"
    rewrites = LazyAttribute(lambda job: job.kind == "reclaim")
    host = LazyAttribute(
        lambda job: (
            HostFactory() if job.target is None else job.target if isinstance(job.target, Host) else job.target.host
        )
    )
    target_kind = LazyAttribute(lambda job: "host" if job.target is None else _kind_of(job.target))
    target_id = LazyAttribute(lambda job: job.host.pk if job.target is None else job.target.pk)
    target_label = LazyAttribute(lambda job: str(job.target or job.host))
    created_by = "admin"


def _kind_of(target: Any) -> str:
    return {Image: "image", Host: "host", StoragePool: "pool", Guest: "guest", Job: "job"}[type(target)]


class JobLogFactory(Rows[JobLog]):
    class Meta:
        model = JobLog

    job = SubFactory(JobFactory)
    text = Sequence(lambda n: f"line {n}")


class ResourceLockFactory(Rows[ResourceLock]):
    class Meta:
        model = ResourceLock

    job = SubFactory(JobFactory)
    key = Sequence(lambda n: f"image:{n}")
    exclusive = True


class IdempotentAnswerFactory(Rows[IdempotentAnswer]):
    class Meta:
        model = IdempotentAnswer

    actor = "admin"
    key = Sequence(lambda n: f"key{n}")
    request_digest = LazyAttribute(lambda answer: digest_of(answer.key))
    job = SubFactory(JobFactory)


class GuestFactory(Rows[Guest]):
    """A libvirt domain that is shut off."""

    class Meta:
        model = Guest

    host = SubFactory(HostFactory)
    kind = Guest.Kind.DOMAIN
    uid = LazyFunction(lambda: str(uuid.uuid4()))
    name = Sequence(lambda n: f"guest{n}")
    state = "shut off"
    last_seen = LazyFunction(timezone.now)


class GuestDiskFactory(Rows[GuestDisk]):
    class Meta:
        model = GuestDisk

    guest = SubFactory(GuestFactory)
    target = Sequence(lambda n: f"vd{n}")
    path = Sequence(lambda n: f"/srv/disk{n}.qcow2")
    path_bytes = LazyAttribute(lambda disk: disk.path.encode())
    path_key = LazyAttribute(lambda disk: path_key(disk.path.encode()))
    format = "qcow2"
    cache = "none"
    discard = "unmap"


class ImageFactory(Rows[Image]):
    """A standalone qcow2 image: 10 GiB virtual, 4 GiB physical, not in use, not analyzed.

    ``ImageFactory(backing=base)`` makes an overlay; the base's ``overlays_count`` stays the test's business.
    """

    class Meta:
        model = Image
        skip_postgeneration_save = True

    backing: Any = None
    pool = Maybe("backing", SelfAttribute("backing.pool"), SubFactory(StoragePoolFactory))
    host = SelfAttribute("pool.host")
    name = Sequence(lambda n: f"disk{n}.qcow2")
    path = LazyAttribute(lambda image: f"{image.pool.path}/{image.name}")
    path_bytes = LazyAttribute(lambda image: image.path.encode())
    path_key = LazyAttribute(lambda image: path_key(image.path.encode()))
    fingerprint = LazyAttribute(lambda image: hashlib.md5(image.path.encode()).digest())
    dev = "64769"
    inode = Sequence(lambda n: str(1000 + n))
    mtime_ns = 1_700_000_000_000_000_000
    ctime_ns = 1_700_000_000_000_000_000
    virtual_size = 10 * GIB
    allocated_size = 4 * GIB
    file_size = LazyAttribute(lambda image: image.allocated_size + MIB)
    format = "qcow2"
    declared_format = "qcow2"
    declared_by = "extension"
    cluster_size = 65536
    compression = "zlib"
    preallocation = "off"
    encrypted = False
    backing_file = LazyAttribute(lambda image: image.backing.path if image.backing else "")
    backing_format = LazyAttribute(lambda image: image.backing.format if image.backing else "")
    backing_path = LazyAttribute(lambda image: image.backing.path if image.backing else "")
    backing_key = LazyAttribute(lambda image: image.backing.path_key if image.backing else "")
    root_id = LazyAttribute(lambda image: image.backing.root_id if image.backing else None)
    chain_depth = LazyAttribute(lambda image: image.backing.chain_depth + 1 if image.backing else 1)
    in_use = False
    orphan = False
    first_seen = LazyFunction(timezone.now)
    seen = LazyFunction(timezone.now)
    listed = True

    @post_generation
    def own_root(self: Any, create: bool, _extracted: Any, **_kwargs: Any) -> None:
        """A standalone image is the root of its own tree."""
        if create and self.root_id is None:
            self.root_id = self.pk
            Image.every.filter(pk=self.pk).update(root_id=self.pk)


class ImageSampleFactory(Rows[ImageSample]):
    class Meta:
        model = ImageSample

    image = SubFactory(ImageFactory)
    at = LazyFunction(timezone.now)
    virtual_size = SelfAttribute("image.virtual_size")
    allocated_size = SelfAttribute("image.allocated_size")
    file_size = SelfAttribute("image.file_size")


class ImageUseFactory(Rows[ImageUse]):
    """``ImageUseFactory(image=image, disk__guest=guest)``: the guest's disk is the image."""

    class Meta:
        model = ImageUse

    image = SubFactory(ImageFactory)
    disk = SubFactory(
        GuestDiskFactory,
        path=SelfAttribute("..image.path"),
        format=SelfAttribute("..image.format"),
        guest__host=SelfAttribute("...image.host"),
    )


class PolicyFactory(Rows[Policy]):
    """Reclaims whatever wins anything, each night at 22:00 UTC, for six hours; one job at once on each host."""

    class Meta:
        model = Policy

    name = Sequence(lambda n: f"nights{n}")
    cron = "0 22 * * *"
    created_by = "admin"
    options = LazyFunction(lambda: kinds.get("reclaim").clean({}))


class PolicyRunFactory(Rows[PolicyRun]):
    """A run that is at work; it has chosen nothing yet."""

    class Meta:
        model = PolicyRun

    policy = SubFactory(PolicyFactory)
    due = LazyFunction(timezone.now)
    ends = LazyAttribute(lambda run: run.due + timedelta(hours=6))
    rules = LazyAttribute(lambda run: Rules.of(run.policy).as_json())
    by = LazyAttribute(lambda run: f"policy {run.policy.name}")


class PolicyPickFactory(Rows[PolicyPick]):
    """An image that waits for its turn."""

    class Meta:
        model = PolicyPick

    run = SubFactory(PolicyRunFactory)
    image = SubFactory(ImageFactory)
    pool = SelfAttribute("image.pool")
    host = SelfAttribute("image.host")
    label = SelfAttribute("image.name")
    place = Sequence(lambda n: n + 1)


def an_hour_ago() -> datetime:
    return timezone.now() - timedelta(hours=1)
