"""How long a server's event loop was kept by one thing, in the work of the whole process.

Not by the clock: on a busy machine that tells how long others ran.
"""

import time

LONGEST_PAUSE_S = 0.5


class LoopWatch:
    """What work this process did, at most, while a server's loop did nothing else."""

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
