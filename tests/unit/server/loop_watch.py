"""The longest occupation of a server's event loop, in processor time of the whole process.

Wall-clock time would include other processes on a busy machine.
"""

import time

LONGEST_PAUSE_S = 0.5


class LoopWatch:
    """The most processor time of this process within one callback of a server's loop."""

    def __init__(self, server):
        self._server = server
        self._handle = None
        self._last = 0.0
        self.longest_s = 0.0

    def __enter__(self):
        self._server.run(self._begin())
        return self

    def __exit__(self, *exception):
        self._server.run(self._end())

    async def _begin(self):
        self._last = time.process_time()
        self._tick()

    async def _end(self):
        self._handle.cancel()

    def _tick(self):
        now = time.process_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        self._handle = self._server.loop.call_later(0.002, self._tick)
