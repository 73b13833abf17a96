"""One dashboard with the demo, and one browser, for all tests here."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.browser import Tab, Theme, chromium, tab
from tests.e2e.rest import Rest
from tests.harness.fixtures import folder_for_all
from tests.harness.services import Dashboard


@pytest.fixture(scope="session")
def dashboard(running_dashboard_session: Dashboard) -> Dashboard:
    """A dashboard that has scanned and sampled the demo's images."""
    running_dashboard_session.manage("demo", "--path", str(running_dashboard_session.demo))
    client = Rest(running_dashboard_session)
    client.scan()
    client.quiet()
    return running_dashboard_session


@pytest.fixture(scope="session")
def folders() -> Iterator[Path]:
    folder = folder_for_all()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def shared_folder(folders: Path) -> Path:
    """As elsewhere, but kept to the end: the dashboard lists it still, and new files would get its files' numbers."""
    return folder_for_all(folders)


@pytest.fixture(scope="session")
def rest(dashboard: Dashboard) -> Rest:
    return Rest(dashboard)


@pytest.fixture(scope="session")
def browser_process() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def signed_in(browser_process: Browser, dashboard: Dashboard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cookies of the first admin, who signed in through the form with the one-time password."""
    path = tmp_path_factory.mktemp("cookies") / "admin.json"
    with tab(browser_process, dashboard.url) as opened:
        opened.log_in("admin", dashboard.password)
        opened.page.context.storage_state(path=path)
    return path


@pytest.fixture
def admin_tab(browser_process: Browser, dashboard: Dashboard, signed_in: Path) -> Iterator[Callable[[Theme], Tab]]:
    """``admin_tab("dark")``: a tab of the admin; after the test, nothing may stand in its console."""
    opened: list[Tab] = []
    with ExitStack() as stack:

        def open_one(theme: Theme = "light") -> Tab:
            opened.append(stack.enter_context(tab(browser_process, dashboard.url, theme, signed_in)))
            return opened[-1]

        yield open_one
    assert [complaint for one in opened for complaint in one.complaints] == []


@pytest.fixture
def seen(admin_tab: Callable[[], Tab]) -> Tab:
    """A tab of the admin."""
    return admin_tab()


@pytest.fixture
def page(seen: Tab) -> Page:
    """The page of that tab."""
    return seen.page
