"""Directories of people for tests: a real OpenLDAP and a real OpenID Connect provider, on loopback."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import ldap
import ldap.modlist
import requests

from tests.harness.oidc_site import PASSWORD
from tests.harness.processes import Daemon, free_port

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = "dc=example,dc=org"
ADMIN, ADMIN_PASSWORD = f"cn=admin,{SUFFIX}", "the admin's password"
_CONFIGURATION = """\
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/inetorgperson.schema
pidfile {folder}/slapd.pid
modulepath /usr/lib/ldap
moduleload back_mdb
TLSCACertificateFile {folder}/cert.pem
TLSCertificateFile {folder}/cert.pem
TLSCertificateKeyFile {folder}/key.pem
database mdb
maxsize 10485760
suffix {suffix}
rootdn {admin}
rootpw "{password}"
directory {folder}/db
access to attrs=userPassword by anonymous auth by * none
access to * by users read by anonymous auth
"""


class Provider(Daemon):
    """An OpenID Connect provider with these people: their names, and what is told of each besides."""

    def __init__(self, folder: Path, callback: str, people: dict[str, dict[str, object]]) -> None:
        self.people, self.port = folder / "people.json", free_port()
        self.tell(people)
        argv = [sys.executable, "-m", "tests.harness.oidc_site", str(folder), str(self.port), callback]
        super().__init__(argv, folder / "provider.log", cwd=ROOT, grace=5)
        self.wait_for(lambda: "ready" in self.said(), 60, "the provider answers")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/o"

    def tell(self, people: dict[str, dict[str, object]]) -> None:
        """What is told from now on."""
        self.people.write_text(json.dumps(people))

    def signed_in(self, asked: str, name: str) -> str:
        """Goes where the dashboard has sent a browser to, as somebody; the path that it is sent back to."""
        with requests.Session() as browser:
            page = browser.get(asked, timeout=30)
            token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)
            assert token is not None, page.text
            form = {"username": name, "password": PASSWORD, "csrfmiddlewaretoken": token[1]}
            there = browser.post(page.url, form, timeout=30, allow_redirects=False)
            origin = f"http://127.0.0.1:{self.port}"
            sent = browser.get(origin + there.headers["Location"], timeout=30, allow_redirects=False)
            back = urlsplit(sent.headers["Location"])
            return f"{back.path}?{back.query}"


class Directory(Daemon):
    """An OpenLDAP server with people and groups."""

    def __init__(self, folder: Path) -> None:
        (folder / "db").mkdir()
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
        name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
        subprocess.run(
            ["openssl", "req", "-x509", *key, *name, "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
        )
        self.certificate = folder / "cert.pem"
        configuration = _CONFIGURATION.format(folder=folder, suffix=SUFFIX, admin=ADMIN, password=ADMIN_PASSWORD)
        (folder / "slapd.conf").write_text(configuration)
        self.url = f"ldap://127.0.0.1:{free_port()}"
        argv = ["/usr/sbin/slapd", "-d", "0", "-h", self.url, "-f", str(folder / "slapd.conf")]
        super().__init__(argv, folder / "slapd.log", grace=5)
        self.wait_for(self._answers, 30, "slapd answers")
        self._add(SUFFIX, objectClass=["dcObject", "organization"], dc=["example"], o=["example"])
        for unit in ("people", "groups"):
            self._add(f"ou={unit},{SUFFIX}", objectClass=["organizationalUnit"], ou=[unit])

    def _connect(self) -> "ldap.ldapobject.SimpleLDAPObject":
        connection = ldap.initialize(self.url)
        connection.set_option(ldap.OPT_NETWORK_TIMEOUT, 5)
        connection.set_option(ldap.OPT_TIMEOUT, 5)  # somebody else's server may have taken the port
        connection.simple_bind_s(ADMIN, ADMIN_PASSWORD)
        return connection

    def _answers(self) -> bool:
        try:
            self._connect().unbind_s()
        except (ldap.SERVER_DOWN, ldap.TIMEOUT):
            return False
        return True

    def _add(self, dn: str, **attributes: list[str]) -> None:
        encoded = {name: [value.encode() for value in values] for name, values in attributes.items()}
        self._connect().add_s(dn, ldap.modlist.addModlist(encoded))

    def add_person(self, name: str, password: str) -> None:
        """Somebody with a password."""
        self._add(
            f"uid={name},ou=people,{SUFFIX}", objectClass=["inetOrgPerson"], uid=[name], cn=[name], sn=[name],
            mail=[f"{name}@example.org"], userPassword=[password],
        )  # fmt: skip

    def add_group(self, name: str, members: Iterable[str]) -> None:
        """A group; nobody in it is the admin of the directory, as it cannot be empty."""
        dns = [f"uid={one},ou=people,{SUFFIX}" for one in members] or [ADMIN]
        self._add(f"cn={name},ou=groups,{SUFFIX}", objectClass=["groupOfNames"], cn=[name], member=dns)

    def leave(self, group: str) -> None:
        """Everybody leaves a group."""
        change = [(ldap.MOD_REPLACE, "member", [ADMIN.encode()])]
        self._connect().modify_s(f"cn={group},ou=groups,{SUFFIX}", change)

    def remove_person(self, name: str) -> None:
        """Somebody is no more."""
        self._connect().delete_s(f"uid={name},ou=people,{SUFFIX}")
