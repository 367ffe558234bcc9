"""Folders of adapters that are written while they are read, and files that are no adapters."""

from __future__ import annotations

import os
from itertools import groupby

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.worker.lora_adapters import (
    greedy,
    make_adapter,
    merged,
    on_the_wire,
    write_peft,
)
from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import KeepAdapter
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora import adapter_messages as sent
from trimaran.worker.lora import manager, store
from trimaran.worker.lora.adapter_messages import ArrivingAdapter, OutgoingAdapter
from trimaran.worker.lora.formats import AdapterFolders, read_folder, to_tensors, write_arrays
from trimaran.worker.lora.layout import AdapterFormatError
from trimaran.worker.lora.peft import PeftAdapter
from trimaran.worker.lora.tensor_file import TensorFile

LENGTH = 8
PEFT, ARRAYS = "adapter_model.safetensors", "model.lora_weights.npy"


@pytest.fixture(scope="module")
def adapter(model_folder):
    return make_adapter(model_folder, seed=1)


def write(folder, adapter, form):
    if form == PEFT:
        write_peft(folder, adapter, alpha=4.0)
    else:
        write_arrays(to_tensors(adapter), folder, "float32")


def cut(folder, size=0):
    for path in folder.iterdir():
        os.truncate(path, size)


def remove(folder):
    for path in folder.iterdir():
        path.unlink()


def zero(folder):
    for path in folder.iterdir():
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut, remove, zero])
@pytest.mark.parametrize("form", [PEFT, ARRAYS])
@pytest.mark.parametrize("is_prefetched", [False, True])
def test_a_request_gets_the_adapter_files_as_they_were_at_its_arrival(
    make_engine, model_folder, adapter, prompt_of, tmp_path, is_prefetched, form, damage
):
    if is_prefetched:
        write(tmp_path / "a", adapter, form)
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    write(tmp_path / "a", adapter, form)
    good = driver.submit([1, 2, 3], max_tokens=LENGTH)

    asked = driver.submit(prompt_of(20), max_tokens=LENGTH, adapter={"name": "a"})
    damage(tmp_path / "a")
    driver.run()

    expected = greedy(merged(model_folder, adapter), prompt_of(20), LENGTH)
    assert driver.output(asked) == expected
    assert len(driver.output(good)) == LENGTH
    driver.check_idle()


@pytest.mark.parametrize("form", [PEFT, ARRAYS])
@pytest.mark.parametrize("size", [0, 4, 64, 300, 4000])
def test_an_incomplete_adapter_file_is_refused_until_its_last_byte_is_written(
    make_engine, model_folder, adapter, prompt_of, tmp_path, form, size
):
    write(tmp_path / "a", adapter, form)
    whole = (tmp_path / "a" / form).read_bytes()
    os.truncate(tmp_path / "a" / form, size)
    # The adapter is left out at the start.
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    good = driver.submit([1, 2, 3], max_tokens=LENGTH)

    with pytest.raises(RequestError, match=f"{form}: cannot be read") as caught:
        driver.submit([1, 2], adapter={"name": "a"})
    (tmp_path / "a" / form).write_bytes(whole)
    asked = driver.submit(prompt_of(20), max_tokens=LENGTH, adapter={"name": "a"})
    driver.run()

    assert caught.value.kind is ErrorKind.INVALID_ARG
    expected = greedy(merged(model_folder, adapter), prompt_of(20), LENGTH)
    assert driver.output(asked) == expected
    assert len(driver.output(good)) == LENGTH
    driver.check_idle()


def test_weights_that_change_between_reading_names_and_values_are_refused(adapter, tmp_path):
    write_peft(tmp_path, adapter, alpha=4.0)
    whole = (tmp_path / PEFT).read_bytes()
    found = PeftAdapter(tmp_path)
    save_file({"lora_A": torch.zeros(2, 2)}, tmp_path / PEFT)

    with pytest.raises(AdapterFormatError, match="holds other tensors than a moment ago"):
        list(found.matrices())
    (tmp_path / PEFT).write_bytes(whole)
    first = list(found.matrices())
    (tmp_path / PEFT).unlink()
    # The adapter that was checked is the adapter that is used.
    for one, other in zip(first, found.matrices(), strict=True):
        assert torch.equal(one.a, other.a) and torch.equal(one.b, other.b)


def of_shapes(a, b):
    """A file of two tensors, of float32."""
    name = "model.layers.0.self_attn.q_proj.lora_"
    return {f"{name}A.weight": torch.zeros(a), f"{name}B.weight": torch.zeros(b)}


def with_header(header):
    return len(header).to_bytes(8, "little") + header


def of_type(dtype, num_bytes, begin, end):
    said = f'{{"x": {{"dtype": "{dtype}", "shape": [1], "data_offsets": [{begin}, {end}]}}}}'
    return with_header(said.encode()) + bytes(num_bytes)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "cannot be read: it does not begin with the names and shapes of tensors"),
        (b"\xff" * 8, "cannot be read: it does not begin with"),
        (with_header(b"[4]"), "cannot be read: it does not begin with"),
        (with_header(b"[" * 100_000), "cannot be read: it does not begin with"),
        (with_header(b'{"x": {"dtype": "F32"}}'), "cannot be read: it does not begin with"),
        (with_header(b'{"x": {"shape": ["y"]}}'), "cannot be read: it does not begin with"),
        (with_header(b'{"x": {"shape": 3}}'), "cannot be read: it does not begin with"),
        (
            of_type("F32", 4, -2, 2),
            r"cannot be read: 'x' of shape \[1\] has 4 bytes instead of",
        ),
        (of_type("F32", 4, 1 << 70, (1 << 70) + 4), "cannot be read: it ends before its last"),
        (of_type("F32", 4, 0.0, 4), "cannot be read: it does not begin with"),
        (of_type("F32", 4, "Infinity", 4), "cannot be read: it does not begin with"),
        (of_type("F32", 3, 0, 3), "'x' of shape .1. has 3 bytes instead of 4"),
        (of_type("I64", 8, 0, 8), "'x' is I64 but must be one of F64, F32, F16, BF16"),
        (of_shapes((), (32,)), r"A.weight has shape \[\] and .* but they must be matrices"),
        (of_shapes((0, 32), (32, 0)), r"A.weight has shape \[0, 32\] and .* of at least 1"),
        (of_shapes((4,), (32, 4)), r"A.weight has shape \[4\] and .* must be matrices"),
    ],
)
def test_adapters_with_unpaired_matrices_are_refused_and_left_out_at_the_start(
    make_engine, adapter, tmp_path, raw, text
):
    for name in ("bad", "good"):
        write_peft(tmp_path / name, adapter, alpha=4.0)
    if isinstance(raw, bytes):
        (tmp_path / "bad" / PEFT).write_bytes(raw)
    else:
        save_file(raw, tmp_path / "bad" / PEFT)

    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    with pytest.raises(RequestError, match=text) as caught:
        driver.submit([1, 2], adapter={"name": "bad"})
    good = driver.submit([1, 2], max_tokens=4, adapter={"name": "good"})
    driver.run()

    assert caught.value.kind is ErrorKind.INVALID_ARG
    assert len(driver.output(good)) == 4
    assert driver.engine.stats()["lora_host_adapters"] == 1
    driver.check_idle()


def config_of(value):
    """The converter's second file, with one number replaced."""

    def spoil(folder, adapter):
        write_arrays(to_tensors(adapter), folder, "float32")
        config = to_tensors(adapter).config_N3.astype(type(value))
        config[0, 1] = value
        np.save(folder / "model.lora_config.npy", config)

    return spoil


def json_of(text):
    """PEFT's configuration."""

    def spoil(folder, adapter):
        write_peft(folder, adapter, alpha=4.0)
        (folder / "adapter_config.json").write_text(text)

    return spoil


def layer_of(number):
    """A tensor of this layer."""

    def spoil(folder, adapter):
        write_peft(folder, adapter, alpha=4.0)
        name = f"model.layers.{number}.self_attn.q_proj.lora_"
        pair = {f"{name}{which}.weight": torch.ones(4, 4) for which in "AB"}
        save_file(pair, folder / PEFT)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        config_of(0.5),
        config_of(float("nan")),
        config_of(1 << 32),
        config_of("x"),
        json_of('{"lora_alpha": 1' + "0" * 400 + "}"),
        json_of('{"lora_alpha": 1e400}'),
        json_of('{"lora_alpha": NaN}'),
        json_of('{"lora_alpha": ' + "[" * 100_000),
        json_of('{"lora_alpha": 1' + "0" * 5000 + "}"),
        layer_of("9" * 5000),
        layer_of(1 << 70),
    ],
)
def test_adapter_folders_with_impossible_values_are_refused_and_left_out_at_the_start(
    make_engine, adapter, tmp_path, spoil
):
    write_peft(tmp_path / "good", adapter, alpha=4.0)
    spoil(tmp_path / "bad", adapter)

    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    with pytest.raises(RequestError) as caught:
        driver.submit([1, 2], adapter={"name": "bad"})
    good = driver.submit([1, 2], max_tokens=4, adapter={"name": "good"})
    driver.run()

    assert caught.value.kind is ErrorKind.INVALID_ARG
    assert len(driver.output(good)) == 4
    assert driver.engine.stats()["lora_host_adapters"] == 1
    driver.check_idle()


@pytest.mark.parametrize("place", ["folder", "request"])
def test_other_requests_run_while_an_adapter_is_sent_in_chunks(
    make_engine, model_folder, adapter, prompt_of, tmp_path, monkeypatch, place
):
    for module in (sent, manager):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    for name in ("a", "b"):
        write_peft(tmp_path / name, adapter, alpha=4.0)
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    driver = make_engine(
        lora=LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(1.5 * size))
    )
    given = {name: {"adapter": {"name": name}} for name in ("a", "b")}
    if place == "request":
        wire = {name: {**on_the_wire(adapter), "digest": name.encode()} for name in given}
        given = {name: {"adapter_id": ord(name), "adapter": wire[name]} for name in given}
    cache, chunks = driver.engine._adapters, []
    take_ops = cache.take_ops

    def look():
        ops = take_ops()
        chunks.append(sum(len(op[2]) for op in ops if op[0] == store.CHUNK))
        return ops

    monkeypatch.setattr(cache, "take_ops", look)
    running = driver.submit([1], max_tokens=100)
    driver.step()
    for name in "ba":
        # The second adapter replaces the first, of which some chunks were sent.
        last = driver.submit(prompt_of(20), max_tokens=LENGTH, **given[name])
        for _ in range(4):
            driver.step()
        assert not driver.output(last)
        if name == "b":
            driver.engine.cancel("client", [last])
    driver.run()

    assert max(chunks) < 2000 and sum(chunks) == size + sum(chunks[:4])
    assert len(driver.output(running)) == 100
    expected = greedy(merged(model_folder, adapter), prompt_of(20), LENGTH)
    assert driver.output(last) == expected
    # Without other work the adapter arrives at once.
    alone = driver.submit(prompt_of(20), max_tokens=LENGTH, **given["b"])
    driver.step()
    assert chunks[-1] == size and len(driver.output(alone)) == 1
    driver.run()
    assert driver.output(alone) == expected
    driver.check_idle()


@pytest.mark.parametrize("place", ["folder", "request"])
def test_weights_of_an_adapter_without_room_are_not_read(
    make_engine, adapter, tmp_path, monkeypatch, place
):
    for name in ("a", "b"):
        write_peft(tmp_path / name, adapter, alpha=4.0)
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    driver = make_engine(
        lora=LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(1.5 * size))
    )
    other = {"adapter": {"name": "b"}}
    if place == "request":
        other = {"adapter_id": 5, "adapter": on_the_wire(adapter)}
    # Its values need no second check.
    driver.submit([1], max_tokens=1, **other)
    driver.run()
    running = driver.submit([1], max_tokens=LENGTH, adapter={"name": "a"})
    monkeypatch.setattr(OutgoingAdapter, "of", None)

    with pytest.raises(RequestError, match="is full of adapters") as caught:
        driver.submit([1], max_tokens=1, **other)
    driver.run()

    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert len(driver.output(running)) == LENGTH
    driver.check_idle()


def test_adapters_with_waiting_requests_are_sent_first(
    make_engine, model_folder, adapter, prompt_of, monkeypatch
):
    for module in (sent, manager):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2000)
    driver = make_engine()
    cache, sent_numbers = driver.engine._adapters, []
    take_ops = cache.take_ops

    def look():
        ops = take_ops()
        sent_numbers.extend(op[1] for op in ops if op[0] == store.CHUNK)
        return ops

    monkeypatch.setattr(cache, "take_ops", look)
    given = {task: {**on_the_wire(adapter), "digest": b"%d" % task} for task in range(1, 6)}
    running = driver.submit([1], max_tokens=125)
    driver.step()
    # For example, a front end sends the adapter to a restarted engine.
    for task in (1, 2, 3):
        driver.engine.keep_adapter(KeepAdapter(adapter_id=task, adapter=given[task]))
    gone = driver.submit([1], max_tokens=1, adapter_id=4, adapter=given[4])
    driver.step()
    driver.engine.cancel("client", [gone])

    asked = driver.submit(prompt_of(20), max_tokens=LENGTH, adapter_id=5, adapter=given[5])
    while not driver.output(asked):
        driver.step()
    assert [number for number, _ in groupby(sent_numbers)][:2] == [4, 5]
    late = driver.submit(prompt_of(20), max_tokens=LENGTH, adapter_id=3)
    driver.run()

    expected = greedy(merged(model_folder, adapter), prompt_of(20), LENGTH)
    assert driver.output(asked) == driver.output(late) == expected
    assert len(driver.output(running)) == 125
    driver.check_idle()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sent_adapter_arrives_in_the_dtype_and_layout_of_the_model(
    make_engine, adapter, dtype
):
    layout = make_engine().engine._adapters._layout
    tensors = to_tensors(adapter)

    outgoing = OutgoingAdapter.of(adapter, dtype)
    arrived = ArrivingAdapter(msgpack.unpackb(msgpack.packb(outgoing.rows)), dtype)
    for chunk in outgoing.chunks():
        assert not arrived.is_whole
        arrived.add(msgpack.unpackb(msgpack.packb(chunk)))
    assert arrived.is_whole

    assert arrived.ranks == tensors.ranks
    size = layout.size_of(arrived.ranks)
    for is_transposed in (False, True):
        packed, expected = (
            layout.pack(one.matrices(layout), size, dtype, is_transposed=is_transposed)
            for one in (arrived, tensors)
        )
        assert torch.equal(packed.data, expected.data) and packed.matrices == expected.matrices


def test_arrays_of_either_order_are_read_as_they_were_saved(make_engine, adapter, tmp_path):
    tensors = to_tensors(adapter)
    write_arrays(tensors, tmp_path, "float32")
    np.save(tmp_path / ARRAYS, np.asfortranarray(tensors.weights_NK))
    layout = make_engine().engine._adapters._layout

    found = read_folder(tmp_path)
    for one, other in zip(found.matrices(layout), adapter, strict=True):
        assert torch.equal(one.a, other.a) and torch.equal(one.b, other.b)
    assert np.array_equal(found.weights_NK, tensors.weights_NK)
    assert AdapterFolders(str(tmp_path.parent)).find(tmp_path.name) == tmp_path


@pytest.mark.parametrize("form", [PEFT, ARRAYS])
def test_weights_are_read_only_for_adapters_that_fit_the_host_cache(
    make_engine, adapter, tmp_path, monkeypatch, form
):
    for n in range(8):
        write(tmp_path / f"a{n}", adapter, form)
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    num_bytes = 0

    def count(read):
        def look(*args, **kwargs):
            nonlocal num_bytes
            values = read(*args, **kwargs)
            num_bytes += values.nbytes
            return values

        return look

    monkeypatch.setattr(np, "fromfile", count(np.fromfile))
    monkeypatch.setattr(TensorFile, "_tensor", count(TensorFile._tensor))
    lora = LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(2.5 * size))
    driver = make_engine(lora=lora)

    assert driver.engine._adapters.num_on_host == 2
    # Rows of the two files are as long as the longest row, and their configs are small.
    assert 2 * size <= num_bytes < 4 * size


def test_an_array_that_memory_cannot_hold_is_refused_and_left_out_at_the_start(
    make_engine, adapter, tmp_path, monkeypatch
):
    """A sparse file may claim any size."""
    for name in ("bad", "good"):
        write(tmp_path / name, adapter, ARRAYS)
    read = np.fromfile

    def look(path, **kwargs):
        if path.parent.name == "bad" and path.name == ARRAYS:
            raise MemoryError("Unable to allocate 4.00 TiB")
        return read(path, **kwargs)

    monkeypatch.setattr(np, "fromfile", look)
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    with pytest.raises(RequestError, match="cannot be read: Unable to allocate"):
        driver.submit([1, 2], adapter={"name": "bad"})

    assert driver.engine._adapters.num_on_host == 1
    driver.check_idle()


def test_an_array_that_changes_before_its_numbers_are_read_is_refused(
    make_engine, adapter, tmp_path
):
    write(tmp_path, adapter, ARRAYS)
    found = read_folder(tmp_path)
    np.save(tmp_path / ARRAYS, np.zeros((len(found.config_N3), 3), dtype=np.float32))

    with pytest.raises(AdapterFormatError, match="holds another array than a moment ago"):
        list(found.matrices(make_engine().engine._adapters._layout))
