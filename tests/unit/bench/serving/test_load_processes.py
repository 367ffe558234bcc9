"""`trimaran bench --load-processes`: a load from several processes at once."""

from __future__ import annotations

import json

import pytest
from bench_table import rows
from scripted_targets import killed_target, late_target, prompt_target, warm_target

from trimaran.bench.serving.load_processes import LoadProcessLostError, run_in_processes
from trimaran.bench.serving.summary import figures
from trimaran.bench.serving.workload import Item

SHORT = ("--input-len", "4", "--output-len", "3", "-c", "2", "--num-requests", "6")


def test_a_load_from_several_processes_equals_that_of_one_process(http_server, trimaran):
    http_server.events = lambda body: [{"output_ids": [1, 2, 3], "sequence_length": 3}]

    several = ("--load-processes", "2", "--seed", "7", "--warmup", "1", *SHORT)
    code, out, _ = trimaran("bench", "-u", http_server.url, *several)

    assert code == 0
    assert rows(out)["Total requests"] == 6
    assert rows(out)["Avg. OP tokens per request"] == 3
    sent = sorted(json.dumps(body["input_ids"]) for _, body in http_server.bodies[1:])
    http_server.bodies.clear()
    trimaran("bench", "-u", http_server.url, "--seed", "7", "--warmup", "0", *SHORT)
    assert sent == sorted(json.dumps(body["input_ids"]) for _, body in http_server.bodies)


def test_the_start_of_load_processes_does_not_count_as_latency():
    plan = [(Item([1], 1), 0.05 * number) for number in range(8)]
    done = run_in_processes(late_target, [], plan, concurrency=4, num_processes=2)
    assert len(done.records) == 8
    assert done.elapsed_s < 2.0
    assert figures(done)["latency_ms_p99"] < 1000


def test_load_processes_send_more_records_than_a_connection_holds():
    plan = [(Item([1], 20_000), 0.0)] * 8
    done = run_in_processes(prompt_target, [], plan, concurrency=4, num_processes=2)
    assert [record.num_output_tokens for record in done.records] == [20_000] * 8


def test_load_processes_are_warm_and_connected_before_a_load_begins():
    warmup, plan = [Item([1], 1)] * 6, [(Item([1], 1), 0.0)] * 9
    done = run_in_processes(warm_target, warmup, plan, concurrency=4, num_processes=2)
    # Each of the two processes has sent three requests and opened a connection for each request
    # in flight.
    assert [record.num_output_tokens for record in done.records] == [32] * 9


def test_a_load_process_that_is_killed_ends_the_benchmark():
    plan = [(Item([1], 1), 0.0)] * 4
    with pytest.raises(LoadProcessLostError, match="exit code -9, perhaps for lack of memory"):
        run_in_processes(killed_target, [], plan, concurrency=4, num_processes=2)


def test_more_load_processes_than_requests_in_flight_are_refused(http_server, trimaran):
    code, _, err = trimaran("bench", "-u", http_server.url, "--load-processes", "3", *SHORT)

    assert code == 2
    assert "--load-processes is 3 but only 2 requests are in flight" in err
