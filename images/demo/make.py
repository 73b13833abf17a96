"""The demo: about twenty small real images in a folder of their own, so that every page has something true to show.

The folder carries a marker that names every file made in it. Without the marker a folder is used only while it is
empty, and nothing that the marker does not name is ever replaced or deleted.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from images.demo.recipes import RECIPES, DemoError, Recipe, Workshop
from storage_admin.agent.folders.pools import is_ours

MARKER = ".storage-admin-demo.json"
#: Images are made in here; scans pass over names that begin like this.
WORKSHOP = ".sa-demo"


@dataclass(frozen=True)
class Made:
    """What a call made, what was there already, and what was left alone because it is not the demo's."""

    made: tuple[str, ...]
    kept: tuple[str, ...]
    foreign: tuple[str, ...]


@dataclass(frozen=True)
class Removed:
    """How many files a call took away, and the names that it left because they are not the demo's."""

    count: int
    foreign: tuple[str, ...]


def make(folder: Path) -> Made:
    """Makes the demo's images that are not in the folder yet.

    Args:
        folder: made if it does not exist; refused if it holds anything and no marker.

    Raises:
        DemoError: the folder is not the demo's or cannot be written, or a tool failed.
    """
    try:
        owned = _enter(folder)
        return _fill(folder, owned)
    except OSError as error:
        raise DemoError(f"{folder} cannot be used: {error.strerror}.") from error


def remove(folder: Path) -> Removed:
    """Takes away what the demo made in a folder, with the undo copies of its images, and the folder once it is empty.

    Undo copies stay where files of others lie in the folder too: they might be theirs.

    Raises:
        DemoError: the folder is not the demo's, or a file cannot be deleted.
    """
    owned = _read_marker(folder)
    if owned is None:
        raise DemoError(f"The demo did not create {folder}, so nothing is removed.")
    try:
        shutil.rmtree(folder / WORKSHOP, ignore_errors=True)
        mine = [folder / name for name in sorted(owned) if _exists(folder / name)]
        foreign = _foreign(folder, owned)
        if not foreign:
            mine += [path for path in folder.iterdir() if is_ours(path.name)]
        for path in mine:
            path.unlink()
        (folder / MARKER).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise DemoError(f"{error.filename or folder} cannot be deleted: {error.strerror}.") from error
    return Removed(len(mine), tuple(foreign))


def is_demo(folder: Path) -> bool:
    """Whether the folder carries the demo's marker."""
    return _read_marker(folder) is not None


def _enter(folder: Path) -> set[str]:
    """The names that the demo made in the folder so far."""
    owned = _read_marker(folder)
    if owned is not None:
        return owned
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file. Name a folder that does not exist yet, or an empty one.")
    if folder.is_dir() and any(folder.iterdir()):
        raise DemoError(
            f"{folder} holds files that the demo did not make, and is left alone. "
            "Name a folder that does not exist yet, or an empty one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # a guest's user goes through it
    _write_marker(folder, set())
    return set()


def _fill(folder: Path, owned: set[str]) -> Made:
    made: list[str] = []
    missing = [recipe for recipe in RECIPES if not all(_exists(folder / name) for name in recipe.names)]
    if missing:
        shutil.rmtree(folder / WORKSHOP, ignore_errors=True)
        workshop = Workshop(folder / WORKSHOP)
        workshop.folder.mkdir(mode=0o700)
        try:
            workshop.prepare()
            for recipe in missing:
                _cook(recipe, workshop)
                made += _publish(recipe, workshop, folder, owned)
        finally:
            shutil.rmtree(workshop.folder, ignore_errors=True)
    names = [name for recipe in RECIPES for name in recipe.names]
    foreign = [name for name in names if name not in owned]
    kept = [name for name in names if name in owned and name not in made]
    return Made(tuple(made), tuple(kept), tuple(foreign))


def _cook(recipe: Recipe, workshop: Workshop) -> None:
    if recipe.base and not _exists(link := workshop.folder / recipe.base):
        link.symlink_to(Path("..") / recipe.base)
    recipe.make(workshop)
    for name in recipe.names:
        (workshop.folder / name).chmod(0o644)


def _publish(recipe: Recipe, workshop: Workshop, folder: Path, owned: set[str]) -> list[str]:
    """Moves what was made to its place; a file that stands there already is never replaced."""
    published = []
    for name in recipe.names:
        place = folder / name
        if _exists(place):
            continue
        # Named first: a demo that is killed in between owns a name without a file, never a file without a name.
        owned.add(name)
        _write_marker(folder, owned)
        made = workshop.folder / name
        with made.open("rb") as image:
            # The filesystem settles how many blocks the file takes when it is written out, not before.
            os.fsync(image.fileno())
        place.hardlink_to(made)
        made.unlink()
        published.append(name)
    return published


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _foreign(folder: Path, owned: set[str]) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name not in owned | {MARKER} and not is_ours(path.name)
    )


def _read_marker(folder: Path) -> set[str] | None:
    known = {name for recipe in RECIPES for name in recipe.names}
    try:
        names = json.loads((folder / MARKER).read_text())["files"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(f"{folder / MARKER} cannot be read, so nothing in the folder is touched: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DemoError(f"{folder / MARKER} was changed, so nothing in the folder is deleted.")
    return known & set(names)


def _write_marker(folder: Path, owned: set[str]) -> None:
    text = {"about": "Storage Admin made these files. manage.py demo --remove takes them away.", "files": sorted(owned)}
    new = folder / f".sa-{MARKER[1:]}"
    new.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n")
    new.replace(folder / MARKER)
