"""At most one writer per directory.

The lock belongs to an open file (flock, through filelock), not to a process: reading or copying the directory in the process that
writes it does not drop it, and the kernel drops it when that process ends, however it ends.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from normscope._watch.directory import LOCK, REGULAR_ONLY, STATUS, opened, refuse_unless_regular
from normscope._watch.growing import FollowedStatus
from normscope.core.errors import InputError

PATIENCE = 0.5  # seconds: a reader that asks holds the lock for an instant


class Lock:
    """Held from its construction until `release`. path, file: where it was, and a descriptor that tells whether it still is."""

    def __init__(self, directory: Path) -> None:
        self.path = path = directory.resolve() / LOCK
        if os.path.lexists(path):
            refuse_unless_regular(path, os.lstat(path).st_mode)
        self._lock = FileLock(path, thread_local=False)
        try:
            self._acquire(directory)
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be locked: {error.strerror or error}") from error
        self.file = os.open(path, REGULAR_ONLY)

    def _acquire(self, directory: Path) -> None:
        try:
            self._lock.acquire(timeout=PATIENCE, poll_interval=0.02)
        except Timeout as error:
            if os.name == "posix" and is_being_written(directory) is None:  # older filelock takes any error for a lock that is held
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from error
            raise InputError(
                f"{directory} is being written by {_owner(directory)}: choose another run=, or close that watch"
            ) from error
        except NotImplementedError as error:
            raise OSError(errno.ENOSYS, str(error)) from error

    def release(self) -> None:
        if self._lock.is_locked:
            os.close(self.file)
        self._lock.release(force=True)


def owner() -> dict[str, Any]:
    """This process, as a status names it."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _owner(directory: Path) -> str:
    """Who says in its status that it writes a directory."""
    status = FollowedStatus(directory / STATUS)
    try:
        status.refresh()
    except InputError:
        return "another process"
    said = status.content or {}
    if {key: said.get(key) for key in owner()} == owner():
        return "this process"
    return f"another process ({said['pid']})" if isinstance(said.get("pid"), int) else "another process"


def is_being_written(directory: Path) -> bool | None:
    """Whether a process holds the directory's lock; None where there is no lock to ask."""
    try:
        import fcntl
    except ImportError:  # a system without flock
        return None
    try:
        with opened(directory / LOCK) as (file, _):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except InputError:
        return None
