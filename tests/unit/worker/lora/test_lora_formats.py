"""Formats of adapters: PEFT's folders, the converter's files, and invalid ones."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.worker.lora_adapters import (
    greedy,
    make_adapter,
    merged,
    on_the_wire,
    tensors_on_the_wire,
    write_peft,
)
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import KeepAdapter
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora import manager
from trimaran.worker.lora.formats import (
    AdapterFolders,
    AdapterTensors,
    read_folder,
    to_tensors,
    write_arrays,
)
from trimaran.worker.lora.layout import AdapterFormatError
from trimaran.worker.lora.peft import PeftAdapter

LENGTH = 8


@pytest.fixture(scope="module")
def adapter(model_folder):
    return make_adapter(model_folder, seed=1)


def test_a_folder_of_peft_holds_the_scaled_matrices(adapter, tmp_path):
    write_peft(tmp_path, adapter, alpha=32.0)

    found = {(one.layer, one.module): one for one in PeftAdapter(tmp_path).matrices()}

    assert len(found) == len(adapter)
    for one in adapter:
        other = found[one.layer, one.module]
        torch.testing.assert_close(other.b @ other.a, one.b @ one.a)


def test_rank_stabilised_scaling_and_rank_patterns_take_effect(adapter, tmp_path):
    write_peft(tmp_path, adapter, alpha=16.0)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text()) | {
        "use_rslora": True,
        "alpha_pattern": {"layers.1.self_attn.k_proj": 8.0},
    }
    path.write_text(json.dumps(config))

    found = {(one.layer, one.module): one for one in PeftAdapter(tmp_path).matrices()}

    for one in adapter:
        # 16 / sqrt(4) instead of 16 / 4.
        factor = 1.0 if (one.layer, one.module) == (1, 2) else 2.0
        torch.testing.assert_close(found[one.layer, one.module].b, factor * one.b)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_dora": True}, "use_dora is True, but only plain LoRA adapters"),
        ({"bias": "all"}, "bias is 'all', but only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (
            {"lora_alpha": "4"},
            "adapter_config.json: lora_alpha is '4' but must be a finite number",
        ),
        ({"lora_alpha": None}, "lora_alpha is None but must be a finite number"),
        ({"alpha_pattern": [4]}, r"alpha_pattern is \[4\] but must be an object"),
        ({"alpha_pattern": {"q_proj": "4"}}, r"alpha_pattern\.q_proj is '4' but must be a fin"),
        ({"use_rslora": "no"}, "use_rslora is 'no' but must be true or false"),
    ],
)
def test_adapter_kinds_other_than_plain_lora_are_refused(adapter, tmp_path, changes, text):
    write_peft(tmp_path, adapter, alpha=4.0)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(AdapterFormatError, match=text):
        PeftAdapter(tmp_path)


def test_a_configuration_that_is_no_object_is_refused(adapter, tmp_path):
    write_peft(tmp_path, adapter, alpha=4.0)
    path = tmp_path / "adapter_config.json"
    path.write_text("[4]")

    with pytest.raises(AdapterFormatError, match=r"adapter_config\.json: is \[4\] but must"):
        PeftAdapter(tmp_path)


def test_a_tensor_that_is_no_lora_matrix_is_refused_by_name(adapter, tmp_path):
    write_peft(tmp_path, adapter, alpha=4.0)
    save_file(
        {"model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)},
        tmp_path / "adapter_model.safetensors",
    )

    with pytest.raises(AdapterFormatError, match=r"embed_tokens\.lora_embedding_A"):
        PeftAdapter(tmp_path)


@pytest.mark.parametrize("name", ["model.lora_config.npy", "model.lora_keys.npy"])
def test_files_of_the_converter_are_read_back(adapter, tmp_path, name):
    tensors = to_tensors(adapter)
    write_arrays(tensors, tmp_path, "float32")
    (tmp_path / "model.lora_config.npy").rename(tmp_path / name)

    found = read_folder(tmp_path)

    assert np.array_equal(found.weights_NK, tensors.weights_NK)
    assert np.array_equal(found.config_N3, tensors.config_N3)
    assert np.load(tmp_path / "model.lora_weights.npy").ndim == 3


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            [13, 0, 4],
            r"row 0, \[13, 0, 4\]: the model has no module 13 \(moe_h_to_4h\) in layer",
        ),
        ([1, 2, 4], r"no module 1 \(attn_q\) in layer 2. Its 2 layers have attn_qkv, attn_q"),
        ([40, 0, 4], "the model has no module 40 in layer 0"),
        ([1, 0, 65], "the adapter size 65 must be 1 to 64 .lora_cache_max_adapter_size"),
        ([1, 0, 0], "the adapter size 0 must be 1 to 64"),
        ([5, 0, 64], r"of size 64 has 5120 weights \(32 inputs, 48 outputs\), but a row"),
        ([2, 0, 4], r"module 2 \(attn_k\) of layer 0 stands there twice"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_row(make_engine, adapter, row, text):
    driver = make_engine()
    tensors = to_tensors(adapter)
    # The value replaces the first row, or the row itself.
    tensors.config_N3[4 if row[0] == 5 else 0] = row

    with pytest.raises(RequestError, match=f"LoRA task 7: .*{text}"):
        driver.submit([1, 2], adapter_id=7, adapter=tensors_on_the_wire(tensors))
    driver.check_idle()


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32"])
def test_weights_come_in_any_of_three_types(make_engine, adapter, datatype):
    dtype = {"FP16": torch.float16, "BF16": torch.bfloat16, "FP32": torch.float32}[datatype]
    rounded = torch.from_numpy(to_tensors(adapter).weights_NK).to(dtype)
    weights = {
        "datatype": datatype,
        "shape": list(rounded.shape),
        "data": rounded.view(torch.uint8).numpy().tobytes(),
    }
    layout = make_engine().engine._adapters._layout

    tensors = AdapterTensors.from_wire(weights, on_the_wire(adapter)["config"])
    found = tensors.matrices(layout)

    for one, other in zip(adapter, found, strict=True):
        assert torch.equal(other.a, one.a.to(dtype))
        assert torch.equal(other.b, one.b.to(dtype))


def test_tensors_of_other_shapes_are_refused(make_engine, adapter):
    driver = make_engine()
    message = on_the_wire(adapter)
    message["config"]["shape"] = [len(adapter) * 3]

    with pytest.raises(RequestError, match=r"they must be \[n, k\] and \[n, 3\]"):
        driver.submit([1, 2], adapter_id=7, adapter=message)


def test_more_rows_than_the_model_has_modules_are_refused_before_each_is_looked_at(make_engine):
    driver = make_engine()
    config = np.tile(np.array([[1, 0, 1]], "<i4"), (1 << 20, 1))
    tensors = AdapterTensors(np.zeros((len(config), 1), np.float32), config)

    class Rows(AdapterTensors):
        @property
        def ranks(self):
            raise AssertionError("each row is looked at")

    rows = Rows(tensors.weights_NK, tensors.config_N3)
    layout = driver.engine._adapters._layout
    text = (
        rf"lora_config has {1 << 20} rows, but the model's 2 layers have {layout.num_modules}"
    )
    with pytest.raises(AdapterFormatError, match=text):
        rows.check(layout, 64)
    with pytest.raises(RequestError, match=f"LoRA task 7: {text}"):
        driver.submit([1, 2], adapter_id=7, adapter=tensors_on_the_wire(tensors))
    driver.check_idle()


def test_a_row_longer_than_any_module_needs_is_refused(make_engine):
    driver = make_engine()
    longest = driver.engine._adapters._layout.longest_row(64)
    config = np.array([[1, 0, 1]], "<i4")
    tensors = AdapterTensors(np.zeros((1, longest + 1), np.float32), config)
    text = (
        f"a row of lora_weights has {longest + 1} weights, but the model's largest module has"
    )
    with pytest.raises(RequestError, match=f"LoRA task 7: {text} {longest} at"):
        driver.submit([1, 2], adapter_id=7, adapter=tensors_on_the_wire(tensors))
    tensors = AdapterTensors(np.zeros((1, longest), np.float32), config)
    driver.submit([1, 2], adapter_id=7, adapter=tensors_on_the_wire(tensors))


@pytest.mark.parametrize("name", ["weights", "config"])
def test_tensors_with_a_truncated_number_are_refused_and_end_nothing(
    make_engine, adapter, name
):
    driver = make_engine()
    good, message = driver.submit([1, 2, 3], max_tokens=4), on_the_wire(adapter)
    message[name]["data"] = message[name]["data"][:-2]

    with pytest.raises(RequestError, match="lora_weights or lora_config: buffer size must be"):
        driver.submit([1, 2], adapter_id=7, adapter=message)
    driver.engine.keep_adapter(KeepAdapter(adapter_id=7, adapter=message))
    # No front end sends this.
    driver.engine.keep_adapter(KeepAdapter(adapter_id=7, adapter={"weights": 1, "config": 2}))
    driver.run()

    assert len(driver.output(good)) == 4
    driver.check_idle()


def test_a_folder_of_another_model_is_refused_by_tensor(make_engine, adapter, tmp_path):
    other = [dataclasses.replace(one, a=one.a[:, :16]) for one in adapter]
    write_peft(tmp_path / "other", other, alpha=8.0)
    driver = make_engine()
    driver.engine._adapters._folders = AdapterFolders(str(tmp_path))

    with pytest.raises(RequestError, match=r"has shape \[4, 16\] .* needs \[4, 32\]"):
        driver.submit([1, 2], adapter={"name": "other"})


@pytest.mark.parametrize("name", ["..", ".", "", "../french", "a/../french", "french\0"])
def test_no_adapter_name_leads_out_of_the_folder_of_adapters(adapter, tmp_path, name):
    inside = tmp_path / "inside"
    for folder in (tmp_path, tmp_path / "french", inside, inside / "german"):
        write_peft(folder, adapter, alpha=8.0)
    folders = AdapterFolders(str(inside))

    assert folders.names() == ["german"]
    assert folders.find("german") == inside / "german"
    assert folders.find(name) is None


@pytest.mark.feature("parameter:lora_prefetch_dir", "input:lora_name")
def test_adapter_folders_are_served_by_name_and_task_id_and_read_again_after_changes(
    make_engine, model_folder, adapter, tmp_path, prompt_of
):
    other = make_adapter(model_folder, seed=2)
    write_peft(tmp_path / "french", adapter, alpha=8.0)
    write_arrays(to_tensors(other), tmp_path / "12", "float32")
    (tmp_path / "notes.txt").write_text("no adapter")
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    assert driver.engine._adapters.num_on_host == 2
    prompt = prompt_of(30)

    def output(**fields):
        request = driver.submit(prompt, max_tokens=LENGTH, **fields)
        driver.run()
        return driver.output(request)

    first, second = (
        greedy(merged(model_folder, one), prompt, LENGTH) for one in (adapter, other)
    )
    assert first != second
    assert output(adapter={"name": "french"}) == first
    assert output(adapter_id=12) == second
    assert output(adapter={"name": "12"}) == second
    with pytest.raises(RequestError, match=r"no LoRA adapter is named 'german'.* 12, french "):
        output(adapter={"name": "german"})
    with pytest.raises(RequestError, match=r"no LoRA adapter is named '\.\./french'"):
        output(adapter={"name": "../french"})

    write_peft(tmp_path / "french", other, alpha=8.0)
    write_peft(tmp_path / "late", adapter, alpha=8.0)
    assert output(adapter={"name": "french"}) == second
    assert output(adapter={"name": "late"}) == first


@pytest.mark.parametrize("name", ["x" * 256, "9" * 5000, "\0", "."])
def test_an_adapter_name_that_is_no_folder_name_is_refused(
    make_engine, adapter, tmp_path, name
):
    write_peft(tmp_path / "french", adapter, alpha=8.0)
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))

    with pytest.raises(RequestError, match=r"no LoRA adapter is named .* known names: french"):
        driver.submit([1, 2], adapter={"name": name})


def test_adapters_beyond_the_host_cache_are_read_at_their_first_request(
    make_engine, model_folder, adapter, tmp_path, prompt_of
):
    adapters = {name: make_adapter(model_folder, seed=n) for n, name in enumerate("abc")}
    for name, one in adapters.items():
        write_peft(tmp_path / name, one, alpha=4.0)
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    config = LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(2.9 * size))
    driver = make_engine(lora=config)
    assert driver.engine.stats()["lora_host_adapters"] == 2

    for name in "cba":
        request = driver.submit(prompt_of(20), max_tokens=LENGTH, adapter={"name": name})
        driver.run()
        expected = greedy(merged(model_folder, adapters[name]), prompt_of(20), LENGTH)
        assert driver.output(request) == expected
    assert driver.engine.stats()["lora_host_adapters"] == 2


@pytest.mark.parametrize("place", ["request", "folder"])
@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (np.nan, torch.float32, "holds nan, which is no finite number in the model's float32"),
        (-np.inf, torch.float32, r"holds -inf, which .* float32 \(at most 3\.40282e\+38\)"),
        (7e4, torch.float16, r"holds 70000, which .* float16 \(at most 65504\); send finite"),
    ],
)
def test_values_outside_the_models_dtype_are_refused_by_module(
    make_engine, adapter, tmp_path, place, value, dtype, text
):
    driver = make_engine()
    cache = driver.engine._adapters
    cache._folders, cache._layout.dtype = AdapterFolders(str(tmp_path)), dtype
    good = driver.submit([1, 2, 3], max_tokens=4)
    bad = [dataclasses.replace(one, b=one.b.clone()) for one in adapter]
    bad[3].b[5, 1] = value
    given = {"adapter_id": 7, "adapter": on_the_wire(bad)}
    if place == "folder":
        write_peft(tmp_path / "bad", bad, alpha=4.0)
        given = {"adapter": {"name": "bad"}}

    with pytest.raises(RequestError, match=rf"matrix B of module 4 .* in layer 0 {text}"):
        driver.submit([1, 2], max_tokens=4, **given)
    driver.run()

    assert cache.num_on_host == 0 and len(driver.output(good)) == 4
    driver.check_idle()


def test_an_adapter_folder_with_values_that_are_not_finite_is_left_out_at_the_start(
    make_engine, adapter, tmp_path, caplog
):
    write_peft(tmp_path / "good", adapter, alpha=4.0)
    adapter = [dataclasses.replace(one, a=one.a.clone()) for one in adapter]
    adapter[0].a[0, 0] = np.inf
    write_peft(tmp_path / "bad", adapter, alpha=4.0)

    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))

    assert driver.engine._adapters.num_on_host == 1
    assert "bad is left out: matrix A of module 1 (attn_q) in layer 0 holds inf" in caplog.text


def test_values_of_an_adapter_are_checked_once_for_each_version(
    make_engine, adapter, monkeypatch, tmp_path
):
    num_looks = 0

    def count(matrices, dtype):
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(manager, "check_values", count)
    driver = make_engine()
    dp_ranks = [driver.engine._adapters, driver.engine._adapters.for_other_dp_rank()]
    for _ in range(3):
        for rank in dp_ranks:
            rank.keep(7, on_the_wire(adapter))
    assert num_looks == 1

    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    for name in ("a", "b"):
        write_peft(tmp_path / name, adapter, alpha=4.0)
    few = LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(1.9 * size))
    driver, num_looks = make_engine(lora=few), 0
    for name in ("b", "a", "b", "a"):
        # Each adapter replaces the other.
        driver.submit([1, 2], max_tokens=1, adapter={"name": name})
        driver.run()
    assert num_looks == 1 and driver.engine._adapters.num_on_host == 1


def test_the_record_of_received_weights_is_bounded(make_engine, adapter, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_CHECKED", 8)
    tiny = LoraConfig(
        host_memory_bytes=int(1.5 * sum(one.a.nbytes + one.b.nbytes for one in adapter))
    )
    driver = make_engine(lora=tiny)
    cache, given = driver.engine._adapters, on_the_wire(adapter)
    in_use = driver.submit([1, 2], max_tokens=4, adapter_id=1, adapter=given)

    for number in range(30):
        other = {**given, "digest": b"%d" % number}
        with pytest.raises(RequestError, match="is full of adapters that running requests use"):
            driver.submit([1, 2], max_tokens=4, adapter_id=2, adapter=other)
    driver.run()
    for number in range(30):
        driver.submit(
            [1], max_tokens=1, adapter_id=3, adapter={**given, "digest": b"%d" % number}
        )
        driver.run()

    assert len(cache._finite) == 8
    assert len(driver.output(in_use)) == 4
    driver.check_idle()
