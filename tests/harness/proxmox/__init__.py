"""A server that answers as Proxmox VE does, held to its official schema; ``tests/data/proxmox`` has what it goes by."""
