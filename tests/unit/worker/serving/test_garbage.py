"""The times at which the engine's process collects garbage."""

import gc
import weakref

from trimaran.worker.serving import rank_process as garbage
from trimaran.worker.serving.rank_process import GarbageCollection


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_is_collected_when_the_engine_is_idle_and_not_during_steps(monkeypatch):
    monkeypatch.setattr(garbage, "IDLE_PERIOD_S", 0.0)
    with GarbageCollection() as collection:
        seen = weakref.ref(Cycle())
        assert not gc.isenabled()
        collection.after_step()
        assert seen() is not None
        collection.at_rest()
        assert seen() is None
    assert gc.isenabled()


def test_an_engine_that_is_never_idle_collects_garbage_now_and_then(monkeypatch):
    monkeypatch.setattr(garbage, "BUSY_PERIOD_S", 0.0)
    with GarbageCollection() as collection:
        seen = weakref.ref(Cycle())
        collection.after_step()
        assert seen() is None


def test_a_second_idle_moment_starts_no_collection():
    with GarbageCollection() as collection:
        seen = weakref.ref(Cycle())
        collection.at_rest()
        assert seen() is not None
