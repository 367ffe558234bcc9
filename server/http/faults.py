"""The log of connections that send what is no HTTP: one line each, for nothing failed here."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

_LONGEST = 160
"""Characters of a line that a client may fill."""


class _ClientFaults(logging.Filter):
    """Turns the error of a malformed request, a traceback otherwise, into information."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        client = record.args[0] if isinstance(record.args, tuple) and record.args else "?"
        reason = " ".join(str(error.message).split())[:_LONGEST]
        record.msg, record.args = "%s sent no valid HTTP request: %s", (client, reason)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
        return logger.isEnabledFor(logging.INFO)


logger = logging.getLogger(__name__)
logger.addFilter(_ClientFaults())
