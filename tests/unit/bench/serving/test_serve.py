"""`trimaran bench serve`: contradictory flags are refused before a request is sent."""

from __future__ import annotations

import json

import pytest

from trimaran.bench.limits.roofline import Ceilings
from trimaran.bench.offline.flags import loads_of
from trimaran.bench.results import results
from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli.main import main, parser_of


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rates", "2"], "--rates belongs to a sweep"),
        (["--runs", "3", "--input-len", "8", "--output-len", "4"], "--runs belongs to a sweep"),
        (["--shape", "tiny"], "--shape belongs to a sweep"),
        (["--load", "8/4x2", "--json", "r.json"], "--json has no effect on `trimaran bench s"),
        (["--load", "8/4x2", "--num-requests", "9"], "--num-requests has no effect"),
        (["--load", "8/4x2", "--rates", "1", "--request-rate", "2"], "--request-rate has no"),
        (["--load", "8/4x2", "--concurrencies", "1", "-c", "2"], "--concurrency has no effect"),
        (["--load", "8/4x2", "--input-len", "8"], "drop --input-len"),
        (["--load", "8/4x2", "--ceilings-of", "f"], "the model's --shape"),
        (["--load", "8/4"], "'8/4' is not a load"),
        ([], "say what to send"),
        (
            ["--load", "8/4x2", "--concurrencies", "8", "2", "--load-processes", "4"],
            "--load-processes is 4 but only 2 requests are in flight",
        ),
        (["--load", "8/4x2", "--rates", "1", "nan"], "--request-rate is nan"),
    ],
)
def test_incompatible_flags_are_refused(capsys, flags, complaint):
    assert main(["bench", "serve", *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["throughput", "latency", "kernels", "report"])
def test_flags_of_a_server_before_another_command_are_refused(capsys, command):
    words = ["--concurrency", "8", command, *(["f"] if command == "report" else [])]
    assert main(["bench", *words]) == 2
    complaint = f"--concurrency has no effect on `trimaran bench {command}`. Leave it out"
    assert complaint in capsys.readouterr().err


def test_a_temperature_before_the_name_of_the_engine_benchmark_takes_effect():
    parser = parser_of("bench")
    for words, wanted in (
        (["--temperature", "0", "throughput"], 0.0),
        (["throughput", "--temperature", "0.5"], 0.5),
        (["--temperature", "0", "latency", "--temperature", "2"], 2.0),
        (["latency"], 1.0),
    ):
        (load,) = loads_of(parser.parse(words), ["8/4x2"])
        assert load.temperature == wanted


@pytest.mark.parametrize(
    "flags", [["--concurrencies", "8", "0"], ["--runs", "0"], ["--gpus", "0"]]
)
def test_a_count_below_one_is_refused(capsys, flags):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--load", "8/4x2", *flags])
    assert ended.value.code == 2
    assert f"{flags[0]}: '0' is not a whole number of 1 or more" in capsys.readouterr().err


def test_a_file_without_ceilings_is_refused(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text('{"benchmark": "throughput"}')
    flags = ["--load", "8/4x2", "--shape", "tiny", "--ceilings-of", str(path)]
    assert main(["bench", "serve", *flags]) == 2
    assert "no line holds ceiling_gb, ceiling_tb_s, ceiling_tflops" in capsys.readouterr().err


def test_ceilings_of_another_number_of_gpus_are_refused(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    known = Ceilings(flops=680e12, bandwidth=4.3e12, memory=127e9)
    results.append(str(path), {"gpus": 1, **results.machine_facts("a card", known)})
    flags = ["--load", "8/4x2", "--shape", "tiny", "--ceilings-of", str(path), "--gpus", "2"]
    assert main(["bench", "serve", *flags]) == 2
    assert "is what 1 device(s) sustain, but --gpus is 2" in capsys.readouterr().err


def test_flags_may_stand_on_either_side_of_the_sub_command(capsys):
    # No server runs: the tried address shows which flags took effect.
    for words in (
        ["-u", "localhost:1", "serve", "--load", "8/4x2"],
        ["serve", "-u", "localhost:1", "--load", "8/4x2"],
        ["serve", "-u", "localhost:1", "--input-len", "8", "--output-len", "4"],
    ):
        assert main(["bench", *words]) == 2
        assert "no server answers at http://localhost:1" in capsys.readouterr().err


def test_results_name_the_command_as_given(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.setattr(
        "sys.argv", ["/somewhere/trimaran", "bench", "serve", "--load", "8/4x2"]
    )
    assert results.command() == "trimaran bench serve --load 8/4x2"
    monkeypatch.setattr("sys.argv", ["benchmarks/engine_stress.py", "--seconds", "300"])
    assert results.command() == "python benchmarks/engine_stress.py --seconds 300"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["-c", "bench", "throughput", "--tp-size", "2"])
    assert results.command() == "mpirun -n 2 trimaran bench throughput --tp-size 2"


def test_ceilings_are_read_back_as_they_were_written(tmp_path):
    path = tmp_path / "results.jsonl"
    known = Ceilings(flops=680e12, bandwidth=4.3e12, memory=127e9)
    facts = results.machine_facts("a card", known)
    results.append(str(path), facts)
    assert results.read([str(path)]) == [json.loads(json.dumps(facts))]
    assert results.ceilings_in(facts) == known


def test_the_ceilings_of_a_slow_core_are_not_rounded_away():
    known = Ceilings(flops=4.6218e8, bandwidth=8.7123e9, memory=127e9)
    assert results.ceilings_in(results.machine_facts(None, known)) == known
    assert str(known) == "0.0004622 TFLOP/s, 0.00871 TB/s"


@pytest.mark.parametrize("value", [0, "x", None, float("nan")])
def test_unusable_ceilings_are_refused(tmp_path, capsys, value):
    path = tmp_path / "results.jsonl"
    known = {"ceiling_gb": 100.0, "ceiling_tb_s": 4.3, "ceiling_tflops": value}
    path.write_text(json.dumps(known))
    flags = ["--load", "8/4x2", "--shape", "tiny", "--ceilings-of", str(path)]
    assert main(["bench", "serve", *flags]) == 2
    told = capsys.readouterr().err
    assert f"--ceilings-of {path}: ceiling_tflops is " in told
    assert "but must be a finite number above 0. Name another file." in told


def test_a_result_line_that_cannot_be_written_is_an_error_with_the_reason():
    with pytest.raises(ConfigError, match="--output /dev/full was not written: No space left"):
        results.append("/dev/full", {"benchmark": "serve"})


def test_a_truncated_result_line_affects_no_other_line(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(str(path), {"isl": 1})
    results.append(str(path), {"isl": 2})
    path.write_text(path.read_text()[:-4])
    results.append(str(path), {"isl": 3})
    with pytest.raises(
        ConfigError, match=r"results\.jsonl: line 2 is not JSON, .* Take it out"
    ):
        results.read([str(path)])
    kept = path.read_text().splitlines()
    path.write_text("\n".join([kept[0], *kept[2:]]))
    assert results.read([str(path)]) == [{"isl": 1}, {"isl": 3}]
