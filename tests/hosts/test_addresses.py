"""Nobody types a URI or a command line: what is no address, port, user or key starts no process and opens no
connection, wherever it comes from.
"""

import base64
import contextlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from storage_admin.agent.protocol import HostError
from storage_admin.hosts import addresses, registration
from storage_admin.hosts.libvirt import control, process, reader, watch
from storage_admin.hosts.libvirt.uri import uri_of
from storage_admin.hosts.models import Host
from tests.harness.sshd import keypair
from tests.working import ADMIN, invalid_fields

#: What may not be taken for a host's name or address.
HOSTILE: list[Any] = [
    # options of a client
    "-oProxyCommand=touch /tmp/owned", "-F/etc/passwd", "--", "-", "-1.2.3.4", "-host.example.org",
    # more than an address
    "root@host", "@host", "host@", "host:22", "host:", ":22", "user:secret@host", "a:b:c", "host,other", "host other",
    # parts of a URI
    "host/system", "host/system?command=/bin/sh", "host?command=/tmp/x", "host?no_verify=1", "host?pkipath=/tmp/evil",
    "host#part", "host&no_verify=1", "//host", "qemu+ext:///system?command=/tmp/x", "qemu+ssh://host/system",
    "test:///default", "ssh://host", "unix:///run/libvirt/libvirt-sock", "file:///etc/passwd", "json:{}",
    "localhost/../../etc/passwd", "host%2fsystem%3fcommand=x", "%2d", "%00",
    # what a shell would read
    "host;id", "host|id", "host&&id", "host`id`", "$(id)", "$HOME", "host>file", "host<file", "*", "?", "~root",
    "{a,b}", "host'", 'host"', "host\\x", "!1",
    # what cannot be seen, or looks like something else
    "ho\nst", "ho\rst", "ho\tst", "ho\0st", "\x1b[31mhost", "host\u202e", "h\u00f6st", "\uff11\uff12\uff17.0.0.1",
    "ho\u200bst", "ho\u00a0st", "\udcff",
    # numbers that are read in surprising ways, and addresses that are none
    "0x7f000001", "0x7f.0.0.1", "127.0.0.0x1", "2130706433", "127.1", "0177.0.0.1", "1.2.3.4.5", "256.1.1.1", "1.2.3.",
    "[::1]", "[::1]:22", "::1%lo", "fe80::1%25eth0", "1::2::3", ":::", "::g", "[]",
    # names that are none
    "", " ", ".", "..", "a..b", ".host", "a-", "a.-b", "a" * 64 + ".org", ".".join(["a" * 60] * 5),
    # no text at all
    None, 5, True, b"host", ["-o", "x"], {"host": 1},
]  # fmt: skip
USERS: list[Any] = [
    "", " ", "-oProxyCommand=x", "-l", "root@host", "root:x", "ro ot", "root;id", "$(id)", "`id`", "root\n", "root\nx",
    "root\0", "../root", "~", "*", "Root", "röot", "root%00", "root/x", "a" * 33, "0root", "\x1b[31m", None, 5, b"root",
]  # fmt: skip
PORTS: list[Any] = [
    0, -1, 65536, 1 << 40, True, False, 1.5, "0", "65536", "-1", "+22", "22 ", " 22", "22\n", "22;id", "0x16", "2e1",
    "٢٢", "22/tcp", "ssh", b"22", [22], "000022",
]  # fmt: skip


def wire(kind: str, body: bytes = bytes(64)) -> str:
    return base64.b64encode(struct.pack(">I", len(kind)) + kind.encode() + body).decode()


KEYS: list[Any] = [
    "", "ssh-ed25519", "ssh-ed25519 ", "ssh-ed25519 x", "ssh-ed25519 AAAA", f"ssh-dss {wire('ssh-dss')}",
    f"ssh-ed25519 {wire('ssh-rsa')}", f"* {wire('ssh-ed25519')}", f"ssh-ed25519\n* {wire('ssh-ed25519')}",
    f"ssh-ed25519 {wire('ssh-ed25519')}\n* ssh-rsa {wire('ssh-rsa')}", f"ssh-ed25519\0 {wire('ssh-ed25519')}",
    f"@cert-authority * ssh-ed25519 {wire('ssh-ed25519')}", f"ssh-ed25519 {wire('ssh-ed25519', b'')}",
    f"ssh-ed25519 {wire('ssh-ed25519')}!", f"ssh-ed25519-cert-v01@openssh.com {wire('ssh-ed25519')}", "-oX", None, 5,
    b"ssh-ed25519 AAAA",
]  # fmt: skip

#: What Python says whenever a process is started or a connection opened.
EVENTS = frozenset(
    {
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn",
        "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    }
)  # fmt: skip
#: What each of those who watch has seen: a hook cannot be taken away again.
_watching: list[list[str]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in EVENTS:
        for seen in _watching:
            seen.append(f"{event} {args!r}"[:300])


sys.addaudithook(_hook)


@contextlib.contextmanager
def nothing_happens() -> Iterator[None]:
    """Fails where a process is started or a connection opened within."""
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.remove(seen)
    assert seen == []


def test_the_watch_sees_what_happens() -> None:
    with pytest.raises(AssertionError, match=r"subprocess\.Popen"), nothing_happens():
        process.ask("test:///default", "states", 20)


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_what_is_no_address_is_refused_with_a_sentence(value: Any) -> None:
    with nothing_happens():
        assert invalid_fields(addresses.address, value)["address"].startswith("Enter only a hostname")


@pytest.mark.parametrize("value", [user for user in USERS if user != "root\n"], ids=ascii)
def test_what_is_no_user_is_refused(value: Any) -> None:
    assert set(invalid_fields(addresses.user, value)) == {"user"}


@pytest.mark.parametrize("value", PORTS, ids=ascii)
def test_what_is_no_port_is_refused(value: Any) -> None:
    assert set(invalid_fields(addresses.port, value, 22)) == {"port"}


@pytest.mark.parametrize("value", KEYS, ids=ascii)
def test_what_is_no_host_key_is_refused(value: Any) -> None:
    assert set(invalid_fields(addresses.host_key, value)) == {"host_key"}


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("hv1", "hv1"), ("HV1.Example.ORG", "hv1.example.org"), (" 192.0.2.7 ", "192.0.2.7"), ("::1", "::1"),
        ("2001:DB8::7", "2001:db8::7"), ("xn--hst-sna.example", "xn--hst-sna.example"), ("_hv.example", "_hv.example"),
        ("a.b.", "a.b."), ("1host", "1host"), ("10.example", "10.example"),
    ],
)  # fmt: skip
def test_addresses_are_taken_as_what_they_are(typed: str, taken: str) -> None:
    assert addresses.address(typed) == taken


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return keypair(tmp_path_factory.mktemp("key") / "host")


def row(key: str, **changes: Any) -> Host:
    """A row as it might stand in the database, whatever wrote it there."""
    values = {"transport": "tls", "address": "hv1", "port": None, "user": "root", "host_key": key, "slug": "hv1"}
    return Host(name="hv1", kind="libvirt", **(values | changes))


def ask_in_every_way(host: Host) -> None:
    for ask in (
        reader.read,
        control.states,
        lambda host: reader.read_volumes(host, ["default"]),
        lambda host: control.start(host, "x"),
        lambda host: control.set_io(host, "x", weight=100),
        lambda host: next(watch.changes(host)),
        lambda host: uri_of(host).__enter__(),
    ):
        with pytest.raises(HostError, match="its connection settings are invalid"):
            ask(host)


@pytest.mark.parametrize("transport", ["tls", "ssh"])
@pytest.mark.parametrize("value", [value for value in HOSTILE if isinstance(value, str)], ids=ascii)
def test_a_row_with_such_an_address_is_asked_by_nobody(key: str, value: str, transport: str) -> None:
    with nothing_happens():
        ask_in_every_way(row(key, address=value, transport=transport))


@pytest.mark.parametrize("value", [value for value in HOSTILE if isinstance(value, str)], ids=ascii)
def test_nor_is_it_by_the_relay_of_a_key_that_runs_the_agent_alone(key: str, value: str) -> None:
    host = row(key, address=value, transport="forced")
    with nothing_happens():
        for ask in (reader.read, control.states, lambda host: next(watch.changes(host))):
            with pytest.raises(HostError, match="its connection settings are invalid"):
                ask(host)


@pytest.mark.parametrize(
    "changes",
    [
        *({"user": user, "transport": "ssh"} for user in USERS if isinstance(user, str) and user != "root\n"),
        *({"port": port} for port in (-1, 65536, 1 << 40)),
        *({"port": port, "transport": "ssh"} for port in (-1, 65536)),
        *({"host_key": host_key, "transport": "ssh"} for host_key in KEYS if isinstance(host_key, str)),
    ],
    ids=ascii,
)
def test_nor_is_one_with_such_a_user_port_or_key(key: str, changes: dict[str, Any]) -> None:
    with nothing_happens():
        ask_in_every_way(row(key, **changes))


@pytest.mark.django_db
@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_an_admin_cannot_register_one(key: str, value: Any) -> None:
    with nothing_happens():
        wanted = registration.Wanted(name="hv1", address=value, host_key=key)
        assert set(invalid_fields(registration.add_ssh_host, ADMIN, wanted)) == {"address"}


@pytest.mark.parametrize(
    ("changes", "uri"),
    [
        ({}, "qemu+tls://hv1:16514/system"),
        ({"port": 26514}, "qemu+tls://hv1:26514/system"),
        ({"address": "2001:db8::7"}, "qemu+tls://[2001:db8::7]:16514/system"),
        ({"address": "192.0.2.7"}, "qemu+tls://192.0.2.7:16514/system"),
    ],
)
def test_a_uri_is_made_of_its_fields(
    key: str, changes: dict[str, Any], uri: str, settings: Any, tmp_path: Path
) -> None:
    settings.DATA_DIR = tmp_path
    with uri_of(row(key, **changes)) as made:
        assert made == uri


def test_a_folder_of_certificates_stays_one_word(key: str, settings: Any, tmp_path: Path) -> None:
    settings.DATA_DIR = tmp_path / "a&no_verify=1?command=x#y z%41"
    pki = Path(settings.DATA_DIR) / "pki/hv1"
    pki.mkdir(parents=True)
    for name in ("cacert.pem", "clientcert.pem", "clientkey.pem"):
        (pki / name).touch(mode=0o600)
    with uri_of(row(key)) as made:
        assert made is not None
        query = made.partition("?")[2]
        assert query.startswith("pkipath=")
        assert not set(query.removeprefix("pkipath=")) & set("&?#= ")
        with pytest.raises(libvirt.libvirtError) as error:
            libvirt.openReadOnly(made.replace("hv1:16514", "127.0.0.1:1"))
        assert str(pki) in str(error.value)
