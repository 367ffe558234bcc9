"""A poll goes on where the repository cannot be read for a while, from the first look on."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from controlled_frontend import ControlledFrontend
from started_frontend import write_repository

from trimaran.comm.errors import ConfigError
from trimaran.server.loading.startup import RepositoryPoll


class Shaky:
    """A reader that fails at some polls; the repository changes with each poll."""

    def __init__(self, *failing):
        self.num_looks = 0
        self._failing = failing

    def fingerprints(self):
        self.num_looks += 1
        if self.num_looks in self._failing:
            raise ConfigError("stale file handle")
        return {"m": f"state {self.num_looks}"}


class Control:
    """Notes what is loaded; nothing is at first."""

    def __init__(self):
        self.asked = []

    def fingerprints(self):
        return {"m": "state 2"}

    async def load(self, request):
        self.asked.append(request.name)


async def looks_of(reader, control, num_looks):
    """Let a poll look so often."""
    poll = asyncio.ensure_future(RepositoryPoll(reader, control, 0.01).run())
    while reader.num_looks < num_looks and not poll.done():
        await asyncio.sleep(0.01)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    return poll


def test_a_poll_survives_failed_reads_including_the_first(caplog):
    reader, control = Shaky(1, 3), Control()
    poll = asyncio.run(looks_of(reader, control, 5))
    assert poll.cancelled()
    # Looks: failed, the first, failed, a change, and perhaps another.
    assert control.asked[:1] == ["m"]
    assert caplog.text.count("the repository cannot be read: stale file handle") == 2


def test_a_successor_loads_a_new_model_whose_load_was_interrupted(tmp_path):
    write_repository(tmp_path / "repository")
    with contextlib.ExitStack() as stack:
        before = ControlledFrontend(stack, tmp_path, held=["tensorrt_llm"])
        before.wait_ready()

        def load():
            with contextlib.suppress(OSError):
                before.load("tensorrt_llm")

        loading = threading.Thread(target=load)
        loading.start()
        before.wait_until(lambda: before.started)
        before.process.kill()
        before.process.wait()
        loading.join()
        after = ControlledFrontend(
            stack, tmp_path, saved_state=before.saved["state"],
            model_control_mode="poll", repository_poll_s=0.1,
        )  # fmt: skip
        after.wait_ready()
        after.wait_until(lambda: after.index().get("tensorrt_llm") == ("READY", None))
        assert set(after.index()) == {"tensorrt_llm"}
