"""Proxmox VE: its REST API by token, and its configuration files as the agent's verb ``pve`` brings them.

A node is read by :func:`reader.read` (API) and :func:`conffiles.read` (files), which give the same facts, and
:func:`merging.merged` lays one over the other. What changes something is in :mod:`actions` and :mod:`changes`; what
Proxmox VE makes a task of is followed by :func:`tasks.follow`. ``docs/proxmox.md`` says which rights each needs.
"""
