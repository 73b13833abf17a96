"""Another libvirtd that listens with TLS on loopback: a host of its own, with its own state, pools and certificates."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.libvirtd import REAPER
from tests.harness.processes import Daemon, free_port

ADDRESS = "127.0.0.1"
#: Folders that the daemon gets empty ones for, in a mount namespace of its own.
PRIVATE = ("/run/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt")
START = """
for folder in $PRIVATE; do mkdir -p $folder; mount -t tmpfs -o mode=755 tmpfs $folder; done
mount --bind "$0"/etc /etc/libvirt
test ! -e /dev/kvm || mount --bind "$0"/no-kvm /dev/kvm
exec "$@"
"""
CONFIGURATION = """
listen_tls = 1
listen_tcp = 0
listen_addr = "{address}"
tls_port = "{port}"
auth_tls = "none"
auth_unix_rw = "none"
auth_unix_ro = "none"
ca_file = "{folder}/cacert.pem"
cert_file = "{folder}/servercert.pem"
key_file = "{folder}/serverkey.pem"
"""
USAGES = {"server": "serverAuth", "client": "clientAuth"}


@dataclass(frozen=True)
class TlsLibvirtd:
    """A running daemon.

    Args:
        folder: its certificates, and those of its clients.
    """

    folder: Path
    port: int
    daemon: Daemon

    def uri(self, pki: Path) -> str:
        """For a connection of the test's own."""
        return f"qemu+tls://{ADDRESS}:{self.port}/system?pkipath={pki}"

    def install_client(self, pki: Path) -> Path:
        """Puts a client's certificate where the dashboard looks for it."""
        pki.mkdir(parents=True)
        for name in ("cacert.pem", "clientcert.pem", "clientkey.pem"):
            shutil.copy(self.folder / name, pki / name)
            (pki / name).chmod(0o600)
        return pki


def authority(folder: Path) -> None:
    """A certificate authority, and certificates signed by it: one of a server on loopback, one of a client."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
    _openssl(
        folder, "req", "-x509", *key, "-keyout", "cakey.pem", "-out", "cacert.pem", "-days", "2", "-subj", "/CN=test",
        *extensions,
    )  # fmt: skip
    for who, usage in USAGES.items():
        _openssl(folder, "req", "-new", *key, "-keyout", f"{who}key.pem", "-out", f"{who}.csr", "-subj", f"/CN={who}")
        (folder / "extensions").write_text(
            f"basicConstraints=CA:FALSE\nextendedKeyUsage={usage}\nsubjectAltName=IP:{ADDRESS}\n"
            "keyUsage=critical,digitalSignature,keyEncipherment\n"
        )
        _openssl(
            folder, "x509", "-req", "-in", f"{who}.csr", "-CA", "cacert.pem", "-CAkey", "cakey.pem", "-CAcreateserial",
            "-days", "2", "-extfile", "extensions", "-out", f"{who}cert.pem",
        )  # fmt: skip


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def tls_libvirtd(folder: Path) -> Iterator[TlsLibvirtd]:
    """Starts one. Needs root. Files of its guests and pools are this machine's; nothing else is shared with another."""
    authority(folder)
    port = free_port()
    (folder / "etc").mkdir()
    (folder / "etc/qemu.conf").write_text('namespaces = []\nstdio_handler = "file"\n')
    (folder / "no-kvm").touch(mode=0)
    (folder / "libvirtd.conf").write_text(CONFIGURATION.format(address=ADDRESS, port=port, folder=folder))
    daemon = ["/usr/sbin/libvirtd", "--listen", "--config", str(folder / "libvirtd.conf"), "--pid-file"]
    start = f'PRIVATE="{" ".join(PRIVATE)}"\n{START}'
    argv = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", start, str(folder)]
    with Daemon([*argv, sys.executable, "-c", REAPER, *daemon, str(folder / "pid")], folder / "log") as running:
        server = TlsLibvirtd(folder, port, running)
        try:
            running.wait_for(lambda: _answers(server), 30, "libvirtd answers with TLS")
            yield server
        finally:
            if running.process.poll() is None:  # what was started ends with the daemon
                os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
                running.process.wait(30)


def _answers(server: TlsLibvirtd) -> bool:
    pki = server.folder / "probe"
    if not pki.exists():
        server.install_client(pki)
    done = subprocess.run(["virsh", "-c", server.uri(pki), "uri"], capture_output=True, timeout=20)
    return done.returncode == 0
