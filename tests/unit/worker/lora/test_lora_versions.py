"""Folders of adapters whose files are replaced while an engine serves them."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import nullcontext

import pytest
import torch

from tests.unit.worker.lora_adapters import (
    greedy,
    make_adapter,
    merged,
    on_the_wire,
    write_peft,
)
from trimaran.comm.errors import RequestError
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora.formats import AdapterFolders

LENGTH = 8
PEFT = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(model_folder):
    return make_adapter(model_folder, seed=1)


@pytest.mark.parametrize("is_known", [False, True])
def test_weights_written_after_the_lookup_of_a_folder_are_checked_as_a_new_version(
    make_engine, adapter, tmp_path, monkeypatch, is_known
):
    size = sum(one.a.nbytes + one.b.nbytes for one in adapter)
    bad = [dataclasses.replace(one, b=one.b * torch.nan) for one in adapter]
    first, second = (adapter, bad) if is_known else (bad, adapter)
    driver = make_engine(
        lora=LoraConfig(prefetch_dir=str(tmp_path), host_memory_bytes=int(1.5 * size))
    )
    write_peft(tmp_path / "a", first, alpha=4.0)
    write_peft(tmp_path / "b", second, alpha=4.0)
    aside = tmp_path / "aside"
    read = AdapterFolders.read

    def rewrite(folders, folder):
        (folder / PEFT).rename(aside)
        shutil.copyfile(tmp_path / "b" / PEFT, folder / PEFT)
        return read(folders, folder)

    def ask(task, **fields):
        driver.submit([1], max_tokens=1, adapter_id=task, **fields)
        driver.run()

    if is_known:
        ask(0, adapter={"name": "a"})
        ask(1, adapter=on_the_wire(adapter))
    with monkeypatch.context() as patches:
        patches.setattr(AdapterFolders, "read", rewrite)
        with pytest.raises(RequestError, match="holds nan") if is_known else nullcontext():
            ask(0, adapter={"name": "a"})
    # The file is restored with its time at the look-up.
    aside.replace(tmp_path / "a" / PEFT)
    with nullcontext() if is_known else pytest.raises(RequestError, match="holds nan"):
        ask(0, adapter={"name": "a"})
    driver.check_idle()


def test_a_scaling_written_after_the_weights_takes_effect(
    make_engine, model_folder, adapter, prompt_of, tmp_path
):
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    write_peft(tmp_path / "a", adapter, alpha=8.0)
    new = (tmp_path / "a" / "adapter_config.json").read_text()
    driver.submit([1], max_tokens=1, adapter={"name": "a"})
    driver.run()

    (tmp_path / "a" / "adapter_config.json").write_text(new.replace("8.0", "80.0"))
    asked = driver.submit(prompt_of(20), max_tokens=LENGTH, adapter={"name": "a"})
    driver.run()

    scaled = [dataclasses.replace(one, b=one.b * 10) for one in adapter]
    expected = greedy(merged(model_folder, scaled), prompt_of(20), LENGTH)
    assert driver.output(asked) == expected
    driver.check_idle()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_replaced_weights_of_the_same_size_and_time_are_a_new_version(
    make_engine, model_folder, prompt_of, tmp_path, is_renamed
):
    adapters = [make_adapter(model_folder, seed=seed) for seed in (1, 2)]
    driver = make_engine(lora=LoraConfig(prefetch_dir=str(tmp_path)))
    write_peft(tmp_path / "a", adapters[0], alpha=4.0)
    write_peft(tmp_path / "later", adapters[1], alpha=4.0)
    served, later = tmp_path / "a" / PEFT, tmp_path / "later" / PEFT
    prompt = prompt_of(20)

    def ask():
        request = driver.submit(prompt, max_tokens=LENGTH, adapter={"name": "a"})
        driver.run()
        return driver.output(request)

    outputs = [ask()]
    before = served.stat()
    os.utime(later, ns=(before.st_atime_ns, before.st_mtime_ns))
    if is_renamed:
        later.rename(served)
    else:
        shutil.copy2(later, served)
    after = served.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    outputs.append(ask())

    assert outputs == [greedy(merged(model_folder, one), prompt, LENGTH) for one in adapters]
