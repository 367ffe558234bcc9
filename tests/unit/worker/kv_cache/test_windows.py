"""Layers with attention windows and sinks, against transformers with a mask."""

import pytest
import torch
from transformers import LlamaForCausalLM

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.worker.config.engine_config import CacheConfig

NUM_TOKENS = 40


def mask_of(length: int, window: int, num_sinks: int) -> torch.Tensor:
    """0 where a query of a row sees the key of a column, else minus infinity."""
    places = torch.arange(length)
    distance = places[:, None] - places
    is_seen = (distance >= 0) & ((distance < window) | (places < num_sinks))
    mask = torch.zeros(length, length).masked_fill(~is_seen, float("-inf"))
    return mask[None, None]


@pytest.fixture
def reference(model_folder):
    """Greedy tokens of transformers, each layer with a window of its own."""
    model = LlamaForCausalLM.from_pretrained(model_folder, attn_implementation="eager").eval()

    def generate(prompt, windows, num_sinks):
        hooks = []
        ids = list(prompt)
        for number, layer in enumerate(model.model.layers):
            window = windows[number % len(windows)]

            def use_window(module, args, kwargs, window=window):
                mask = mask_of(len(ids), window, num_sinks)
                return args, {**kwargs, "attention_mask": mask}

            hook = layer.self_attn.register_forward_pre_hook(use_window, with_kwargs=True)
            hooks.append(hook)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                logits = model(torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        for hook in hooks:
            hook.remove()
        return ids[len(prompt) :]

    return generate


WINDOWS = {
    "one": ((20,), 0),
    "sinks": ((20,), 3),
    "a layer": ((9, 1000), 0),
    "two and sinks": ((9, 30), 20),
}


@pytest.mark.feature("parameter:max_attention_window_size", "parameter:sink_token_length")
@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize(("windows", "num_sinks"), WINDOWS.values(), ids=list(WINDOWS))
@pytest.mark.parametrize(
    "changes", [{}, {"max_num_batched_tokens": 17}], ids=["whole", "chunks"]
)
def test_tokens_are_those_of_transformers_with_the_same_masks(
    make_engine, prompt_of, reference, windows, num_sinks, changes
):
    driver = make_engine(attention_windows=windows, num_sinks=num_sinks, **changes)
    prompts = [prompt_of(length, seed=length) for length in (5, 33, 70)]
    ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    driver.run()

    expected = [reference(prompt, windows, num_sinks) for prompt in prompts]
    assert [driver.output(number) for number in ids] == expected
    driver.check_idle()

    # Again, from the prefix cache.
    ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    driver.run()
    assert [driver.output(number) for number in ids] == expected
    assert driver.engine.scheduler.cache.num_reused_blocks > 0
    driver.check_idle()


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_a_window_bounds_the_blocks_of_a_sequence(make_engine, prompt_of, reference, policy):
    # Sequences of 112 tokens, in blocks of 16 with 5 blocks, more than once.
    small = {"max_tokens": 80, "max_num_batched_tokens": 16, "policy": policy}
    driver = make_engine(attention_windows=(17,), num_sinks=2, **small)
    prompts = [prompt_of(72, seed=seed) for seed in range(3)]
    ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    driver.run()

    expected = [reference(prompt, (17,), 2) for prompt in prompts]
    assert [driver.output(number) for number in ids] == expected
    driver.check_idle()
    with pytest.raises(RequestError, match="cache has 5"):
        make_engine(**small).submit(prompts[0], max_tokens=NUM_TOKENS)


def test_beams_of_a_cached_windowed_prompt_reserve_no_more_than_they_can_hold(
    make_engine, prompt_of
):
    window = {"attention_windows": (16,), "max_beam_width": 2}
    prompt = prompt_of(65)
    fields = {"max_tokens": 16, "beam_width": 2, "num_return_sequences": 2}
    # All blocks of the prompt but one left the window; the reservation is the whole cache.
    driver = make_engine(policy="guaranteed_no_evict", max_tokens=96, **window)
    driver.submit(prompt, max_tokens=1)
    driver.run()
    found = driver.submit(prompt, **fields)
    driver.run()

    alone = make_engine(enable_block_reuse=False, **window)
    expected = alone.submit(prompt, **fields)
    alone.run()
    ids = [
        each.extras[n, 0][-1]["beams"]["ids"]
        for each, n in ((driver, found), (alone, expected))
    ]
    assert ids[0] == ids[1]
    assert driver.engine.scheduler.cache.num_reused_blocks > 0
    driver.check_idle()


def test_invalid_windows_are_refused():
    with pytest.raises(ConfigError, match="Leave max_attention_window_size unset"):
        CacheConfig(attention_windows=(0,))
    with pytest.raises(ConfigError, match="Set max_attention_window_size too"):
        CacheConfig(num_sinks=4)
