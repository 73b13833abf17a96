"""Everything that is asked of a libvirt, and the processes that ask it."""
