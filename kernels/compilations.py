"""Notice of each kernel that this process compiles, or reads from a cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class CompilationListener(Protocol):
    """Gets a notice of each kernel that the main thread waits for."""

    def begin(self, name: str) -> None:
        """A kernel is about to be compiled or read."""
        ...

    def end(self, name: str, seconds: float, *, is_cached: bool) -> None:
        """The kernel is there; ``is_cached`` if an earlier process had compiled the kernel."""
        ...


class CompilationHooks:
    """Passes notices of Triton and of our CUDA kernels on to one listener.

    Other threads compile kernels ahead of their use, and no step waits for these threads.
    """

    def __init__(self) -> None:
        self._listener: CompilationListener | None = None
        self._num_compiled = 0
        """Kernels of ours that any thread has compiled."""

    def connect(self, listener: CompilationListener) -> None:
        """From now on tell ``listener``. On a machine with Triton."""
        # Imported late, because a CPU needs no Triton.
        from triton import knobs

        self._listener = listener
        knobs.runtime.jit_cache_hook = self._triton_begins
        knobs.compilation.listener = self._triton_ended

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """The context in which a kernel of ours is compiled or read, by this thread, or by
        others that this thread waits for."""
        listener = self._current()
        if listener is None:
            yield
            return
        begin, num_before = time.monotonic(), self._num_compiled
        listener.begin(name)
        try:
            yield
        finally:
            is_cached = self._num_compiled == num_before
            listener.end(name, time.monotonic() - begin, is_cached=is_cached)

    def compiled(self) -> None:
        """Take note that a thread has compiled a kernel of ours."""
        self._num_compiled += 1

    def _current(self) -> CompilationListener | None:
        is_main = threading.current_thread() is threading.main_thread()
        return self._listener if is_main else None

    def _triton_begins(self, *, fn: Any, **_: object) -> bool:
        """Triton's hook before a compilation, which true would prevent."""
        listener = self._current()
        if listener is not None:
            listener.begin(fn.name)
        return False

    def _triton_ended(
        self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: object
    ) -> None:
        listener = self._current()
        if listener is not None:
            name = metadata.get("name", "?")
            listener.end(name, times.total / 1e6, is_cached=cache_hit)


hooks = CompilationHooks()
"""The hooks of this process; Triton's hooks are global too."""
