"""`trimaran bench report`: tables and a plot of result files."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from trimaran.launcher.cli.main import main

OURS = {
    "benchmark": "throughput", "engine": "trimaran", "shape": "llama8b", "dtype": "bfloat16",
    "device": "a card", "gpus": 1, "isl": 128, "osl": 256, "requests": 64,
    "out_tok_s": 11000.0, "out_tok_s_runs": [10900.0, 11000.0, 11100.0],
    "limit_tok_s": 13608.0, "limit_pct": 80.8,
}  # fmt: skip
PEER = {**OURS, "engine": "vllm", "out_tok_s": 9500.0, "limit_pct": 69.8}
SERVED = {
    "benchmark": "serve", "shape": None, "protocol": "grpc", "isl": 467, "osl": 256,
    "requests": 500, "request_rate": 8.0, "concurrency": 128, "out_tok_s": 2040.0,
    "ttft_ms_avg": 20.5, "ttft_ms_p99": 31.0, "itl_ms_avg": 6.1, "itl_ms_p99": 8.0,
    "e2e_ms_p99": 1700.0,
}  # fmt: skip


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_last_of_equal_measurements_is_compared_with_its_peers(tmp_path, capsys):
    older = {**OURS, "out_tok_s": 5.0, "limit_pct": 0.1}
    plot = tmp_path / "plot.svg"
    path = write(tmp_path / "results.jsonl", older, PEER, OURS)

    assert main(["bench", "report", path, "--plot", str(plot)]) == 0

    table = capsys.readouterr().out
    row = "| 128/256 | 64 | 9,500 | 11,000 | 10,900 to 11,100 | 13,608 | 80.8 |"
    assert row in table
    assert "| 5 |" not in table
    root = ElementTree.parse(plot).getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "11,000 tokens/s, 80.8 %" in texts
    assert "9,500 tokens/s, 69.8 %" in texts


def test_different_layouts_on_the_same_number_of_gpus_are_different_measurements(
    tmp_path, capsys
):
    sizes = {"gpus": 2, "tp_size": 2, "pp_size": 1, "dp_size": 1, "moe_ep_size": 1}
    tensor = {**OURS, **sizes, "out_tok_s": 19000.0}
    experts = {**tensor, "moe_ep_size": 2, "out_tok_s": 18000.0}
    path = write(tmp_path / "results.jsonl", tensor, experts)

    assert main(["bench", "report", path]) == 0

    table = capsys.readouterr().out
    assert "| llama8b, bfloat16, tp2 | 128/256 | 64 | 19,000 |" in table
    assert "| llama8b, bfloat16, tp2ep2 | 128/256 | 64 | 18,000 |" in table


def test_served_loads_are_reported_with_their_times(tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    path = write(tmp_path / "results.jsonl", SERVED)
    assert main(["bench", "report", path, "--plot", str(plot)]) == 0
    row = "|  | grpc | 467/256 | 500 | 8 | 128 | 2,040 | 20.5 | 31.0 |"
    assert row in capsys.readouterr().out
    assert "Output tokens a second" in plot.read_text()


def test_latencies_have_a_table_of_their_own(tmp_path, capsys):
    times = {"first_token_ms": 9.75, "token_ms_p50": 4.4, "token_ms_p99": 4.51}
    line = {**OURS, "benchmark": "latency", "requests": 1, **times}
    assert main(["bench", "report", write(tmp_path / "results.jsonl", line)]) == 0
    assert "| 128/256 | 1 | 9.75 | 4.40 | 4.51 | 80.8 |" in capsys.readouterr().out


def test_rows_of_different_models_dtypes_and_devices_are_distinguished(tmp_path, capsys):
    kernel = {
        "benchmark": "kernels", "shape": "llama8b", "operator": "embed", "size": "1 x 4096",
        "dtype": "bfloat16", "us": 1.3, "limit_pct": 2.0, "device": "a card",
    }  # fmt: skip
    later = {**kernel, "us": 1.4}
    lines = [
        kernel, later, {**kernel, "dtype": "float16"}, {**SERVED, "shape": "tiny"},
        {**SERVED, "shape": "llama8b"}, OURS, {**OURS, "device": "another"},
    ]  # fmt: skip

    assert main(["bench", "report", write(tmp_path / "results.jsonl", *lines)]) == 0

    table = capsys.readouterr().out
    assert table.count("| embed | 1 x 4096 |") == 2
    assert "| llama8b, bfloat16 | embed | 1 x 4096 | 1.4 |" in table
    assert "| llama8b, float16 | embed | 1 x 4096 | 1.3 |" in table
    assert "| tiny | grpc | 467/256 |" in table
    assert "| llama8b | grpc | 467/256 |" in table
    assert "| llama8b, bfloat16, a card | 128/256 | 64 |" in table
    assert "| llama8b, bfloat16, another | 128/256 | 64 |" in table


def test_bars_beside_a_served_rate_are_tokens_per_second(tmp_path):
    plot = tmp_path / "plot.svg"
    path = write(tmp_path / "results.jsonl", {**OURS, "out_tok_s": 2040.0}, SERVED)

    assert main(["bench", "report", path, "--plot", str(plot)]) == 0

    bars = re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)" height="13"', plot.read_text())
    assert len(bars) == 2
    assert bars[0] == bars[1]


def test_bars_without_a_common_measure_are_refused(tmp_path, capsys):
    kernel = {
        "benchmark": "kernels",
        "operator": "embed",
        "size": "1",
        "us": 1.3,
        "limit_pct": 2.0,
    }
    path = write(tmp_path / "results.jsonl", kernel, SERVED)
    assert main(["bench", "report", path, "--plot", str(tmp_path / "plot.svg")]) == 2
    assert "tokens a second, which kernels have none of" in capsys.readouterr().err


def test_a_plot_does_not_overwrite_its_results(tmp_path, capsys):
    path = write(tmp_path / "results.jsonl", OURS)
    (tmp_path / "link").symlink_to(path)

    assert main(["bench", "report", path, "--plot", str(tmp_path / "link")]) == 2

    assert "holds the results" in capsys.readouterr().err
    assert json.loads((tmp_path / "results.jsonl").read_text()) == OURS


def test_lines_without_a_limit_have_a_table_but_no_plot(tmp_path, capsys):
    line = {key: value for key, value in OURS.items() if not key.startswith("limit")}
    path = write(tmp_path / "results.jsonl", line)

    assert main(["bench", "report", path]) == 0
    assert "| 64 | 11,000 | 10,900 to 11,100 |  |  |" in capsys.readouterr().out

    assert main(["bench", "report", path, "--plot", str(tmp_path / "plot.svg")]) == 2
    assert "no line has a percentage of the limit to draw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", ": line 1 is not JSON"),
        ("[1]", ": line 1 is not a JSON object"),
        ('{"benchmark": "weather"}', "no line names a benchmark"),
        ('{"benchmark": "throughput"}', "a line of the benchmark 'throughput' lacks '"),
        ('{"benchmark": "serve"}', "a line of the benchmark 'serve' lacks '"),
        ("[" * 100_000, ": line 1 is not JSON"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, capsys, content, complaint):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    assert main(["bench", "report", str(path)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "changes", "complaint"),
    [
        (OURS, {"out_tok_s": "x"}, "out_tok_s is 'x' but must be a finite number of 0 or more"),
        (OURS, {"out_tok_s": float("nan")}, "out_tok_s is nan but must be a finite number"),
        (OURS, {"out_tok_s_runs": []}, r"out_tok_s_runs is \[\] but must be a list of one or"),
        (OURS, {"limit_pct": None}, "limit_pct is None but must be a finite number"),
        (OURS, {"tp_size": "2"}, "tp_size is '2' but must be a whole number"),
        (OURS, {"shape": []}, r"shape is \[\] but must be a string"),
        (OURS, {"shape": "a\nb"}, "shape is 'a\\\\nb' but must be a text that can be printed"),
        (OURS, {"engine": "\ud800"}, "engine is '.*' but must be a text that can be printed"),
        (SERVED, {"request_rate": None}, "request_rate is None but must be a finite number"),
        (SERVED, {"ttft_ms_avg": [1]}, r"ttft_ms_avg is \[1\] but must be a finite number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(
    tmp_path, capsys, line, changes, complaint
):
    plot = tmp_path / "plot.svg"
    path = write(tmp_path / "results.jsonl", OURS, {**line, **changes})

    assert main(["bench", "report", path, "--plot", str(plot)]) == 2

    told = capsys.readouterr()
    assert re.search(complaint, told.err)
    assert told.err.startswith(f"trimaran: error: {path}: in a line of the benchmark '")
    assert told.out == ""
    assert not plot.exists()


def test_a_plot_that_cannot_be_written_is_an_error_with_the_reason(tmp_path, capsys):
    path = write(tmp_path / "results.jsonl", OURS)
    assert main(["bench", "report", path, "--plot", "/dev/full"]) == 2
    assert "--plot /dev/full was not written: No space left" in capsys.readouterr().err


def test_bars_of_a_text_stay_within_their_cell(tmp_path, capsys):
    path = write(tmp_path / "results.jsonl", {**OURS, "shape": "a|b"})
    assert main(["bench", "report", path]) == 0
    assert "| a\\|b, bfloat16 | 128/256 |" in capsys.readouterr().out
