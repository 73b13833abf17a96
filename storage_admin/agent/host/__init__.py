"""This machine: its filesystems, who has a file open, locks, space, priorities."""
