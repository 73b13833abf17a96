"""Storage Admin: the disk images of Proxmox VE and libvirt/KVM hosts on one dashboard."""

__version__ = "1.0.0"
