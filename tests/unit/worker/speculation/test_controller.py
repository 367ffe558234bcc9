"""The number of draft tokens follows acceptance rates and measured times of steps."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.worker.speculation.controller import AcceptanceRate, DraftController, DraftReach


def controller_of(times):
    """A controller that has measured steps of these rows without drafts, in seconds."""
    controller = DraftController()
    for is_drafted in (False, True):
        for num_rows, seconds in times.items():
            for _ in range(3):
                controller.record(num_rows, seconds, is_drafted=is_drafted)
    return controller


def test_all_drafts_are_verified_where_rows_cost_nothing():
    controller = controller_of({1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0})

    assert controller.choose(1, [0.8], [5], 512) == [5]


def test_no_draft_is_verified_where_each_row_costs_as_much_as_a_token_gains():
    controller = controller_of({n: float(n) for n in (8, 12, 16, 24, 48)})

    assert controller.choose(8, [0.9] * 8, [5] * 8, 512) == [0] * 8


def test_useless_drafts_are_not_verified_where_steps_without_drafts_were_disturbed():
    controller = DraftController()
    for seconds, is_drafted, num_rows in ((5.0, False, 1), (1.0, True, 3)):
        for _ in range(3):
            controller.record(num_rows, seconds, is_drafted=is_drafted)

    assert controller.choose(1, [0.01], [5], 512) == [0]
    assert controller.choose(1, [0.8], [5], 512) != [0]


def test_rows_go_to_sequences_with_the_best_acceptance():
    controller = controller_of({4: 1.0, 6: 1.1, 8: 1.2, 12: 3.0, 16: 4.0, 24: 6.0})

    chosen = controller.choose(4, [0.1, 0.95, 0.1, 0.9], [3] * 4, 512)

    assert chosen[0] == chosen[2] == 0
    assert min(chosen[1], chosen[3]) >= 1


def test_no_draft_is_verified_before_steps_without_drafts_were_measured():
    controller = DraftController()

    assert controller.choose(1, [1.0], [5], 512) == [0]
    for _ in range(2):
        controller.record(1, 1.0, is_drafted=False)
    assert controller.choose(1, [1.0], [5], 512) == [5]


def test_steps_without_drafts_are_measured_again_now_and_then():
    controller = controller_of({1: 1.0, 6: 1.0})

    chosen = [controller.choose(1, [0.9], [5], 512) for _ in range(200)]

    assert 1 <= chosen.count([0]) <= 4


def test_the_time_of_the_first_step_behind_drafts_does_not_count():
    controller = controller_of({1: 1.0, 2: 1.4, 6: 1.4})
    for _ in range(40):
        # The host works while the device waits for it, as in no later step.
        controller.record(1, 3.0, is_drafted=False)
        controller.record(6, 1.4, is_drafted=True)

    assert controller.choose(1, [0.3], [5], 512) == [0]


def test_a_choice_says_whether_no_drafts_are_a_measurement():
    controller = controller_of({1: 1.0, 6: 9.0})

    assert controller.choose(1, [0.5], [5], 512) == [0]
    assert not controller.is_measuring
    assert controller.choose(64, [0.5] * 64, [5] * 64, 512) == [0] * 64
    assert controller.is_measuring


def test_sizes_that_were_not_measured_are_tried():
    controller = DraftController()
    for _ in range(2):
        controller.record(8, 1.0, is_drafted=False)

    assert controller.choose(8, [0.5] * 8, [5] * 8, 512) == [5] * 8
    controller.record(48, 9.0, is_drafted=True)
    assert controller.choose(8, [0.5] * 8, [5] * 8, 512) not in ([0] * 8, [5] * 8)


def test_a_rate_of_rejections_falls_and_rises_again():
    rate = AcceptanceRate(AcceptanceRate())
    for _ in range(30):
        rate.observe(0, has_rejected=True)
    low = rate.value
    for _ in range(30):
        rate.observe(3, has_rejected=False)

    assert low < 0.1 and rate.value > 0.9


def test_a_rate_takes_in_a_draft_as_its_tokens_one_by_one():
    whole, single = AcceptanceRate(AcceptanceRate()), AcceptanceRate(AcceptanceRate())
    for number in range(300):
        accepted, has_rejected = number % 4, number % 3 == 0
        whole.observe(accepted, has_rejected=has_rejected)
        for _ in range(accepted):
            single.observe(1, has_rejected=False)
        if has_rejected:
            single.observe(0, has_rejected=True)
        assert whole.value == pytest.approx(single.value, rel=1e-9)


def test_a_new_sequence_begins_with_the_rate_of_others_and_returns_to_it():
    typical = AcceptanceRate()
    for _ in range(200):
        AcceptanceRate(typical).observe(4, has_rejected=True)
    assert 0.75 < typical.value < 0.85

    rate = AcceptanceRate(typical)
    assert rate.value == typical.value
    for _ in range(20):
        rate.observe(0, has_rejected=True)
    assert rate.value < 0.3
    for _ in range(200):
        rate.idle()
    assert rate.value > 0.7


def test_rows_that_fill_the_size_of_a_step_are_used():
    controller = DraftController()
    drafted = {80: 7.1, 128: 7.3, 160: 8.0, 192: 8.9, 224: 9.6, 256: 10.2, 320: 12.9}
    for is_drafted, times in ((False, {64: 4.5}), (True, drafted)):
        for num_rows, seconds in times.items():
            for _ in range(3):
                controller.record(num_rows, seconds, is_drafted=is_drafted)
    # Steps of 245 rows are steps of the same size.
    for _ in range(20):
        controller.record(245, 10.2, is_drafted=True)

    assert sum(controller.choose(64, [0.8] * 64, [5] * 64, 512)) == 256 - 64


H200 = {
    1: 3.9, 16: 4.1, 64: 5.0, 96: 7.2, 128: 7.3, 192: 8.9, 256: 10.2, 320: 12.9, 384: 14.7,
    512: 20.5,
}  # fmt: skip
"""Milliseconds of steps with drafts of an 8B model by rows, 1 to 64 of steps without."""


def speeds_of(count, plain_ms, num_steps=400):
    """Expected tokens a second relative to those without drafts, step by step, of a batch whose
    drafts are accepted with probability 0.8."""
    controller, speeds = DraftController(), []
    for _ in range(num_steps):
        chosen = controller.choose(count, [0.8] * count, [5] * count, 512 - count)
        assert sum(chosen) <= 512 - count
        num_rows = count + sum(chosen)
        ms = np.interp(num_rows, list(H200), list(H200.values())) if any(chosen) else plain_ms
        controller.record(num_rows, ms / 1e3, is_drafted=any(chosen))
        tokens = sum((1 - 0.8 ** (k + 1)) / 0.2 for k in chosen)
        speeds.append(tokens / count / (ms / plain_ms))
    return speeds


def test_a_batch_that_fills_the_device_loses_some_steps_alone():
    speeds = speeds_of(256, plain_ms=9.6)

    assert np.mean(speeds) > 0.98
    assert sum(speed < 0.99 for speed in speeds) < 10


@pytest.mark.parametrize(("count", "plain_ms", "gain"), [(16, 4.1, 1.9), (64, 5.0, 1.4)])
def test_a_batch_that_leaves_room_gains(count, plain_ms, gain):
    assert np.mean(speeds_of(count, plain_ms)) > gain


def test_a_size_whose_measurement_was_disturbed_gets_another_chance():
    controller = DraftController()

    def step(disturbed_ms=0.0):
        (count,) = controller.choose(1, [0.8], [5], 5)
        controller.record(
            1 + count, (5 + 0.2 * count + disturbed_ms) / 1e3, is_drafted=count > 0
        )
        return count

    for _ in range(2):
        controller.record(1, 5e-3, is_drafted=False)
    # Steps of four and five drafts are of one size, which the first step of five measures.
    while step(disturbed_ms=20.0) < 5:
        pass
    assert max(step() for _ in range(40)) < 4
    assert max(step() for _ in range(60)) == 5


def test_measured_times_outlast_steps_without_worthwhile_drafts():
    controller = DraftController()

    def step(rate):
        (count,) = controller.choose(1, [rate], [5], 5)
        slow_ms = 20 if count > 2 else 0
        controller.record(1 + count, (5 + 0.1 * count + slow_ms) / 1e3, is_drafted=count > 0)
        return count

    for _ in range(10):
        step(0.8)
    tried = 0
    for _ in range(70):
        assert [step(0.01) for _ in range(20)] == [0] * 20
        tried += step(0.8) > 2
    assert tried <= 1


def test_a_network_drafts_as_many_tokens_as_steps_verify():
    reach = DraftReach([1, 2, 3, 4, 5])
    for _ in range(100):
        reach.observe(1, [2])
    # Now and then one more, which shows whether more are worth their rows.
    assert reach.value_of(1) in (2, 3)

    for _ in range(100):
        reach.observe(1, [5])
    assert reach.value_of(1) == 5


def test_a_network_that_is_captured_for_some_numbers_makes_the_next_larger_one():
    reach = DraftReach([1, 2, 4, 8, 16])
    for used in (3, 2, 3, 1, 1, 1, 1, 1):
        reach.observe(1, [used])
    assert reach.value_of(1) == 4

    for _ in range(16):
        reach.observe(1, [4])
    assert reach.value_of(1) == 8


def test_drafts_that_few_sequences_verify_are_not_made():
    reach = DraftReach([1, 2, 3, 4, 5])
    for _ in range(16):
        reach.observe(64, [5] * 22 + [3] * 42)
    assert reach.value_of(64) == 5

    for _ in range(8):
        reach.observe(64, [5] * 21 + [3] * 43)
    assert reach.value_of(64) == 3


def test_a_step_now_and_then_that_verifies_more_keeps_the_drafts_of_a_network():
    reach = DraftReach([1, 2, 3, 4, 5])
    for _ in range(20):
        for verified in (1, 1, 1, 5):
            reach.observe(1, [verified])

    assert reach.value_of(1) == 5


def test_drafts_that_are_never_verified_are_made_ever_more_seldom():
    reach = DraftReach([1, 2, 3, 4, 5])
    made = []
    for _ in range(400):
        reach.observe(1, [2])
        made.append(reach.value_of(1))
    assert sum(each > 2 for each in made[8:108]) > sum(each > 2 for each in made[300:])
    assert sum(each > 2 for each in made[200:]) > 0


def test_batches_of_another_size_keep_their_drafts():
    reach = DraftReach([1, 2, 3, 4, 5])
    for num_sequences, used in ((64, 2), (1, 5)) * 20:
        reach.observe(num_sequences, [used] * num_sequences)
    assert reach.value_of(70) in (2, 3)
    assert reach.value_of(1) == reach.value_of(16) == 5
