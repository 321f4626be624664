"""Files that are there whole or not at all, and whose errors an operator can read."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmgw.errors import BadInput, Conflict, LlmgwError, NotFound

#: Only the owner may read: keys, tokens.
PRIVATE = 0o600
PUBLIC = 0o644
#: What a file system without room says.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_whole(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Replace a file in one step, durably; a reader sees the old content or the new, and never too much of it.

    Raises LlmgwError that names the path and what is wrong with it.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise _cannot("write", path, error) from None


def read_whole(path: Path, what: str = "", remedy: str = "") -> bytes:
    """A file's bytes. Raises NotFound with `remedy` when it is not there, LlmgwError when it is none or unreadable."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path} is missing" + (f" ({what})" if what else ""), remedy=remedy) from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory, where a file is due" + (f" ({what})" if what else "")) from None
    except OSError as error:
        raise _cannot("read", path, error) from None


def make_directory(path: Path, mode: int = 0o700) -> None:
    """A directory that we can write in, made with its parents when missing. Raises LlmgwError when we cannot."""
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except FileExistsError:
        raise BadInput(f"{path} is a file, where a directory is due") from None
    except OSError as error:
        raise _cannot("make", path, error) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise LlmgwError(f"cannot write in {path}", remedy=f"run as {_owner(path)}, or `chown` it to this user")


def refuse_shared(path: Path, what: str) -> None:
    """Raise when others than the owner can read a secret file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise LlmgwError(
            f"{path} ({what}) can be read by others than its owner (mode {mode:04o})",
            remedy=f"chmod 600 {path}, and think whether somebody has read it",
        )


@contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """While the block runs this process has the lock of that file. Raises Conflict that names who has it.

    The kernel holds it by the open file, so that a process which is killed leaves nothing behind that is locked.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    except OSError as error:
        raise _cannot("write", path, error) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise Conflict(
                f"{what} is running in {path.parent} already (pid {holder})",
                remedy="stop that one first, or give this one a directory of its own",
            ) from None
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds without the number
        try:
            yield
        finally:
            # Said, and not left to the closing: a child that is just being started has the open file too for a moment.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class NoSpace(LlmgwError):
    """The file system of a file is full, or its owner's quota is."""


def _cannot(verb: str, path: Path, error: OSError) -> LlmgwError:
    if error.errno in FULL:
        return NoSpace(f"cannot {verb} {path}: {error.strerror}", remedy="free space on its disk")
    remedies = {
        "PermissionError": f"run as {_owner(path)}, or give this user the right to {verb} it",
        "NotADirectoryError": "a part of this path is a file",
    }
    return LlmgwError(f"cannot {verb} {path}: {error.strerror}", remedy=remedies.get(type(error).__name__, ""))


def _owner(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            return place.owner()
        except KeyError:
            return f"the user with id {place.stat().st_uid}"
        except OSError:
            continue
    return "another user"
