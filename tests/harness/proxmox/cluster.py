"""Two nodes of one cluster: an NFS storage that both see, and each with a guest whose disk is on it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.harness.proxmox.server import ProxmoxServer, proxmox
from tests.harness.proxmox.world import Guest, World, lab

NAME, NODES = "lab", ("pve1", "pve2")
#: Where the shared storage's images are.
SHARED = "/mnt/pve/nfs/images"


def world(number: int) -> World:
    """What the node of that number (1 or 2) serves; its guest is 501 or 502, and that of the second node runs."""
    made, names = lab(), dict(enumerate(NODES, 1))
    made.node = names[number]
    made.nodes = [made.nodes[0] | {"node": name, "id": f"node/{name}"} for name in NODES]
    made.cluster_status = [
        {"type": "cluster", "id": "cluster", "name": NAME, "nodes": 2, "quorate": 1, "version": 2},
        *(
            {"type": "node", "id": f"node/{name}", "name": name, "nodeid": one, "ip": f"127.0.0.{one}", "level": "",
             "local": int(one == number), "online": 1}
            for one, name in names.items()
        ),
    ]  # fmt: skip
    made.storages.append(
        {"type": "nfs", "storage": "nfs", "digest": "0" * 40, "path": "/mnt/pve/nfs", "server": "192.0.2.9",
         "export": "/vms", "content": "images", "shared": 1}
    )  # fmt: skip
    made.statuses.append(
        {"storage": "nfs", "type": "nfs", "active": 1, "enabled": 1, "shared": 1, "content": "images",
         "total": 10**12, "used": 10**11, "avail": 9 * 10**11}
    )  # fmt: skip
    made.volumes = {
        "nfs": [
            {"volid": f"nfs:{vmid}/vm-{vmid}-disk-0.qcow2", "content": "images", "format": "qcow2", "size": 1 << 30,
             "used": 1 << 20, "vmid": vmid}
            for vmid in (501, 502)
        ]
    }  # fmt: skip
    vmid = 500 + number
    text = f"name: guest{number}\nscsi0: nfs:{vmid}/vm-{vmid}-disk-0.qcow2,size=1G\n"
    made.guests = {("vm", vmid): Guest("vm", vmid, text, running=number == 2)}
    return made


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[ProxmoxServer, ProxmoxServer]]:
    """Starts both, at 127.0.0.1 and 127.0.0.2 on one port; each tells the other's address and certificate."""
    folders = [folder / name for name in NODES]
    for one in folders:
        one.mkdir()
    with (
        proxmox(world(1), folders[0]) as first,
        proxmox(world(2), folders[1], address="127.0.0.2", port=first.port) as second,
    ):
        prints = {"pve1": first.fingerprint, "pve2": second.fingerprint}
        for server in (first, second):
            server.world.nodes = [row | {"ssl_fingerprint": prints[str(row["node"])]} for row in server.world.nodes]
        yield first, second
    assert (first.wrong, second.wrong) == ([], [])
