"""Hosts whose key can only run the agent: the script that sets that up, to be run there by an admin.

The script lists which folders images are in, too; the key cannot (:mod:`storage_admin.agent.folders.image_folders`).

What the key runs is one small script. Of what the client asked for (``SSH_ORIGINAL_COMMAND``) it knows one word, by
which the agent is started as relay to libvirt's read-only socket; anything else starts the agent as it is.
"""

import base64
import re
import shlex
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from django.conf import settings

from storage_admin.agent.folders import image_folders
from storage_admin.agent.protocol import RELAY
from storage_admin.hosts.transport import FOLDER, agent_bundle

#: What the key runs, whatever is asked for. It stays the same when the agent is exchanged.
ENTRY = f"{FOLDER}/agent"

_SCRIPT = """#!/bin/sh
# Installs Storage Admin's agent {hash} and lets one key of ssh run it, and nothing else.
set -eu
umask 022
test "$(id -u)" = 0 || {{ echo "run this as root" >&2; exit 1; }}
python=$(command -v python3) || {{ echo "there is no python3 here: install it" >&2; exit 1; }}
command -v base64 >/dev/null
mkdir -p {folder}
test "$(stat -c %u {folder})" = 0 || {{ echo "{folder} does not belong to root" >&2; exit 1; }}
chmod go-w {folder}
new={folder}/.new.$$
trap 'rm -f "$new"' EXIT
list={list}
if ! test -e "$list"; then
    mkdir -p "$(dirname "$list")"
    printf '%s' '{header}' > "$list"
fi
{folders}base64 -d > "$new" <<'END'
{bundle}
END
case "$(sha256sum < "$new")" in {hash}*) ;; *) echo "the agent did not arrive whole" >&2; exit 1 ;; esac
mv -f "$new" {folder}/agent-{hash}.pyz
cat > "$new" <<END
#!/bin/sh
case "\\${{SSH_ORIGINAL_COMMAND-}}" in
    {relay}) set -- {relay} ;;
    *) set -- ;;
esac
exec {become}$python -I {folder}/agent-{hash}.pyz "\\$@"
END
chmod 755 "$new"
mv -f "$new" {entry}
echo "installed {folder}/agent-{hash}.pyz"
"""

_KEY = """home=$(getent passwd {user} | cut -d: -f6)
test -n "$home" || {{ echo "there is no user {user} here" >&2; exit 1; }}
line='{line}'
test -d "$home/.ssh" || install -d -m 700 -o {user} "$home/.ssh"
touch "$home/.ssh/authorized_keys"
if ! grep -qxF "$line" "$home/.ssh/authorized_keys"; then
    # The same key without the restriction would be asked first.
    grep -vF '{key}' "$home/.ssh/authorized_keys" > "$home/.ssh/.authorized_keys.new" || test $? = 1
    printf '%s\\n' "$line" >> "$home/.ssh/.authorized_keys.new"
    chown {user} "$home/.ssh/.authorized_keys.new"
    chmod 600 "$home/.ssh/.authorized_keys.new"
    mv -f "$home/.ssh/.authorized_keys.new" "$home/.ssh/authorized_keys"
fi
echo "the key may run the agent as {user}"
"""

#: The exact file and word: a pattern would also match one that somebody else has put elsewhere.
_SUDO = """agent="$python -I {folder}/agent-{hash}.pyz"
printf '%s ALL=(root) NOPASSWD: %s, %s {relay}\\n' {user} "$agent" "$agent" > /etc/sudoers.d/storage-admin
chmod 440 /etc/sudoers.d/storage-admin
"""


def named(key: str) -> str:
    """A public key with a comment that names this dashboard."""
    host = urlsplit(settings.PUBLIC_URL).hostname or socket.gethostname()
    return f"{key} storage-admin@{re.sub(r'[^A-Za-z0-9.-]', '', host)}"


def authorized_line(key: str) -> str:
    """The line for ``authorized_keys``: ``restrict`` takes away forwarding, terminals and the user's own rc file."""
    return f'restrict,command="{ENTRY}" {named(key)}'


def _listing(folder: str) -> str:
    quoted = shlex.quote(folder)
    return f'grep -qxF {quoted} "$list" || printf \'%s\\n\' {quoted} >> "$list"\n'


def installer(user: str, key: str, folders: Sequence[str] = ()) -> str:
    """The script.

    Args:
        folders: absolute paths that are listed as folders of images.
        user: whose authorized keys get the key.
        key: public key as ``TYPE BASE64``; empty to only install the agent.
    """
    bundle = agent_bundle()
    become = "" if user == "root" else "sudo -n "
    encoded = base64.encodebytes(bundle.path.read_bytes()).decode().rstrip()
    script = _SCRIPT.format(
        hash=bundle.hash, folder=FOLDER, bundle=encoded, entry=ENTRY, become=become, relay=RELAY,
        list=image_folders.file_path(), header=image_folders.HEADER, folders="".join(map(_listing, folders)),
    )  # fmt: skip
    if user != "root":
        script += _SUDO.format(user=user, folder=FOLDER, hash=bundle.hash, relay=RELAY)
    if key:
        script += _KEY.format(user=user, key=key, line=authorized_line(key))
    return script
