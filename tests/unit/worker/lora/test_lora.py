"""Requests with adapters in the engine: their tokens, and which adapters stay cached."""

import pytest
import torch

from tests.unit.worker.lora_adapters import greedy, make_adapter, merged, on_the_wire
from trimaran.comm.errors import ConfigError, RequestError
from trimaran.comm.messages.messages import KeepAdapter
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora.device_slots import DeviceSlots
from trimaran.worker.lora.store import AdapterStore

LENGTH = 12


@pytest.fixture(scope="module")
def adapters(model_folder):
    """Two adapters by task id; the second has another rank and fewer modules."""
    return {
        5: make_adapter(model_folder, seed=5),
        9: make_adapter(model_folder, seed=9, rank=8, modules=("attn_q", "attn_v", "mlp_gate")),
    }


@pytest.fixture(scope="module")
def references(model_folder, adapters):
    """Transformers with each adapter merged in; number 0 has no adapter."""
    return {0: merged(model_folder, [])} | {
        task: merged(model_folder, adapter) for task, adapter in adapters.items()
    }


def use_gpu_kernels(driver):
    """Let the engine store adapters as on a GPU and apply them with its kernels: launched for
    prompts, and as if captured for decodes."""
    runner, manager = driver.engine.runner, driver.engine._adapters
    memory = torch.empty(manager._allocator.size, dtype=torch.float32)
    slots = DeviceSlots(
        manager._layout, runner.model.adapters, memory, 16, 8, num_rows=16,
        is_deterministic=False,
    )  # fmt: skip
    runner.adapters = AdapterStore(runner.model, manager._layout, slots, 16)
    manager.is_packed = runner.adapters.is_packed
    forward = runner._forward

    def launch(inputs, num_decodes, *others, **options):
        if not runner.model.adapters.has_tokens or num_decodes != len(inputs.token_ids):
            return forward(inputs, num_decodes, *others, **options)
        runner.adapters.prepare(4)
        with runner.adapters.captured(4):
            return forward(inputs, num_decodes, *others, **options)

    runner._forward = launch


def submit(driver, adapters, prompt, task, **fields):
    """A request that brings its adapter."""
    adapter = on_the_wire(adapters[task]) if task else None
    return driver.submit(prompt, max_tokens=LENGTH, adapter_id=task, adapter=adapter, **fields)


@pytest.mark.feature("input:lora_task_id", "input:lora_weights", "input:lora_config")
@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("changes", "has_gpu_kernels"),
    [
        ({"depth": 2, "max_num_batched_tokens": 20}, False),
        ({}, True),
        ({}, False),
    ],
)
def test_each_request_of_a_mixed_batch_gets_the_tokens_of_its_merged_weights(
    make_engine, adapters, references, prompt_of, changes, has_gpu_kernels
):
    driver = make_engine(**changes)
    if has_gpu_kernels:
        use_gpu_kernels(driver)
    # Triton's interpreter is slow.
    prompts = [prompt_of(10 + 9 * seed, seed) for seed in range(1 if has_gpu_kernels else 3)]
    asked = [(p, task) for p in prompts for task in (0, 5, 9)]

    requests = [submit(driver, adapters, p, task) for p, task in asked]
    driver.run()

    outputs = [driver.output(request) for request in requests]
    assert outputs == [greedy(references[task], p, LENGTH) for p, task in asked]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    driver.check_idle()


def test_a_cached_adapter_is_served_by_id_and_an_unknown_id_is_refused(
    make_engine, adapters, references, prompt_of
):
    driver, prompt = make_engine(), prompt_of(20)
    text = "LoRA task 5 not found in cache. Please send LoRA weights with request"
    with pytest.raises(RequestError, match=text):
        driver.submit(prompt, max_tokens=LENGTH, adapter_id=5)
    submit(driver, adapters, prompt, 5)
    driver.run()

    again = driver.submit(prompt, max_tokens=LENGTH, adapter_id=5)
    driver.run()

    assert driver.output(again) == greedy(references[5], prompt, LENGTH)


def test_adapters_received_by_another_instance_are_kept_too(
    make_engine, adapters, references, prompt_of
):
    driver, prompt = make_engine(), prompt_of(20)
    whole = on_the_wire(adapters[5])
    driver.engine.keep_adapter(KeepAdapter(adapter_id=5, adapter=whole))
    broken = {**whole, "config": {**whole["config"], "shape": [-1]}}
    driver.engine.keep_adapter(KeepAdapter(adapter_id=9, adapter=broken))

    request = driver.submit(prompt, max_tokens=LENGTH, adapter_id=5)
    with pytest.raises(RequestError, match="LoRA task 9 not found in cache"):
        driver.submit(prompt, max_tokens=LENGTH, adapter_id=9)
    driver.run()

    assert driver.output(request) == greedy(references[5], prompt, LENGTH)


def test_front_ends_are_informed_of_the_weights_behind_each_adapter_id(
    make_engine, adapters, prompt_of
):
    driver, prompt = make_engine(), prompt_of(20)
    first, second = ({**on_the_wire(adapters[task]), "digest": b"%d" % task} for task in (5, 9))
    driver.submit(prompt, max_tokens=1, adapter_id=5, adapter=first)
    broken = {**second, "config": {**second["config"], "shape": [-1]}}
    with pytest.raises(RequestError):
        driver.submit(prompt, max_tokens=1, adapter_id=5, adapter=broken)
    # The adapter stays, although its request fails for another reason.
    with pytest.raises(RequestError, match="guided_decoding_backend"):
        driver.submit(
            prompt, max_tokens=1, adapter_id=5, adapter=second, guide_type="json"
        )  # fmt: skip
    told = [(taken.adapter_id, taken.digest) for taken in driver.engine.take_new_adapters()]

    assert told == [(5, b"5"), (5, b"9")]
    assert driver.engine.take_new_adapters() == []


def test_adapters_replayed_by_a_front_end_do_not_replace_newer_weights(
    make_engine, adapters, references, prompt_of
):
    driver, prompt = make_engine(), prompt_of(20)
    old, new = ({**on_the_wire(adapters[task]), "digest": b"%d" % task} for task in (5, 9))
    driver.submit(prompt, max_tokens=1, adapter_id=5, adapter=new)
    driver.engine.take_new_adapters()
    driver.engine.keep_adapter(KeepAdapter(adapter_id=5, adapter=old, is_resent=True))
    driver.engine.keep_adapter(KeepAdapter(adapter_id=9, adapter=old, is_resent=True))

    told = [(taken.adapter_id, taken.digest) for taken in driver.engine.take_new_adapters()]
    assert told == [(5, b"9")]
    five, nine = (driver.submit(prompt, max_tokens=LENGTH, adapter_id=task) for task in (5, 9))
    driver.run()
    assert driver.output(five) == greedy(references[9], prompt, LENGTH)
    assert driver.output(nine) == greedy(references[5], prompt, LENGTH)


def test_new_weights_under_the_same_id_make_a_new_adapter(
    make_engine, adapters, references, prompt_of
):
    driver, prompt = make_engine(), prompt_of(40)
    first = submit(driver, adapters, prompt, 5)
    driver.step()
    message = on_the_wire(adapters[9])
    second = driver.submit(prompt, max_tokens=LENGTH, adapter_id=5, adapter=message)
    driver.run()
    third = driver.submit(prompt, max_tokens=LENGTH, adapter_id=5)
    driver.run()

    assert driver.output(first) == greedy(references[5], prompt, LENGTH)
    for request in (second, third):
        # The second prompt took no KV block of the first.
        assert driver.output(request) == greedy(references[9], prompt, LENGTH)


@pytest.mark.feature("parameter:lora_cache_host_memory_bytes")
def test_the_host_cache_evicts_the_least_recently_used_adapter_but_none_in_use(
    make_engine, model_folder, prompt_of
):
    adapters = {task: make_adapter(model_folder, seed=task) for task in (1, 2, 3)}
    size = sum(one.a.nbytes + one.b.nbytes for one in adapters[1])
    driver = make_engine(lora=LoraConfig(host_memory_bytes=int(2.9 * size)))
    prompt = prompt_of(10)
    submit(driver, adapters, prompt, 1)
    submit(driver, adapters, prompt, 2)

    with pytest.raises(RequestError, match="is full of adapters that running requests use"):
        submit(driver, adapters, prompt, 3)
    driver.run()
    driver.submit(prompt, max_tokens=1, adapter_id=1)
    driver.run()
    submit(driver, adapters, prompt, 3)
    driver.run()

    driver.submit(prompt, max_tokens=1, adapter_id=1)
    with pytest.raises(RequestError, match="LoRA task 2 not found in cache"):
        driver.submit(prompt, max_tokens=1, adapter_id=2)
    driver.run()
    driver.check_idle()


def test_an_adapter_without_room_on_the_host_evicts_no_other_adapter(
    make_engine, model_folder, prompt_of
):
    adapters = {task: make_adapter(model_folder, seed=task) for task in (1, 2)}
    adapters[3] = make_adapter(model_folder, seed=3, rank=8)
    size = sum(one.a.nbytes + one.b.nbytes for one in adapters[1])
    driver = make_engine(lora=LoraConfig(host_memory_bytes=int(2.9 * size)))
    submit(driver, adapters, prompt_of(10), 1)
    driver.run()
    submit(driver, adapters, prompt_of(10), 2)

    with pytest.raises(RequestError, match="is full of adapters that running requests use"):
        submit(driver, adapters, prompt_of(10), 3)

    driver.submit(prompt_of(10), max_tokens=LENGTH, adapter_id=1)
    driver.run()
    driver.check_idle()


def test_new_weights_of_an_id_take_the_memory_of_the_old_weights(
    make_engine, model_folder, prompt_of
):
    adapters = {task: make_adapter(model_folder, seed=task) for task in (1, 2, 3)}
    size = sum(one.a.nbytes + one.b.nbytes for one in adapters[1])
    driver = make_engine(lora=LoraConfig(host_memory_bytes=int(2.9 * size)))
    for task in (1, 2):
        submit(driver, adapters, prompt_of(10), task)
        driver.run()

    driver.submit(
        prompt_of(10), max_tokens=LENGTH, adapter_id=2, adapter=on_the_wire(adapters[3])
    )
    driver.run()

    # The other adapter was used less recently, but is still cached.
    driver.submit(prompt_of(10), max_tokens=LENGTH, adapter_id=1)
    driver.run()
    driver.check_idle()


def test_the_cost_of_a_request_is_independent_of_open_requests_of_its_adapter(
    make_engine, adapters
):
    driver = make_engine()
    submit(driver, adapters, [1], 5)
    manager, num_looks = driver.engine._adapters, 0
    is_open = manager.is_open

    def look(request):
        nonlocal num_looks
        num_looks += 1
        return is_open(request)

    manager.is_open = look
    for _ in range(2000):
        driver.submit([1, 2], max_tokens=1, adapter_id=5)
    assert num_looks < 2 * 2000

    driver.engine.drop_source("client")
    for _ in range(3000):
        submitted = driver.submit([1, 2], max_tokens=1, adapter_id=5)
        driver.engine.cancel("client", [submitted])
    (adapter,) = manager._on_host.values()
    # Finished requests are removed.
    assert len(adapter.requests) < 2000


def test_steps_that_cannot_be_captured_are_refused(make_engine):
    with pytest.raises(ConfigError, match="adapter-graphs is set but the device is cpu"):
        make_engine(lora=LoraConfig(has_graphs=True))


@pytest.mark.feature(
    "parameter:lora_cache_max_adapter_size", "parameter:lora_cache_gpu_memory_fraction"
)
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"gpu_memory_fraction": 0.0},
            "cache beside the model has 0. Raise lora_cache_gpu",
        ),
        ({"host_memory_bytes": 9}, "the host cache has 9. Raise lora_cache_host_memory_bytes"),
        ({"max_adapter_size": 3}, "the adapter size 4 must be 1 to 3"),
    ],
)
def test_an_adapter_that_no_cache_can_hold_is_refused(make_engine, adapters, config, text):
    driver = make_engine(lora=LoraConfig(**config))

    with pytest.raises(RequestError, match=text):
        submit(driver, adapters, [1, 2, 3], 5)
    driver.check_idle()


def test_other_requests_run_while_an_adapter_is_packed(
    make_engine, adapters, references, prompt_of
):
    driver = make_engine()
    manager = driver.engine._adapters
    packed = set()
    manager.is_packed = packed.__contains__
    first = driver.submit(prompt_of(5), max_tokens=100)
    driver.step()
    second = submit(driver, adapters, prompt_of(20), 5)
    third = driver.submit(prompt_of(7), max_tokens=100)
    for _ in range(5):
        driver.step()
    assert [len(driver.output(request)) for request in (first, second, third)] == [6, 0, 5]

    packed.add(1)
    driver.step()
    assert len(driver.output(second)) == 1
    driver.run()
    assert driver.output(second) == greedy(references[5], prompt_of(20), LENGTH)


def test_the_cost_of_a_step_is_independent_of_requests_that_wait_for_an_adapter(
    make_engine, adapters
):
    driver = make_engine()
    manager, num_looks, is_there = driver.engine._adapters, 0, False

    def look(number):
        nonlocal num_looks
        num_looks += 1
        return is_there

    manager.is_packed = look
    running = driver.submit([1], max_tokens=100)
    driver.step()
    submit(driver, adapters, [1], 5)
    held = [driver.submit([1, 2], max_tokens=1, adapter_id=5) for _ in range(1000)]
    others = [driver.submit([1, 2], max_tokens=1) for _ in range(20)]
    num_looks = 0
    for _ in range(5):
        driver.step()
    assert num_looks < 100
    assert [len(driver.output(other)) for other in others] == [1] * 20

    driver.engine.cancel("client", held[:500])
    is_there = True
    driver.engine.cancel("client", held[500:900])
    driver.run()
    assert [len(driver.output(request)) for request in held] == [0] * 900 + [1] * 100
    assert len(driver.output(running)) == 100
    driver.check_idle()


def test_a_request_that_waited_for_an_adapter_starts_before_later_and_after_urgent_requests(
    make_engine, adapters
):
    driver = make_engine(max_num_seqs=2)
    manager, packed = driver.engine._adapters, set()
    manager.is_packed = packed.__contains__
    driver.submit([1], max_tokens=100)
    driver.step()
    submit(driver, adapters, [1], 5)
    submit(driver, adapters, [1], 9)
    first = driver.submit([1], max_tokens=30)
    driver.step()
    asked = [
        driver.submit([1], max_tokens=1, adapter_id=task, priority=priority)
        for task, priority in ((5, 0), (0, 0), (9, 0), (0, 1), (5, 1), (9, 1))
    ]
    packed |= {1, 2}
    driver.run()

    assert len(driver.output(first)) == 30
    order = [request for request, _ in driver.reasons if request in asked]
    # The urgent requests, then the other requests, each in order of arrival.
    assert order == [asked[3], asked[4], asked[5], asked[0], asked[1], asked[2]]
    driver.check_idle()


def test_requests_that_wait_for_an_adapter_reserve_no_token_budget(make_engine, adapters):
    driver = make_engine()
    is_there = False
    driver.engine._adapters.is_packed = lambda number: is_there
    driver.submit([1], max_tokens=60)
    driver.step()
    held = [submit(driver, adapters, [1] * 6, 5) for _ in range(4)]
    driver.step()

    asked = driver.submit([1] * 96, max_tokens=1)
    for _ in range(2):
        driver.step()
    assert len(driver.output(asked)) == 1
    is_there = True
    driver.run()
    assert all(driver.output(request) for request in held)
    driver.check_idle()


def test_adapters_take_turns_on_the_device_and_preempted_requests_resume(
    make_engine, model_folder, prompt_of
):
    adapters = {task: make_adapter(model_folder, seed=task) for task in range(1, 6)}
    driver = make_engine(max_tokens=80, max_seq_len=64, max_input_len=63)
    manager = driver.engine._adapters
    manager.is_packed = lambda number: True
    manager._allocator.size = int(2.5 * manager._layout.size_of([(1, 0, 4)]) * 14)
    prompt = prompt_of(10)

    requests = [submit(driver, adapters, prompt, 1 + n // 2) for n in range(10)]
    most, num_paused = 0, 0
    while driver.engine.has_work:
        driver.step()
        most = max(most, manager.num_on_device)
        num_paused = max(num_paused, driver.engine.scheduler.preemptions.num_waiting)

    assert 1 < most < 5
    assert num_paused
    for number, request in enumerate(requests):
        model = merged(model_folder, adapters[1 + number // 2])
        assert driver.output(request) == greedy(model, prompt, LENGTH)
    driver.check_idle()
    stats = driver.engine.stats()
    assert stats["lora_host_adapters"] == 5
    assert stats["lora_used_adapters"] == 0
    assert stats["lora_device_adapters"] < 5 <= stats["lora_loaded_adapters"]
