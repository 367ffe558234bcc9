"""The events of a stream, written to the client's connection."""

from __future__ import annotations

from aiohttp import web


class EventWriter:
    """Writes server-sent events of a prepared stream. Writing waits only while the client's
    window is full.
    """

    def __init__(self, request: web.BaseRequest, stream: web.StreamResponse) -> None:
        self._request = request
        self._stream = stream
        self._is_begun = False
        """Whether the head has been sent, with the first event."""

    def write_at_once(self, event: bytes) -> bool:
        """Write an event if nothing has to be waited for; else False: `write` it.

        The same bytes as aiohttp's writer, whose two coroutines take longer than the write.
        """
        request = self._request
        transport = request.transport
        if (
            not self._is_begun
            or transport is None
            or transport.is_closing()
            or request.protocol.writing_paused
            or not self._stream.chunked
        ):
            return False
        transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(event) + len(b"data: \n\n"), event))
        return True

    async def write(self, event: bytes) -> None:
        """Write an event, and wait until the client's window has room for the next.

        Raises:
            ConnectionError: the client is gone.
        """
        await self._stream.write(b"data: %b\n\n" % event)
        self._is_begun = True
        await self._request.writer.drain()
