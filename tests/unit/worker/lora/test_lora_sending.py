"""Adapters sent from rank 0, in an idle or a busy engine."""

from __future__ import annotations

import pytest

from tests.unit.worker.lora_adapters import make_adapter, on_the_wire, write_peft
from trimaran.comm.errors import ProtocolError, RequestError
from trimaran.comm.messages.messages import KeepAdapter
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora import adapter_messages as sent
from trimaran.worker.lora import manager
from trimaran.worker.lora.adapter_messages import decode_ops, encode_ops, holds_ops
from trimaran.worker.lora.tensor_file import TensorFile

CHUNK_BYTES = 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (sent, manager):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(scope="module")
def adapter(model_folder):
    return make_adapter(model_folder, seed=1)


def given(adapter, task):
    """An adapter in wire form, different for each task."""
    return {**on_the_wire(adapter), "digest": b"%d" % task}


def test_an_idle_engine_sends_new_adapters_to_its_ranks(make_engine, adapter):
    driver = make_engine()
    for task in (1, 2):
        message = KeepAdapter(adapter_id=task, adapter=given(adapter, task))
        driver.engine.keep_adapter(message)
    assert driver.engine.has_work

    driver.run()

    store = driver.engine.runner.adapters
    for number in driver.engine._adapters._on_host:
        store.wait_for(number)
    # The adapters are sent in chunks: new requests do not wait for all chunks.
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    assert driver.num_steps > 2 * size // (2 * CHUNK_BYTES)
    assert driver.engine.scheduler.step == 0
    driver.check_idle()


def test_an_adapter_too_large_to_send_is_refused_before_any_read_or_eviction(
    make_engine, model_folder, adapter, tmp_path, monkeypatch
):
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    monkeypatch.setattr(manager, "_MAX_SENT_BYTES", size)
    monkeypatch.setattr(TensorFile, "read", None)
    larger = make_adapter(model_folder, seed=2, rank=5)
    write_peft(tmp_path / "larger", larger, alpha=4.0)
    lora = LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(1.5 * size))
    driver = make_engine(lora=lora)
    driver.submit([1], max_tokens=1, adapter_id=1, adapter=given(adapter, 1))
    driver.run()

    for fields in ({"adapter": {"name": "larger"}}, {"adapter": given(larger, 2)}):
        with pytest.raises(RequestError, match=f"at most {size} can be sent to all ranks"):
            driver.submit([1], adapter_id=2, **fields)

    driver.submit([1], max_tokens=1, adapter_id=1)
    driver.run()
    driver.check_idle()


def test_adapter_operations_and_decisions_are_told_apart_on_the_wire():
    ops = [["expect", 3, [[0, 1, 4, 8, 8]]], ["piece", 3, b"abc"], ["drop", 3]]

    payload = encode_ops(ops)

    assert holds_ops(payload) and decode_ops(payload) == ops
    with pytest.raises(ProtocolError, match="cannot decode adapter operations in 2 b"):
        decode_ops(b"\x81\xa1")
