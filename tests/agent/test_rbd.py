"""What Ceph said on a real cluster (16.2.15), read as what each image takes; stand-ins answer with that."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import rbd
from storage_admin.agent.programs import tools
from storage_admin.agent.verbs.scan import volumes
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import new_program

DATA = Path(__file__).parents[1] / "data" / "rbd"
MIB = 1 << 20
FSID = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
#: Says what was asked, and answers as the cluster did; what is in ``$0.says`` comes first.
STAND_IN = f"""#!/bin/sh
echo "$*" >>"$0.asked"
[ ! -f "$0.says" ] || . "$0.says"
for word; do
    case $word in
    --pool=*) pool=${{word#*=}} ;;
    --namespace=*) pool=${{word#*=}} ;;
    --image=*) image=$(echo "${{word#*=}}" | tr -d '<>') ;;
    --long) long=yes ;;
    ls|du|info|status|df|fsid) verb=$word ;;
    esac
done
cd {DATA}
case $verb in
df|fsid) cat $verb.json ;;
ls) [ -n "$long" ] && cat "ls-$pool.json" || grep -o '"image":"[^"]*"' "ls-$pool.json" | sort -u |
    sed 's/"image"://; s/$/,/; 1s/^/[/; $s/,$/]/' ;;
du) cat "du-${{image:-$pool}}.json" ;;
info) cat "info-$image.json" ;;
status) [ "$image" = vm-102-disk-0 ] && cat status-open.json || cat status.json ;;
esac
"""
STORAGE = """rbd: ceph
	pool vms
	monhost 192.0.2.1 192.0.2.2
	username vm

rbd: local
	pool vms
	namespace tenant
"""
Says = Callable[..., Path]


@pytest.fixture
def ceph(tmp_path: Path, programs: Path) -> Says:
    """``ceph(says)``: what the stand-in does first; gives the folder that is /etc/pve."""
    etc = tmp_path / "pve"
    (etc / "priv/ceph").mkdir(parents=True)
    (etc / "storage.cfg").write_text(STORAGE)
    (etc / "priv/ceph/ceph.keyring").touch()
    (etc / "ceph.conf").touch()

    def says(first: str = "") -> Path:
        for name in ("rbd", "ceph"):
            new_program(programs / name, STAND_IN)
            (programs / f"{name}.says").write_text(first)
        return etc

    return says


def read(etc: Path) -> dict[str, Any]:
    io: Any = RecordingIO()
    (found,) = (one for one in volumes(io, str(etc)) if one["backend"] == "rbd")
    return found


def names(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {base64.b64decode(one["name_b64"]).decode("utf-8", "replace"): one for one in found["volumes"]}


def test_each_image_takes_what_ceph_measures_and_what_it_does_not_is_unknown(ceph: Says) -> None:
    found = read(ceph())
    assert {pool["name"]: (pool["fsid"], pool["stored"], pool["why"]) for pool in found["pools"]} == {
        "vms": (FSID, 58720632, ""), "vms/tenant": (FSID, 58720632, ""),
    }  # fmt: skip
    assert {
        name: (one["size"], one["used"], one["snapshots"], one["has_snapshots"]) for name, one in names(found).items()
    } == {
        "vm-100-disk-0": (64 * MIB, 8 * MIB, 20 * MIB, True),
        "base-101-disk-0": (64 * MIB, 0, 16 * MIB, True),
        "vm-102-disk-0": (64 * MIB, 4 * MIB, 0, False),
        "slow": (32 * MIB, None, None, False),  # without fast-diff
        "<script>": (32 * MIB, 0, 0, False),
        "vm-104-disk-0": (16 * MIB, 0, 0, False),
    }
    clone = names(found)["vm-102-disk-0"]
    assert base64.b64decode(clone["parent_b64"]) == b"vms/base-101-disk-0"
    assert {name for name, one in names(found).items() if one["watchers"]} == {"vm-102-disk-0"}


def test_a_cluster_is_asked_as_proxmox_asks_it(ceph: Says, tmp_path: Path) -> None:
    etc = ceph()
    read(etc)
    asked = (tmp_path / "bin/rbd.asked").read_text().splitlines()
    far, here = ([line for line in asked if word in line] for word in ("--id=vm", "--id=admin"))
    assert len(far) + len(here) == len(asked)
    assert all("--conf=/dev/null --id=vm --mon-host=192.0.2.1,192.0.2.2" in line for line in far)
    assert all(f"--keyring={etc}/priv/ceph/ceph.keyring --pool=vms " in line for line in far)
    assert all(f"--conf={etc}/ceph.conf --id=admin --pool=vms --namespace=tenant " in line for line in here)
    assert {line.split("--image")[0].split()[-1] for line in far if "--image" in line} == {"info", "status", "du"}


def test_of_what_cannot_be_named_or_opened_no_more_is_asked(ceph: Says) -> None:
    strange = r"""case "$*" in
    *tenant*) ;;
    *--image=*) exit 2 ;;
    *--long*) printf '[{"image":"a/b@c","size":1},{"image":"bad\377\\u001b[31m","size":2}]'; exit ;;
    *' ls '*) printf '["a/b@c","bad\377\\u001b[31m","broken"]'; exit ;;
    esac
    """
    found = names(read(ceph(strange)))
    assert {name: (one["size"], one["used"], one["watchers"]) for name, one in found.items()} == {
        "a/b@c": (1, None, []), "bad�\x1b[31m": (2, None, []), "broken": (None, None, []),
        "vm-104-disk-0": (16 * MIB, 0, []),
    }  # fmt: skip


@pytest.mark.parametrize(
    "does",
    [
        "exit 5",
        "echo no; exit",
        "echo '[]'; exit",
        "echo '[{}]'; exit",
        "sleep 100",
        f"head -c 90 {DATA}/ls-vms.json; exit",
    ],
)
def test_where_a_cluster_does_not_answer_it_is_said_once_and_nothing_guessed(
    ceph: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(rbd, "LIMITS", tools.Limits(address_space=None, wall_seconds=1))
    found = read(ceph(f'case "$*" in *--id=vm*) {does} ;; esac'))
    whys = {pool["name"]: pool["why"] for pool in found["pools"]}
    assert (bool(whys["vms"]), whys["vms/tenant"]) == (True, "")
    assert set(names(found)) == {"vm-104-disk-0"}
    assert not (tmp_path / "bin/rbd.asked").read_text().count("--id=vm")


def test_a_pool_that_is_named_twice_is_told_once_and_two_of_one_name_not_at_all(ceph: Says) -> None:
    etc = ceph()
    (etc / "storage.cfg").write_text(STORAGE.replace("\tnamespace tenant\n", ""))
    assert (len(read(etc)["pools"]), len(read(etc)["volumes"])) == (1, 5)
    found = read(ceph("""case "$*" in *--id=vm*fsid*) echo '{"fsid": "other"}'; exit ;; esac"""))
    assert ([bool(pool["why"]) for pool in found["pools"]], found["volumes"]) == ([True], [])


def test_a_host_on_which_nobody_names_a_pool_asks_no_cluster(ceph: Says, tmp_path: Path) -> None:
    etc = ceph()
    for text in ("dir: local\n\tpath /srv\n", STORAGE.replace("\tpool vms\n", "\tpool vms\n\tdisable\n")):
        (etc / "storage.cfg").write_text(text)
        assert read(etc)["pools"] == []
    assert not (tmp_path / "bin/ceph.asked").exists()
