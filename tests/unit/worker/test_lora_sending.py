"""Adapters on their way from rank 0, in an engine that does something else or nothing."""

from __future__ import annotations

import pytest

from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages import KeepAdapter
from trimaran.worker.lora import manager, sent
from trimaran.worker.lora.ops_message import decode_ops, encode_ops, holds_ops

PIECE_BYTES = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (sent, manager):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture(scope="module")
def adapter(model_folder):
    return make_adapter(model_folder, seed=1)


def given(adapter, task):
    """An adapter as the wire has it, unlike that of another task."""
    return {**on_the_wire(adapter), "digest": b"%d" % task}


def test_an_idle_engine_passes_on_what_it_is_told_of(make_engine, adapter):
    driver = make_engine()
    for task in (1, 2):
        message = KeepAdapter(adapter_id=task, adapter=given(adapter, task))
        driver.engine.keep_adapter(message)
    assert driver.engine.has_work

    driver.run()

    store = driver.engine.runner.adapters
    for number in driver.engine._adapters._on_host:
        store.wait_for(number)
    # In pieces: requests that come meanwhile do not wait for all of them.
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    assert driver.num_steps > 2 * size // (2 * PIECE_BYTES)
    assert driver.engine.scheduler.step == 0
    driver.check_idle()


def test_what_ranks_are_told_of_adapters_is_told_from_decisions():
    ops = [["expect", 3, [[0, 1, 4, 8, 8]]], ["piece", 3, b"abc"], ["drop", 3]]

    payload = encode_ops(ops)

    assert holds_ops(payload) and decode_ops(payload) == ops
    with pytest.raises(ProtocolError, match="cannot decode what becomes of adapters in 2 b"):
        decode_ops(b"\x81\xa1")
