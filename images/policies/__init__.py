"""Scheduled compaction: what is done by itself, when, to which images, and why not to others."""
