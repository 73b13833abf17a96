"""Names are chosen by strangers. On every page they are text and nothing else."""

import pytest
from django.test import Client

from images.models import Image
from storage_admin.guests.models import Guest
from tests.factories import ImageFactory, ImageUseFactory
from tests.web.conftest import Filled, fill
from tests.web.html import inline_code, tags_of

PAYLOADS = [
    "<script>alert(1)</script>",
    "<ScRiPt>alert(1)</sCrIpT>",
    "</title><script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</textarea><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "--><script>alert(1)</script>",
    "]]><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<img src=x onerror='alert(1)'>",
    '"><img src=x onerror=alert(1)>',
    "'><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onmouseover='alert(1)",
    '" autofocus onfocus=alert(1) x="',
    "` onmouseover=alert(1) `",
    "<svg onload=alert(1)>",
    "<svg/onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<math><mi//xlink:href='javascript:alert(1)'>",
    "<iframe src=javascript:alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<object data=javascript:alert(1)>",
    "<embed src=javascript:alert(1)>",
    "<body onload=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "javascript:alert(1)",
    "<form action=javascript:alert(1)><button>",
    "<button formaction=javascript:alert(1)>",
    "<base href='http://127.0.0.1:9/'>",
    "<meta http-equiv=refresh content='0;url=javascript:alert(1)'>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<style>*{background:url(http://127.0.0.1:9/)}</style>",
    "<div style='position:fixed;inset:0'>",
    "<div hx-get='/logout/' hx-trigger='load'>",
    "<div hx-on:load='alert(1)'>",
    "{{ 7|add:7 }}{% debug %}",
    "${alert(1)}#{alert(1)}",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\\x1b[31mred\\x1b[0m\\x0a",
    "\u202egpj.elif",
]


#: What each page consists of when every name is harmless; the same for all payloads.
HARMLESS: dict[int, list[tuple[str, frozenset[str]]]] = {}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_hostile_name_stays_text_on_every_page(admin: Client, payload: str) -> None:
    filled = fill("plain.qcow2")
    pages = [page for page in filled.pages() if page not in {"/password/", "/hosts/", f"/pools/{filled.pool.pk}/"}]
    if not HARMLESS:
        HARMLESS.update({at: _shape(admin.get(page).content.decode()) for at, page in enumerate(pages)})
    _rename(filled, payload)
    for at, address in enumerate(pages):
        page = admin.get(address).content.decode()
        assert inline_code(page) == [], address
        # The same elements as with a harmless name: the payload added none, and broke out of no attribute.
        assert _shape(page) == HARMLESS[at], address
        assert "\x1b" not in page


def _rename(filled: Filled, name: str) -> None:
    Image.objects.filter(pk=filled.image.pk).update(name=name, path=f"/srv/{name}")
    Guest.objects.update(name=name)
    filled.host.jobs.update(target_label=name, message=name)
    filled.host.jobs.filter(state="failed").update(error_detail=name)
    filled.running.log_lines.update(text=name)
    filled.host.jobs.filter(pk=filled.running.pk).update(commands=[{"argv": [name], "exit_code": 0}])


def _shape(page: str) -> list[tuple[str, frozenset[str]]]:
    return [(tag, frozenset(found)) for tag, found in tags_of(page)]


def test_a_path_is_chosen_as_it_is_spelt_on_its_host(operator: Client) -> None:
    base = ImageFactory.create(name="Bu\u0308ro.qcow2")  # the u and its dots are two characters there
    use = ImageUseFactory.create(image__backing=base, disk__target="vda")
    page = operator.get(f"/guests/{use.disk.guest_id}/live-merge/").content.decode()
    assert f">{base.path}</option>" in page
