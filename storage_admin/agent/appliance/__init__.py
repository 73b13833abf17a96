"""A guest's filesystems, as libguestfs' appliance mounts them."""
