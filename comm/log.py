"""The one log handler of a process: text or JSON lines that name role and rank."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from typing import TextIO


class _TextFormatter(logging.Formatter):
    def __init__(self, origin: str) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = (
            f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} "
            f"[{self._origin} pid {record.process}] {record.getMessage()}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str, rank: int | None, group: str) -> None:
        super().__init__()
        self._fields: dict[str, object] = {"role": role}
        if rank is not None:
            self._fields["rank"] = rank
        if group:
            self._fields["group"] = group

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            **self._fields,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _LossyStreamHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Drops lines that cannot be written: a full disk must not stop serving.

    The first lost line of a file is reported to the other handlers.
    """

    def __init__(self, stream: TextIO, path: str = "") -> None:
        super().__init__(stream)
        self._untold = path

    def flush(self) -> None:
        # Also called by `setStream`, for lines that could not be written before.
        with contextlib.suppress(OSError):
            super().flush()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self._untold:
            path, self._untold = self._untold, ""
            logging.getLogger(__name__).warning(
                "%s lacks lines from here on, of which some cannot be written: %s. Free space "
                "there, or name another --log-dir.", path, error.strerror,
            )  # fmt: skip


def join_log(path: str) -> None:
    """Redirect the output of this process, C libraries included, to a pipe of this host.

    A pipe that cannot be opened changes nothing.
    """
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        logging.getLogger(__name__).warning("cannot write to the common log", exc_info=True)
        return
    for descriptor in (1, 2):
        os.dup2(pipe, descriptor)
    os.close(pipe)


def setup_logging(
    role: str,
    *,
    rank: int | None = None,
    group: str = "",
    log_format: str = "text",
    level: str = "INFO",
    directory: str = "",
) -> None:
    """Log to stderr, where INFO is dropped on ranks above 0.

    The level is that of the root logger, so that it can be changed while the process runs.

    With ``directory`` every line also goes to a file of this process there, such as
    ``frontend.log`` or ``GROUP-rank1.log``, to which its next incarnation appends. A file
    that cannot be opened is reported on stderr.
    """
    formatter: logging.Formatter
    if log_format == "json":
        formatter = _JsonFormatter(role, rank, group)
    else:
        origin = role if rank is None else f"{group} {role} {rank}".lstrip()
        formatter = _TextFormatter(origin)
    on_stderr = _LossyStreamHandler(sys.stderr)
    if rank not in (None, 0) and level == "INFO":
        on_stderr.setLevel("WARNING")
    handlers: list[logging.Handler] = [on_stderr]
    problem: OSError | None = None
    if directory:
        name = role if rank is None else f"{group}-{role}{rank}".lstrip("-")
        path = os.path.join(directory, f"{name}.log")
        try:
            handlers.append(_LossyStreamHandler(_opened(path), path))
        except OSError as error:
            problem = error
    for handler in handlers:
        handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level)
    if problem is not None:
        logging.getLogger(__name__).warning(
            "%s cannot be opened: %s. Lines of this process go to the common log alone; mend "
            "the folder of --log-dir.", path, problem.strerror,
        )  # fmt: skip


def _opened(path: str) -> TextIO:
    """A log file to append to, held open for the life of the process. A folder that was
    deleted since the server's start is created again."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
