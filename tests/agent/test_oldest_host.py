"""The oldest host that is promised, Debian 11 with Python 3.9 and QEMU 5.2, in a tree of its own."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from storage_admin.agent import bundle
from storage_admin.agent.folders import image_folders
from tests.agent.every_verb import pool_request, request
from tests.agent.harness import Agent, ask, heard, kept, make_image, qemu_img, reclaim_args, same_content, undo_args
from tests.harness.debian_trees import Tree

pytestmark = [pytest.mark.qemu, pytest.mark.night]

#: Imports whatever the agent consists of.
ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
print(sys.version_info[:2])
"""

#: Starts the agent as on Debian 11's own kernel.
WITHOUT_LANDLOCK = """
import sys
sys.path.insert(0, {built!r})
from storage_admin.agent import main
from storage_admin.agent.programs import confined
confined.means = lambda: confined.NAMESPACES
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("debian") / "tree", "bullseye", ["python3", "qemu-utils", "util-linux"])


@pytest.fixture(params=["landlock", "namespaces"])
def agent(tree: Tree, tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """The command of an agent there, which finds the test's pool, as root has listed it; confined in either way."""
    listed = tree.folder / image_folders.FILE.lstrip("/")
    listed.parent.mkdir(exist_ok=True)
    listed.write_text(f"{tmp_path}/pool\n")
    built = bundle.build(tmp_path / "program").path
    if request.param == "namespaces":
        started = tmp_path / "program/started.py"
        started.write_text(WITHOUT_LANDLOCK.format(built=str(built)))
        built = started
    return tree.command(f"env -u {image_folders.VARIABLE} python3 -I {built}", tmp_path)


def test_each_of_the_agents_modules_can_be_read(tree: Tree, tmp_path: Path) -> None:
    built = bundle.build(tmp_path).path
    inside = [name for name in zipfile.ZipFile(built).namelist() if "__" not in name and name.endswith(".py")]
    names = [name.removesuffix(".py").replace("/", ".") for name in inside if name.startswith("storage_admin/agent/")]
    names.remove("storage_admin.agent.appliance.program")  # which needs what its machine brings
    assert len(names) > 100
    (tmp_path / "all.py").write_text(ALL)
    command = tree.command(f"python3 -I {tmp_path}/all.py {built} {' '.join(names)}", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("(3, 9)", 0), done.stderr


def test_a_scan_tells_of_an_image_and_what_is_missing_there(agent: list[str], pool: Path) -> None:
    make_image(pool / "a.qcow2")
    answer, events = heard("scan", pool_request("scan", pool), command=agent)
    assert "code" not in answer
    assert [event["format"] for event in events if event["event"] == "image"] == ["qcow2"]


@pytest.mark.parametrize("how", ["reclaim compress", "reclaim copy", "reclaim in_place", "flatten rebase",
                                 "flatten convert", "convert", "check none", "check leaks", "grow"])  # fmt: skip
def test_an_image_is_rewritten_and_reads_as_before(agent: list[str], pool: Path, how: str) -> None:
    make_image(pool / "base.qcow2")
    path = make_image(pool / "a.qcow2", base="base.qcow2")
    before = kept(path, pool)
    verb, args = request(how, bytes(path), pool, "qcow2")
    answer = ask(verb, args, command=agent)
    assert "code" not in answer, answer
    result = pool / "converted.raw" if how == "convert" else path
    if how == "convert":
        qemu_img("convert", "-O", "qcow2", result, path)
    assert how == "grow" or same_content(path, before)


def test_a_reclaim_is_undone_and_what_a_killed_one_left_is_recovered(agent: list[str], pool: Path) -> None:
    path = make_image(pool / "a.qcow2")
    before = path.read_bytes()
    with Agent(agent) as there:
        there.request("reclaim", reclaim_args(path, method="copy"))
        there.until("ready")
        there.process.kill()
    recovered = ask("recover", pool_request("recover", pool), command=agent)
    assert "code" not in recovered, recovered
    assert [one["outcome"] for one in recovered["recovered"]] == ["reverted"]
    assert path.read_bytes() == before
    assert "code" not in ask("reclaim", reclaim_args(path, method="copy", undo_hours=1), job="j2", command=agent)
    assert "code" not in ask("undo", undo_args(path, "j2"), job="j3", command=agent)
    assert path.read_bytes() == before
