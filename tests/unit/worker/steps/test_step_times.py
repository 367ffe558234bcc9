"""Durations of the parts of steps."""

import time

import pytest

from trimaran.worker.steps.step_times import CpuMarks, Part, StepTimes


def test_every_moment_of_a_step_counts_in_exactly_one_part():
    times = StepTimes()
    start = time.perf_counter()
    times.enter(Part.SCHEDULE)
    entered = time.perf_counter()
    time.sleep(0.01)
    times.enter(Part.LAUNCH)
    time.sleep(0.02)
    times.enter(Part.EMIT)
    times.enter(Part.IDLE)
    passed = time.perf_counter() - start
    values = times.values()
    assert 0.01 <= values["schedule_seconds"] <= time.perf_counter() - entered - 0.02
    assert values["launch_seconds"] >= 0.02
    assert sum(values.values()) <= passed


def test_sleep_counts_in_no_part_of_a_step():
    times = StepTimes()
    times.enter(Part.IDLE)
    time.sleep(0.02)
    times.enter(Part.RECEIVE)
    assert sum(times.values().values()) == 0


class Unfinished:
    """A step that runs on a device until the test ends the step."""

    def __init__(self) -> None:
        self.result: tuple[float, float] | None = None

    def sampling(self) -> None:
        pass

    def end(self) -> None:
        pass

    def seconds(self) -> tuple[float, float] | None:
        return self.result


def test_steps_are_counted_in_order_after_the_device_has_finished_them():
    times = StepTimes()
    first, second = Unfinished(), Unfinished()
    times.launched(first)
    times.launched(second)
    second.result = 2.0, 0.5
    assert times.values()["device_seconds"] == 0
    first.result = 1.0, 0.25
    values = times.values()
    assert (values["device_seconds"], values["sample_seconds"]) == (3.0, 0.75)
    assert times.values()["device_seconds"] == 3.0


def test_the_time_of_a_step_without_sampling_counts_as_model_time():
    marks = CpuMarks()
    time.sleep(0.01)
    marks.end()
    model_s, sample_s = marks.seconds()
    assert model_s >= 0.01
    assert sample_s == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_measures_model_and_sampler_time(make_engine, prompt_of, depth):
    driver = make_engine(depth=depth)
    driver.submit(prompt_of(20), max_tokens=8)
    driver.run()
    driver.engine.times.enter(Part.IDLE)
    values = driver.engine.stats()
    host = ("schedule_seconds", "launch_seconds", "wait_seconds", "emit_seconds")
    assert all(values[key] > 0 for key in (*host, "device_seconds", "sample_seconds"))
    # On a CPU the launch includes the computation.
    assert values["device_seconds"] + values["sample_seconds"] <= values["launch_seconds"]
