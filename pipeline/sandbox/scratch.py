"""The scratch directories of profile `files`: made for one child, measured while it runs, removed behind it.

All lie in one folder of the server, `stagecoach-<pid>-...`, which it removes at its end; what a killed server left
behind the next one of the same user removes. The contents are hostile: links cannot be made in there (`filters.py`),
nothing is followed, and depth costs neither recursion nor descriptors. Standard library only: `jail.py` loads this file
by its path.

Not promised: an exact measure. Between two looks a candidate may write more; a file that it unlinked but holds open is
bounded by its descriptors and its memory, not counted here.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "stagecoach-"


def base() -> str:
    """A folder for the scratch directories of this server."""
    _sweep()
    return tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")


def _sweep() -> None:
    """Remove the folders of this user's servers that are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            mine = folder.lstat().st_uid == os.getuid() and stat.S_ISDIR(folder.lstat().st_mode)
            if mine and owner.isdigit() and not Path("/proc", owner).exists():
                remove(str(folder))


def make(folder: str) -> str:
    """A fresh directory in the server's folder."""
    return tempfile.mkdtemp(dir=folder)


def exceeds(path: str, max_bytes: float, max_files: float) -> bool:
    """Whether a scratch directory holds too much; so does one too deep to be named. Gives up early, follows nothing."""
    size, count, folders = 0, 0, [path]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        size += max(found.st_size, found.st_blocks * 512) if stat.S_ISREG(found.st_mode) else 0
                        if stat.S_ISDIR(found.st_mode):
                            folders.append(entry.path)
                    if count > max_files or size > max_bytes:
                        return True
        except (FileNotFoundError, NotADirectoryError):  # gone meanwhile
            continue
        except OSError:  # a path that is too long, or a directory that hides what it holds
            return True
    return False


def remove(path: str) -> None:
    """Remove a directory whose child is dead: deep ones too, so directories are moved up before they are entered."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        number = 0
        waiting = True
        while waiting:
            waiting = False
            for name in os.listdir(top):  # noqa: PTH208
                try:
                    os.unlink(name, dir_fd=top)
                    continue
                except (IsADirectoryError, PermissionError):
                    waiting = True
                number = _lift(top, name, number)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    shutil.rmtree(path)  # empty by now


def _lift(top: int, name: str, number: int) -> int:
    """Unlink the files of a directory in `top` and move its directories to `top` under fresh names."""
    os.chmod(name, 0o700, dir_fd=top)  # it may have been made without the right to list it
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for inner in os.listdir(folder):  # noqa: PTH208
            try:
                os.unlink(inner, dir_fd=folder)
            except (IsADirectoryError, PermissionError):
                number += 1
                os.rename(inner, f"\n{os.getpid()} {number}", src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    return number
