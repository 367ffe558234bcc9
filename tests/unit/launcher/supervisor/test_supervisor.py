"""The supervisor's log at start, readiness, drain, death and restart."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from trimaran.comm.messages.messages import ChildHello, encode


def test_the_ready_message_ends_with_the_endpoints_and_a_sample_request(supervise):
    server = supervise(world_size=2)
    server.wait_ready()
    assert server.log.splitlines()[-4:] == [
        "HTTP     http://localhost:8000",
        "gRPC     localhost:8001",
        "Metrics  http://localhost:8002/metrics",
        "curl -X POST localhost:8000/v2/models/ensemble/generate -d "
        '\'{"text_input": "What is machine learning?", "max_tokens": 20, '
        '"bad_words": "", "stop_words": ""}\'',
    ]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_and_ends_every_process_with_code_0(supervise, number):
    server = supervise(world_size=2)
    server.wait_ready()
    assert server.terminate(number) == 0
    assert server.survivors() == []
    assert not list(server.log_path.parent.glob("trimaran-*"))


def test_an_ordinary_stop_ends_ranks_before_the_front_ends_they_serve(supervise):
    server = supervise(world_size=2, num_frontends=2)
    server.wait_ready()
    assert server.terminate() == 0
    leavers = [line.split()[0] for line in server.log.splitlines() if line.endswith("leaves")]
    # One that is slower than its starter is killed without a word.
    assert sorted(leavers, reverse=True) == leavers
    assert set(leavers) == {"rank", "frontend"}
    assert not any(word in server.log for word in ("WARNING", "ERROR", "CRITICAL"))


def test_a_signal_while_loading_ends_at_once(supervise):
    server = supervise("rank:1:0:load-for-ever", world_size=2)
    server.wait_for("loads for ever")
    assert server.terminate() == 0
    assert "killing what has not ended" not in server.log
    assert "the supervisor is gone" not in server.log
    assert server.survivors() == []


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_the_very_start_leaves_no_run_folder(supervise, number):
    server = supervise()
    while not list(server.log_path.parent.glob("trimaran-*")):
        assert server.process.poll() is None
    server.process.send_signal(number)
    assert server.end() == 0
    assert server.survivors() == []
    assert not list(server.log_path.parent.glob("trimaran-*"))


def test_a_second_signal_ends_the_server_without_a_drain(supervise):
    server = supervise("frontend:0:*:drain-for-ever")
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    assert server.terminate() == 128 + signal.SIGTERM
    assert server.survivors() == []


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_during_the_exit_do_not_change_the_exit_code(supervise, number):
    server = supervise(world_size=2)
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("ended with exit code 0")
    while server.process.poll() is None:
        server.process.send_signal(number)
        time.sleep(0.005)
    assert server.end() == 0
    assert server.survivors() == []
    assert not list(server.log_path.parent.glob("trimaran-*"))


def test_a_drain_that_leaves_requests_unfinished_ends_with_code_1(supervise):
    server = supervise("frontend:0:*:unfinished")
    server.wait_ready()
    assert server.terminate() == 1
    assert "1 requests unfinished after 30 s; raise --exit-timeout" in server.log


def test_a_drain_with_requests_failed_by_a_dead_group_ends_with_code_1(supervise):
    server = supervise("frontend:0:*:lost")
    server.wait_ready()
    assert server.terminate() == 1
    assert "1 requests failed during the drain: their group had died" in server.log


def test_a_front_end_that_never_drains_is_ended_after_the_exit_timeout(supervise):
    server = supervise("frontend:0:*:drain-for-ever", exit_timeout_s=0.1)
    server.wait_ready()
    assert server.terminate() == 1
    assert "not drained" in server.log
    assert server.survivors() == []


def test_a_signal_at_readiness_leaves_no_ready_file(supervise, tmp_path):
    file = tmp_path / "ready.json"
    behaviour = "frontend:0:*:drain-for-ever"
    server = supervise(behaviour, exit_timeout_s=0.1, ready_file=str(file))
    server.wait_for("(front end|group m): ready", count=2)
    server.terminate()
    assert not file.exists()


def test_a_process_that_ignores_shutdown_is_killed(supervise):
    server = supervise("rank:1:*:ignore-shutdown", world_size=2)
    server.wait_ready()
    assert server.terminate() == 0
    assert "killing what has not ended: group m" in server.log
    assert server.survivors() == []


def test_a_killed_rank_is_named_with_its_signal_and_the_group_restarted(supervise):
    server = supervise(world_size=2)
    server.wait_for("told up m")
    pid = int(server.wait_for(r'"state": "up".*"group": "m".*"rank": 1, "pid": (\d+)')[1])
    os.kill(pid, signal.SIGKILL)
    server.wait_for(rf"group m: rank 1 \(pid {pid} on .*\) was killed by signal 9 \(SIGKILL\)")
    server.wait_for("told down")
    server.wait_for("group m: ready", count=2)
    server.wait_for("told up", count=2)
    assert server.terminate() == 0
    assert server.survivors() == []


def test_a_killed_starter_is_named_and_the_group_restarted(supervise):
    server = supervise(world_size=2)
    server.wait_ready()
    pid = server.pid_of(r"group m: started pid (\d+)")
    os.kill(pid, signal.SIGKILL)
    server.wait_for(rf"group m: starter \(pid {pid}\) was killed by signal 9")
    server.wait_for("group m: ready", count=2)
    assert server.terminate() == 0
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_restart_that_cannot_start_its_processes_is_tried_again(supervise, tmp_path):
    server = supervise(world_size=2, max_restarts=20, restart_delay_s=0.5)
    server.wait_ready()
    away = (tmp_path / "starter").rename(tmp_path / "away")
    os.kill(server.pid_of(r"group m: started pid (\d+)"), signal.SIGKILL)
    server.wait_for(r"starter: No such file or directory; restart in")
    away.rename(tmp_path / "starter")
    server.wait_for("group m: ready", count=2)
    assert server.terminate() == 0
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_killed_daemon_of_mpirun_ends_the_group(supervise):
    server = supervise(world_size=2, has_helper=True, max_restarts=0)
    server.wait_ready()
    starter = psutil.Process(server.pid_of(r"group m: started pid (\d+)"))
    (helper,) = starter.children()
    helper.kill()
    assert server.end() == 1
    assert f"(pid {helper.pid}), a helper of mpirun, died" in server.log
    assert server.survivors() == []


def test_a_killed_front_end_is_named_and_restarted_and_finds_the_groups(supervise):
    server = supervise(world_size=2)
    server.wait_ready()
    pid = server.pid_of(r"front end: started pid (\d+)")
    os.kill(pid, signal.SIGKILL)
    server.wait_for(rf"front end \(pid {pid}\) was killed by signal 9")
    server.wait_for("front end: ready", count=2)
    server.wait_for("told up", count=2)
    assert server.log.count("group m: started") == 1
    assert server.terminate() == 0


def test_one_of_several_front_ends_is_killed_and_restarted_alone(supervise):
    server = supervise(num_frontends=3)
    server.wait_ready()
    pid = server.pid_of(r"front end 1: started pid (\d+)")
    os.kill(pid, signal.SIGKILL)
    server.wait_for(rf"front end 1 \(pid {pid}\) was killed by signal 9")
    server.wait_for("front end 1: ready", count=2)
    assert server.log.count("group m: started") == 1
    assert [server.log.count(f"{name}: started") for name in ("front end", "front end 2")] == [
        1,
        1,
    ]
    assert server.terminate() == 0
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_the_drain_waits_for_the_last_of_several_front_ends(supervise):
    behaviour = "frontend:0:*:drain-for-ever::frontend-2"
    server = supervise(behaviour, num_frontends=3, exit_timeout_s=0.1)
    server.wait_ready()
    assert server.terminate() == 1
    assert "front end 2: not drained" in server.log
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_front_end_killed_during_the_drain_ends_the_server_with_code_1(supervise):
    server = supervise("frontend:0:*:drain-for-ever::frontend-1", num_frontends=2)
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    os.kill(server.pid_of(r"front end 1: started pid (\d+)"), signal.SIGKILL)
    assert server.end() == 1
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_signal_before_a_restart_fails_the_requests_that_wait_for_the_group(supervise):
    server = supervise("rank:0:0:die-ready", world_size=2, restart_delay_s=20)
    server.wait_for("restart in 20.0 s")
    assert server.terminate() == 0
    assert "told failed" in server.log
    assert server.log.count("group m: started") == 1
    assert server.survivors() == []


def test_an_exhausted_restart_budget_ends_the_server(supervise):
    server = supervise("rank:0:*:die-ready", world_size=2, max_restarts=2)
    assert server.end() == 1
    assert server.log.count("group m: started") == 3
    told = "not started again: 2 restarts within 600 s are used up. Mend what the log says"
    assert told in server.log
    assert server.log.count("told failed m") == 1
    assert server.survivors() == []


def test_without_restarts_the_first_death_ends_the_server(supervise):
    server = supervise("rank:0:*:die-ready", world_size=2, max_restarts=0)
    assert server.end() == 1
    assert "restarts are off" in server.log
    assert server.survivors() == []


def test_a_load_failure_on_a_rank_is_one_error_with_the_rank(supervise):
    server = supervise("rank:1:*:fail-loading rank:0:*:load-for-ever", world_size=2)
    assert server.end() == 1
    errors = [line for line in server.log.splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert "rank 1 (pid" in errors[0]
    assert "failed: layer 3 is missing" in errors[0]
    assert server.log.count("group m: started") == 1
    assert server.survivors() == []


def test_a_configuration_error_of_a_rank_is_never_restarted_and_ends_with_code_2(supervise):
    server = supervise("rank:0:1:config-error rank:0:0:die-ready", world_size=2)
    assert server.end() == 2
    assert "vocab_size is 7 but must be 8. Build it again; not started again" in server.log
    assert server.log.count("group m: started") == 2


def test_a_front_end_that_fails_ends_the_server(supervise):
    server = supervise("frontend:0:*:fail-loading", world_size=2)
    assert server.end() == 1
    assert "front end: front end (pid" in server.log
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_rank_that_exits_while_loading_is_restarted_with_its_code_in_the_log(supervise):
    server = supervise("rank:0:0:exit-loading", world_size=2)
    server.wait_for(r"rank 0 \(pid \d+ on .*\) ended with exit code 7")
    server.wait_ready()
    assert server.terminate() == 0


def test_ranks_that_never_connect_are_named_at_the_deadline(supervise):
    server = supervise("rank:1:*:never-connect", world_size=2, connect_timeout_s=7)
    assert server.end() == 1
    assert "rank 1 did not connect within 7 s" in server.log
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_rank_that_never_gets_ready_is_named_with_its_last_state(supervise):
    server = supervise("rank:1:*:load-for-ever", world_size=2, startup_timeout_s=2)
    assert server.end() == 1
    assert "rank 1 not ready within 2 s" in server.log
    assert "last heard: loading half way" in server.log
    assert server.survivors() == []


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (r"front end: started pid (\d+)", r"front end \(pid {pid}\) has hung"),
        (r"group m: started pid (\d+)", r"rank 0 \(pid {pid}\) has hung"),
    ],
)
def test_a_process_that_stops_answering_is_ended_and_restarted(supervise, pattern, told):
    server = supervise(hang_timeout_s=1.5)
    server.wait_ready()
    pid = server.pid_of(pattern)
    os.kill(pid, signal.SIGSTOP)
    server.wait_for(told.format(pid=pid) + r": no sign of life for 1\.5 s")
    server.wait_for("(front end|group m): ready", count=3)
    assert server.terminate() == 0
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_process_that_stops_answering_while_it_loads_is_ended_and_restarted(supervise):
    server = supervise("rank:1:0:load-for-ever", world_size=2, hang_timeout_s=0.7)
    hung = int(server.wait_for(r"pid (\d+) loads for ever")[1])
    os.kill(hung, signal.SIGSTOP)
    server.wait_for(
        rf"rank 1 \(pid {hung} .*\) has hung: no sign of life for 4\.2 s "
        r"\(6 times --hang-timeout, while loading\)"
    )
    server.wait_ready()
    assert server.terminate() == 0
    assert server.survivors() == []


def test_separate_mpi_singletons_instead_of_one_world_are_a_configuration_error(supervise):
    server = supervise(world_size=2, told_size=1)
    assert server.end() == 2
    assert "as rank 0 of 1, but the group has 2 ranks" in server.log
    assert server.survivors() == []


def test_no_process_outlives_a_killed_supervisor(supervise):
    server = supervise(world_size=2)
    server.wait_ready()
    assert len(server.seen) >= 4
    server.process.kill()
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_daemonized_process_of_a_group_is_ended_too(supervise):
    server = supervise("rank:1:*:grandchild", world_size=2)
    server.wait_ready()
    num_processes = len(server.seen)
    assert num_processes >= 5
    assert server.terminate() == 0
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_log_that_cannot_be_written_stops_no_process(supervise, tmp_path):
    log = tmp_path / "copy"
    server = supervise(world_size=2, stderr="/dev/full", log_file=str(log))
    server.log_path = log
    server.wait_for("front end: ready")
    assert server.terminate() == 0
    assert server.log.count("stderr lacks lines from here on") == 1


@pytest.fixture
def full_pipe():
    """The write end of a full pipe without a reader."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(select.PIPE_BUF))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.matrix(keep=0)
def test_an_unread_standard_output_stops_no_process(supervise, full_pipe, tmp_path):
    file = tmp_path / "ready.json"
    server = supervise(stdout=full_pipe, ready_file=str(file))
    while not file.exists():
        assert server.process.poll() is None
        time.sleep(0.02)
    assert server.terminate() == 0
    assert server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_full_disk_at_the_log_file_stops_no_process_and_is_reported_once(supervise):
    server = supervise(world_size=2, log_file="/dev/full")
    server.wait_ready()
    assert server.terminate() == 0
    (told,) = [line for line in server.log.splitlines() if "lacks lines" in line]
    assert "--log-file /dev/full lacks lines from here on" in told
    assert "No space left on device" in told


def test_a_log_file_that_cannot_be_made_is_refused(supervise, tmp_path):
    server = supervise(log_file=str(tmp_path / "missing" / "log"))
    assert server.end() == 2
    assert "missing/log: No such file or directory" in server.log
    assert "started pid" not in server.log


@pytest.mark.matrix(keep=0)
def test_every_process_logs_to_the_log_file_too(supervise, tmp_path):
    log = tmp_path / "copy"
    server = supervise(world_size=2, log_file=str(log))
    server.wait_ready()
    server.terminate()
    assert "told up" in log.read_text()
    assert "front end: ready" in log.read_text()


def test_a_connection_without_a_valid_hello_is_closed_by_the_supervisor(supervise):
    server = supervise()
    server.wait_ready()
    (path,) = server.log_path.parent.glob("trimaran-*/supervisor.sock")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.settimeout(60)
        sock.sendall(encode(ChildHello(token="guess", role="rank", group="m")))
        assert sock.recv(1) == b""
    assert "wrong token" in server.log
    assert server.terminate() == 0


@pytest.mark.matrix(keep=0)
def test_the_run_folder_of_a_killed_supervisor_is_deleted_by_the_next_supervisor(supervise):
    first = supervise()
    first.wait_ready()
    first.process.kill()
    first.survivors()
    (stale,) = Path(first.log_path.parent).glob("trimaran-*")
    second = supervise()
    second.wait_for("curl", count=2)
    assert not stale.exists()
    assert second.terminate() == 0
