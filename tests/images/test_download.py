"""The file of an image is downloaded, whole or on from where it broke off; what changes meanwhile is cut off."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.signals import request_finished
from django.db import close_old_connections
from django.test import Client

from images import download
from images.models import Image
from storage_admin.accounts.models import AuditEntry
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from tests.agent.harness import make_image, write
from tests.factories import ImageUseFactory
from tests.working import ADMIN, client_as, image_at, refused_as, scan, scanned_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]
MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Image:
    path = tmp_path / "vm disk.qcow2"
    make_image(path, "32M")
    for at in range(0, 20, 2):
        write(path, 0x30 + at, f"{at}M", "1M")
    scanned_machine(tmp_path)
    return image_at(path)


def get(browser: Client, image: Image, **headers: str) -> Any:
    return browser.get(f"/api/v1/images/{image.pk}/content/", headers=headers)


def body(answer: Any) -> bytes:
    return b"".join(answer.streaming_content)


def close(answer: Any) -> None:
    """As the web server does when the client goes away; the test's own connection to the database stays."""
    request_finished.disconnect(close_old_connections)
    try:
        answer.close()
    finally:
        request_finished.connect(close_old_connections)


def trail(what: str) -> dict[str, Any]:
    return dict(AuditEntry.objects.get(what=what).after or {})


def test_the_whole_file_comes_and_the_trail_has_its_digest(image: Image) -> None:
    answer = get(client_as(role="admin"), image)
    content, file = body(answer), Path(image.path).read_bytes()
    assert (answer.status_code, content == file) == (200, True)
    assert answer["Content-Length"] == str(len(file))
    assert answer["Content-Disposition"] == 'attachment; filename="vm disk.qcow2"'
    assert trail("image downloaded")["bytes"] == len(file)
    assert trail("image download ended")["sha256"] == hashlib.sha256(file).hexdigest()


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=100-199", 100, 200), ("bytes=1048576-", MIB, None), ("bytes=-512", -512, None),
        ("bytes=0-99999999999", 0, None),
    ],
)  # fmt: skip
def test_a_part_is_what_the_file_has_there(image: Image, asked: str, start: int, end: int | None) -> None:
    file = Path(image.path).read_bytes()
    answer = get(client_as(role="admin"), image, Range=asked)
    assert (answer.status_code, body(answer)) == (206, file[start:end])
    first = start if start >= 0 else len(file) + start
    assert answer["Content-Range"] == f"bytes {first}-{first + int(answer['Content-Length']) - 1}/{len(file)}"


def test_a_download_that_broke_off_goes_on_only_while_the_file_is_the_same(image: Image) -> None:
    browser, file = client_as(role="admin"), Path(image.path).read_bytes()
    answer: Any = download.answer(ADMIN, image)
    pieces, tag = iter(answer.streaming_content), answer["ETag"]
    begun = next(pieces)
    close(answer)
    rest = get(browser, image, **{"Range": f"bytes={len(begun)}-", "If-Range": tag})
    assert (rest.status_code, begun + body(rest) == file) == (206, True)
    write(Path(image.path), 0x99, "21M", "1M")
    scan(Host.objects.get())
    whole = get(browser, image, **{"Range": f"bytes={len(begun)}-", "If-Range": tag})
    assert (whole.status_code, body(whole) == Path(image.path).read_bytes()) == (200, True)


def test_nonsense_is_the_whole_file_and_what_lies_outside_is_an_error(image: Image) -> None:
    browser, size = client_as(role="admin"), Path(image.path).stat().st_size
    for asked in ("bytes=5", "bytes=-", "lines=1-2", "bytes=0-1,5-6"):
        answer = get(browser, image, Range=asked)
        assert (answer.status_code, len(body(answer))) == (200, size), asked
    outside = get(browser, image, Range=f"bytes={size}-")
    assert (outside.status_code, outside["Content-Range"]) == (416, f"bytes */{size}")


def test_only_admins_have_it_and_nobody_has_what_a_guest_uses(image: Image) -> None:
    assert get(client_as(role="operator"), image).status_code == 403
    ImageUseFactory.create(image=image, disk__guest__state="running")
    Image.objects.update(in_use=True)
    refused = get(client_as(role="admin"), image)
    assert (refused.status_code, refused.json()["code"]) == (409, "guest_running")


def test_a_file_that_somebody_writes_to_meanwhile_is_cut_off(image: Image) -> None:
    answer = get(client_as(role="admin"), image)
    pieces = iter(answer.streaming_content)
    next(pieces)
    write(Path(image.path), 7, "0", "1M")
    with pytest.raises(RefusedError):
        list(pieces)
    assert trail("image download ended")["sha256"] is None


def test_no_more_than_two_at_once_and_each_place_comes_free(image: Image) -> None:
    for _ in range(3):
        running = [download.answer(ADMIN, image) for _ in range(download.AT_ONCE)]
        assert refused_as(download.answer, ADMIN, image) == "busy"
        for one in running:
            close(one)


def test_a_host_that_does_not_answer_is_said_before_a_byte_is_sent(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Iterator[dict[str, Any]]:
        for code in ("host_unreachable",):
            raise HostError("nobody there", code)
        yield {}

    monkeypatch.setattr(asking, "told", away)
    for _ in range(download.AT_ONCE + 1):
        refused = get(client_as(role="admin"), image)
        assert (refused.status_code, refused.json()["code"]) == (409, "host_unreachable")


def test_a_head_request_tells_the_size_and_sends_nothing(image: Image) -> None:
    answer = client_as(role="admin").head(f"/api/v1/images/{image.pk}/content/")
    assert (answer.status_code, answer["Content-Length"]) == (200, str(image.file_size))
    assert not AuditEntry.objects.filter(what__startswith="image download").exists()
