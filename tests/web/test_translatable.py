"""Every text of a page reaches a translator: as a message, whole."""

import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import Client, override_settings
from django.utils.translation import override, trans_real

from storage_admin.words import plural
from tests.web.conftest import ADMIN_PAGES, Filled

ACTIVE = "django.utils.translation.trans_real._active.value"
TEMPLATES = settings.BASE_DIR / "templates"
MORE_PAGES = ["/policies/", "/policies/add/", "/benchmarks/", "/benchmarks/start/", "/benchmarks/paste/", "/nothing/"]
#: Attributes that are shown or read out.
READ = {"alt", "aria-label", "placeholder", "title"}
WORD = re.compile(r"(?<![\w./:=-])[a-z]+(?![\w/:=-])")
#: What the factories of tests write.
DATA = re.compile(r"is over its threshold|does not answer|is in use\.|looking at ")
#: Modules with sentences that are no messages yet.
NOT_YET = ("images/kinds/analyze.py", "images/policies/*.py")
SENTENCES = "\n".join(
    re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for at in NOT_YET for path in settings.BASE_DIR.glob(at)
)


class Marked(trans_real.DjangoTranslation):
    """A translation that puts every message into brackets; each of several words, where one message holds them."""

    def gettext(self, message: str) -> str:
        return re.sub(r"(?:\{[^}]*\}|, |[^,])+", lambda found: f"⟦{found[0]}⟧", super().gettext(message))

    def ngettext(self, msgid1: str, msgid2: str, n: int) -> str:
        return f"⟦{super().ngettext(msgid1, msgid2, n)}⟧"


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACTIVE, Marked("en"), raising=False)


class _Reader(HTMLParser):
    """Collects what people read outside of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.depth = 0
        self._code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._code += tag in {"script", "pre", "code"}
        self.outside += [_outside(value or "", 0)[0] for name, value in attrs if name in READ]

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in {"script", "pre", "code"}

    def handle_data(self, data: str) -> None:
        text, self.depth = _outside(data, self.depth)
        if not self._code:
            self.outside.append(text)


def _outside(text: str, depth: int) -> tuple[str, int]:
    """What of a text stands outside of all brackets, and how many are open at its end."""
    kept = ""
    for character in text:
        depth += {"⟦": 1, "⟧": -1}.get(character, 0)
        kept += character if depth == 0 and character != "⟧" else ""
    return " ".join(kept.split()), depth


def _untranslated(page: str) -> Iterator[str]:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.depth == 0
    for text in reader.outside:
        words = text.split()
        known = any(" ".join(words[at : at + 3]) in SENTENCES for at in range(len(words) - 2))
        if len(WORD.findall(text)) >= 3 and not known and not DATA.search(text):
            yield text


def _of(client: Client, pages: list[str]) -> dict[str, list[str]]:
    return {page: found for page in pages if (found := list(_untranslated(client.get(page).content.decode())))}


@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_every_sentence_of_a_page_with_rows_is_a_message(
    browser_of: Callable[[str], Client], filled: Filled, role: str, marked: None
) -> None:
    assert _of(browser_of(role), [*filled.pages(), *MORE_PAGES, *(ADMIN_PAGES if role == "admin" else [])]) == {}


@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_every_sentence_of_a_page_without_rows_is_a_message(
    browser_of: Callable[[str], Client], role: str, marked: None
) -> None:
    lists = ["/", "/images/", "/orphans/", "/hosts/", "/guests/", "/jobs/", "/ledger/", "/alerts/", "/account/"]
    assert _of(browser_of(role), [*lists, *MORE_PAGES, *(ADMIN_PAGES if role == "admin" else [])]) == {}


def test_a_sentence_of_a_page_that_is_no_message_is_found() -> None:
    page = '<p>⟦a <b>message⟧ that</b></p><p title="nobody can translate this">⟦a⟧ <i>half of a sentence</i></p>'
    assert list(_untranslated(page)) == ["nobody can translate this", "half of a sentence"]


def test_a_counted_word_has_as_many_forms_as_its_language(monkeypatch: pytest.MonkeyPatch) -> None:
    polish = Marked("en")
    polish.plural = lambda n: 0 if n == 1 else 1 if n % 10 in (2, 3, 4) and n % 100 not in (12, 13, 14) else 2
    monkeypatch.setattr(ACTIVE, polish, raising=False)
    counted = [plural(count, "obraz,obrazy,obrazów") for count in (1, 2, 5, 1022)]
    assert counted == ["1 obraz", "2 obrazy", "5 obrazów", "1,022 obrazy"]
    with override(None):
        assert [plural(count, "image,images") for count in (0, 1, 2)] == ["0 images", "1 image", "2 images"]


def test_makemessages_finds_the_texts_of_each_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TEMPLATES, tmp_path / "templates")  # it writes files beside those that it reads
    monkeypatch.chdir(tmp_path)
    with override_settings(LOCALE_PATHS=[tmp_path / "locale"]):
        call_command("makemessages", locale=["de"], verbosity=0)
    catalogue = (tmp_path / "locale/de/LC_MESSAGES/django.po").read_text()
    found = {Path(at).parent for at in re.findall(r"(templates/\S+):\d+", catalogue)}
    written = {
        path.parent.relative_to(tmp_path)
        for path in (tmp_path / "templates").rglob("*.html")
        if re.search(r"\{% (?:block)?translate ", path.read_text())
    }
    assert found >= written > {Path("templates"), Path("templates/hosts/pool")}
    assert 'msgid "image,images"' in catalogue
