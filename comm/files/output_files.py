"""Files that a command writes: checked before the command begins, and never half written."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import NoFileError, require_file


def check_writable(flag: str, path: str | os.PathLike[str]) -> None:
    """Check that the file of ``flag`` can be written; nothing is written yet.

    Raises:
        ConfigError: the file cannot be written; says why.
    """
    file = Path(path)
    folder = file.absolute().parent
    try:
        mode = os.stat(file).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}. Name another file.") from None
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{flag} {path} is a folder. Name a file.")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}. Make it first.")
    if not os.access(file if mode else folder, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written. Name another file.")


def check_replaceable(flag: str, path: str | os.PathLike[str]) -> None:
    """`check_writable` for a file that replaces an existing one.

    Raises:
        ConfigError: the file cannot be written, or a device or FIFO would be replaced.
    """
    check_writable(flag, path)
    try:
        require_file(path)
    except NoFileError as error:
        raise ConfigError(f"{flag} {path}: {error}. Name a file, which is replaced.") from None
    except FileNotFoundError:
        pass


def make_folder(flag: str, path: str | os.PathLike[str]) -> None:
    """Make the folder that ``flag`` names, if it does not exist.

    Raises:
        ConfigError: the folder cannot be made; names the reason.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: {error.strerror}. Name a folder that can be written."
        ) from None


def make_writable_folder(flag: str, path: str) -> str:
    """`make_folder` for a folder that must be writable; its absolute path.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    make_folder(flag, path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path} cannot be written. Name another folder.")
    return os.path.abspath(path)


@contextlib.contextmanager
def writing(flag: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the file that ``flag`` names.

    Raises:
        ConfigError: the disk is full, or another error came after the check.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} was not written: {error.strerror or error}. Name another file."
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content as a whole; owner and access rights stay.

    Raises:
        OSError: the file cannot be written and is as before; names ``path``.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            _take_rights(part, target)
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            # Only the file itself is writable, not its folder; or the file is a mount point.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY):
                raise
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _take_rights(part: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        rights = target.stat()
        with contextlib.suppress(PermissionError):
            os.chown(part, rights.st_uid, rights.st_gid)
        part.chmod(rights.st_mode)
