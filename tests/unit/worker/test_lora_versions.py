"""Folders of adapters whose files are replaced while an engine serves them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.worker.lora_adapters import (
    greedy,
    make_adapter,
    merged,
    write_peft,
)
from trimaran.worker.config import LoraConfig

LENGTH = 8


@pytest.fixture(scope="module")
def adapter(model_folder):
    return make_adapter(model_folder, seed=1)


def test_a_scaling_that_is_written_after_the_weights_is_served_with_them(
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
