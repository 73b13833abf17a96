"""An admin looks at the files of a guest that is off, where that is allowed; each path stands in the trail."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from images import download, files
from images.models import Image
from storage_admin.accounts.models import AuditEntry, ForbiddenError
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host, StoragePool
from tests.agent.harness import make_image, qemu_img
from tests.agent.test_files import SECRET, disk
from tests.factories import ImageUseFactory
from tests.images.test_download import close
from tests.working import ADMIN, OPERATOR, client_as, image_at, refused_as, scan, scanned_machine

__all__ = ["disk"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
LOOKED = {
    "filesystems": [
        {"device": "/dev/sda1", "type": "ext4", "size": 1000, "free": 10, "why": ""},
        {"device": "/dev/sda2", "type": "swap", "size": None, "free": None, "why": ""},
        {"device": "/dev/sda3", "type": "ntfs", "size": None, "free": None, "why": "without <i> tools"},
    ],
    "systems": [
        {"root": "/dev/sda1", "type": "linux", "product": "Debian\n<b>", "distribution": "debian", "architecture": "x",
         "hostname": "web"}
    ],
}  # fmt: skip
LISTED = {
    "entries": [
        {"name": "<b>\n", "mode": 0o100644, "size": 5, "mtime": 1_700_000_000, "uid": 0, "gid": 1},
        {"name": "etc", "mode": 0o040755, "size": 4096, "mtime": 1 << 62, "uid": 0, "gid": 0},
        {"name": "null", "mode": 0o020666, "size": 0, "mtime": 0, "uid": 0, "gid": 0},
    ],
    "count": 7000,
}


@pytest.fixture
def image(tmp_path: Path) -> Image:
    make_image(tmp_path / "vm.qcow2")
    scanned_machine(tmp_path)
    StoragePool.objects.update(look_inside=True)
    return image_at(tmp_path / "vm.qcow2")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the agent is asked, in place of an appliance that starts."""
    found: list[dict[str, Any]] = []

    def told(_host: Host, verb: str, args: dict[str, Any], **_how: Any) -> Iterator[dict[str, Any]]:
        assert verb == "files"
        found.append(args)
        if args["do"] == "read":
            yield {"event": "data", "b64": b64(b"hello")}
            yield {"event": "result", "data": {"bytes": 5, "sha256": "0" * 64}}
        else:
            yield {"event": "result", "data": LOOKED if args["do"] == "look" else LISTED}

    monkeypatch.setattr(asking, "told", told)
    return found


def page(browser: Client, image: Image, query: str = "") -> str:
    answer = browser.get(f"/images/{image.pk}/files/{query}", headers={"HX-Request": "true"})
    assert answer.status_code == 200
    return answer.content.decode()


def test_pages_and_rest_show_what_the_disk_says_as_text(image: Image, asked: list[dict[str, Any]]) -> None:
    browser = client_as(role="admin")
    shell = browser.get(f"/images/{image.pk}/files/")
    assert (shell.status_code, asked) == (200, []), "the page comes before the machine starts"
    assert "<b>" not in (first := page(browser, image))
    assert "Debian\\n&lt;b&gt;" in first
    assert "device=%2Fdev%2Fsda1&amp;path=%2F" in first
    assert "sda2&amp;path" not in first, "a swap has no files"
    assert "without &lt;i&gt; tools" in first
    second = page(browser, image, "?device=/dev/sda1&path=/home/../var//log/")
    assert (asked[-1]["device"], asked[-1]["path"]) == ("/dev/sda1", "/var/log")
    assert "files/content/?device=%2Fdev%2Fsda1&amp;path=%2Fvar%2Flog%2F%3Cb%3E%0A" in second
    assert "path=%2Fvar%2Flog%2Fnull" not in second
    rest = browser.get(f"/api/v1/images/{image.pk}/files/?device=/dev/sda1&path=/etc").json()
    assert [(one["kind"], one["mode"], one["mtime"]) for one in rest["entries"]] == [
        ("file", "0644", "2023-11-14T22:13:20Z"), ("folder", "0755", None), ("device", "0666", "1970-01-01T00:00:00Z")
    ]  # fmt: skip
    assert rest["count"] == 7000
    looked = browser.get(f"/api/v1/images/{image.pk}/files/").json()
    assert looked["systems"][0]["filesystem"] == "/dev/sda1"
    assert [one["why"] for one in looked["filesystems"]] == ["", "", "without <i> tools"]
    told = AuditEntry.objects.filter(what="files of a guest looked at")
    assert [entry.after["path"] for entry in told if entry.after and "path" in entry.after] == ["/etc", "/var/log"]


def test_a_file_is_sent_and_told_of(image: Image, asked: list[dict[str, Any]]) -> None:
    for address in (f"/images/{image.pk}/files/content/", f"/api/v1/images/{image.pk}/files/content/"):
        answer: Any = client_as(role="admin").get(address, {"device": "/dev/sda1", "path": "/etc/a b"})
        assert b"".join(answer.streaming_content) == b"hello"
        assert answer["Content-Disposition"] == 'attachment; filename="a b"'
        entry = AuditEntry.objects.filter(what="image download ended").latest("pk")
        assert entry.after == {"image": image.pk, "path": "/etc/a b", "bytes": 5, "sha256": "0" * 64}
    odd: Any = client_as(role="admin").get(
        f"/images/{image.pk}/files/content/", {"device": "/dev/sda1", "path": "/x\n"}
    )
    assert (b"".join(odd.streaming_content), odd["Content-Disposition"]) == (b"hello", 'attachment; filename="x_"')
    assert AuditEntry.objects.filter(what="file of a guest downloaded").count() == 3
    for query in ({}, {"device": "/dev/sda1"}, {"device": "/dev/sda1", "path": "/\0"}):
        assert client_as(role="admin").get(f"/api/v1/images/{image.pk}/files/content/", query).status_code == 400


def test_only_admins_look_and_only_where_it_is_allowed(image: Image, asked: list[dict[str, Any]]) -> None:
    with pytest.raises(ForbiddenError):
        files.look(OPERATOR, image)
    assert client_as(role="operator").get(f"/api/v1/images/{image.pk}/files/").status_code == 403
    assert f"/images/{image.pk}/files/" in client_as(role="admin").get(f"/images/{image.pk}/").content.decode()
    guest = ImageUseFactory.create(image=image, disk__guest__state="running").disk.guest
    Image.objects.update(in_use=True)
    assert refused_as(files.look, ADMIN, image_at(Path(image.path))) == "guest_running"
    Image.objects.update(in_use=False)
    guest.delete()
    StoragePool.objects.update(look_inside=False)
    assert refused_as(files.look, ADMIN, image_at(Path(image.path))) == "inside_off"
    assert f"/images/{image.pk}/files/" not in client_as(role="admin").get(f"/images/{image.pk}/").content.decode()
    assert asked == []


def test_places_come_free_whatever_happens(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        for code in ("host_unreachable",):
            raise HostError("nobody there", code)
        yield {}

    monkeypatch.setattr(asking, "told", away)
    for _ in range(download.AT_ONCE + 1):
        assert refused_as(files.look, ADMIN, image) == "host_unreachable"
        assert refused_as(files.content, ADMIN, image, "/dev/sda1", "/x") == "host_unreachable"


def test_what_a_real_appliance_finds_is_shown_and_sent(image: Image, disk: Path) -> None:
    qemu_img("convert", "-O", "qcow2", disk, image.path)
    scan(image.host)
    browser = client_as(role="admin")
    looked = browser.get(f"/api/v1/images/{image.pk}/files/").json()
    assert [one["type"] for one in looked["filesystems"]] == ["ext4", "xfs"], looked
    answer: Any = browser.get(
        f"/api/v1/images/{image.pk}/files/content/", {"device": "/dev/sda1", "path": "/home/words"}
    )  # fmt: skip
    assert b"".join(answer.streaming_content) == SECRET
    close(answer)
    with pytest.raises(RefusedError):
        files.listing(ADMIN, image_at(Path(image.path)), "/dev/sda1", "/nowhere")
