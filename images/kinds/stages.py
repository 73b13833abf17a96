"""The stages of a rewrite that all methods end with, as parts of the whole job in percent."""

#: From here on the new file is written: what it takes is missing from the filesystem's free space already.
WRITTEN: dict[str, tuple[float, float]] = {
    "verifying": (70, 97),
    "syncing": (97, 98),
    "swapping": (98, 100),
}
