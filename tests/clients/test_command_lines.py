"""Command lines of the documentation of Triton's TensorRT-LLM backend, run as written."""

from __future__ import annotations

import json
import re

import pytest

TOKEN = "python3 inflight_batcher_llm/client/inflight_batcher_llm_client.py"
TEXT = "python3 inflight_batcher_llm/client/end_to_end_grpc_client.py"
BENCH = "python3 tools/inflight_batcher_llm/benchmark_core_model.py"
SPECULATIVE = (
    "python3 tools/inflight_batcher_llm/speculative_decoding_test.py --max-input-len 200 "
    "--dataset data.json --url-target localhost:8001 --url-draft localhost:8001 "
    "--url-control localhost:8001"
)
SPECULATIVE_ONE = (
    "python3 inflight_batcher_llm/client/e2e_grpc_speculative_decoding_client.py "
    "--url-target localhost:8001 -p 'It was a dark and' -o 12 --num-draft-tokens 3"
)
CHECK = "python3 tools/inflight_batcher_llm/end_to_end_test.py"
ENSEMBLE = "curl -s -X POST localhost:8000/v2/models/ensemble/generate -d "
STREAM = "curl -s -N -X POST localhost:8000/v2/models/ensemble/generate_stream -d "
BLS = "curl -s -X POST localhost:8000/v2/models/tensorrt_llm_bls/generate -d "
ASKED = {"text_input": "It was a dark and", "max_tokens": 20, "bad_words": "", "stop_words": ""}
IDS = "echo 0,547,1319 > ids.csv; "
DATASET = (
    """echo '[{"input": "It was a dark", "instruction": "and", "output": "stormy night"}]' """
    "> data.json; "
)


def asked(**besides):
    """A request's body, quoted for a shell."""
    return f"'{json.dumps({**ASKED, **besides})}'"


# A command line, its exit code, and texts of its output in order.
DECOUPLED = {
    "curl, ensemble": (ENSEMBLE + asked(), 0, [r'"model_name":"ensemble"', '"text_out']),
    "curl, BLS": (BLS + asked(), 0, [r'"text_output":"It was a dark and ']),
    "curl, stream": (STREAM + asked(stream=True), 0, [r"^data: \{.*\}$"] * 9),
    "curl, id and parameters": (
        ENSEMBLE + asked(id="a7", parameters={"temperature": 0.5}),
        0,
        ['"id":"a7"'],
    ),
    "curl, everything of sampling": (
        ENSEMBLE + asked(temperature=0.7, top_k=40, top_p=0.9, random_seed=7),
        0,
        ['"text_output"'],
    ),
    "curl, beams": (ENSEMBLE + asked(beam_width=4), 0, [r'output":\[(".*",){3}']),
    "curl, metrics": ("curl -s localhost:8002/metrics", 0, ["^nv_trt_llm_request_metrics"]),
    "curl, ready": ("curl -s -w %{http_code} localhost:8000/v2/health/ready", 0, ["^200$"]),
    "curl, verbose": (
        """curl -s -X POST localhost:8000/v2/logging -d '{"log_verbose_level": 1}'""",
        0,
        ['"log_verbose_level":1'],
    ),
    "curl, no such model": (
        "curl -s -w %{http_code} -X POST localhost:8000/v2/models/x/generate -d " + asked(),
        0,
        ["Request for unknown model: 'x' is not found", "404$"],
    ),
    "token client": (
        f"{TOKEN} --request-output-len 20 --tokenizer-dir model",
        0,
        ["^Got completed request$", "^Input: ", "^Output beam 0: ", "^Output sequence: "],
    ),
    "token client, streaming": (
        f"{TOKEN} --streaming --request-output-len 20 --tokenizer-dir model",
        0,
        ["^Got completed request$", "^Output beam 0: "],
    ),
    "token client, ids": (
        IDS + f"{TOKEN} --input-tokens-csv ids.csv --request-output-len 4",
        0,
        [r"^Input sequence:\s+\[0, 547, 1319\]", "^Got completed request$"],
    ),
    "token client, stop": (
        f"{TOKEN} --stop-after-ms 100 --request-output-len 800 --request-id 1 "
        "--tokenizer-dir model",
        0,
        ["^Got cancellation response from server$"],
    ),
    "token client, stop without an id": (
        f"{TOKEN} --stop-after-ms 100 --request-output-len 800 --tokenizer-dir model",
        0,
        ["^Got cancellation response from server$"],
    ),
    "token client, stop a stream": (
        f"{TOKEN} --streaming --stop-after-ms 100 --request-output-len 800 --request-id 1 "
        "--tokenizer-dir model",
        0,
        ["^Got cancellation response from server$", "^Got completed request$"],
    ),
    "token client, cancel": (
        f"{TOKEN} --streaming --stop-via-request-cancel --stop-after-ms 100 "
        "--request-output-len 800 --tokenizer-dir model",
        0,
        ["^Request is cancelled$"],
    ),
    "token client, beams": (
        f"{TOKEN} --beam-width 4 --request-output-len 8 --tokenizer-dir model",
        0,
        ["^Output beam 0: ", "^Output beam 3: "],
    ),
    "token client, sequences": (
        f"{TOKEN} --num-return-sequences 2 --top-k 50 --request-output-len 8 "
        "--tokenizer-dir model",
        0,
        ["^Output sequence 0 beam 0: ", "^Output sequence 1 beam 0: "],
    ),
    "token client, outputs": (
        f"{TOKEN} --return-context-logits --return-generation-logits --return-log-probs "
        "--return-perf-metrics --request-output-len 8 --tokenizer-dir model",
        0,
        ["context_logits", "^kv_cache_alloc_new_blocks: ", "^total_draft_tokens: 0"],
    ),
    "token client, requested outputs": (
        f"{TOKEN} --requested-outputs output_ids sequence_length --return-log-probs "
        "--request-output-len 8 --tokenizer-dir model",
        0,
        ["^Got completed request$"],
    ),
    "token client, check": (
        IDS + "echo 9,9 > expected.csv; "
        f"{TOKEN} --input-tokens-csv ids.csv --output-tokens-csv expected.csv --check-output "
        "--request-output-len 2",
        1,
        ["^FAIL!$"],
    ),
    "token client, adapter": (
        f"{TOKEN} --lora-path lora --lora-task-id 5 --request-output-len 8 "
        f"--tokenizer-dir model && {TOKEN} --lora-task-id 5 --request-output-len 8 "
        "--tokenizer-dir model",
        0,
        ["^Got completed request$"] * 2,
    ),
    "token client, unknown adapter": (
        f"{TOKEN} --lora-task-id 99 --request-output-len 8 --tokenizer-dir model",
        1,
        [
            "^Received an error from server:$",
            "LoRA task 99 not found in cache. Please send LoRA weights with request",
        ],
    ),
    "token client, lookahead": (
        f"{TOKEN} --lookahead_config '[7,7,7]' --request-output-len 8 --tokenizer-dir model",
        1,
        ["^Received an error from server:$", "Cannot set the request lookahead decoding"],
    ),
    "text client": (
        f'{TEXT} --streaming --output-len 10 --prompt "It was a dark and"',
        0,
        ["^ ?[a-z]"],
    ),
    "text client, BLS": (
        f'{TEXT} --model-name tensorrt_llm_bls --output-len 10 --prompt "It was a dark and"',
        0,
        ["^It was a dark and "],
    ),
    "text client, batch": (
        f"""{TEXT} --batch-inputs --output-len 10 --prompt '["The sea", "It was"]'""",
        0,
        ["The sea", "It was"],
    ),
    "text client, words": (
        f'{TEXT} -o 20 -p "The sea" --stop-words " and" " the" --bad-words " of"',
        0,
        ["^The sea.* (and|the)$"],
    ),
    "text client, bias": (
        f'{TEXT} -o 3 -p "The sea" --embedding-bias-words " cat" --embedding-bias-weights 90',
        0,
        ["^The sea cat cat cat$"],
    ),
    "text client, guide": (
        f'{TEXT} -o 20 -p "The sea" --guided-decoding-guide-type regex '
        "--guided-decoding-guide '[0-9]{3}'",
        0,
        [r"^The sea\d{3}$"],
    ),
    "text client, check": (
        f'{TEXT} -o 3 -p "The sea" --check-outputs --expected-outputs "The land"',
        1,
        ["The land"],
    ),
    "end to end, streams": (
        DATASET + f"{CHECK} -i grpc --streaming --test-bls --max-input-len 500 "
        "--dataset data.json",
        0,
        [r"^\[INFO\] Functionality test succeed\.$", r"^\[INFO\] Total Latency: .* ms$"],
    ),
    "benchmark, normal distribution": (
        f"{BENCH} -i grpc --max-input-len 100 --request-rate 20 --num-requests 12 -c 4 "
        "token-norm-dist --input-mean 20 --input-stdev 5 --output-mean 8 --output-stdev 2",
        0,
        [r"^\[INFO\] Start benchmarking on 12 prompts", "Requests/Sec", "P99 latency"],
    ),
    "benchmark, flags behind the source": (
        f"{BENCH} -i grpc --request_rate 20 token_norm_dist --input_mean 20 --input_stdev 5 "
        "--output_mean 8 --output_stdev 2 --num_requests 12",
        0,
        ["Start benchmarking on 12 prompts", "Total request latencies", "P99 latency"],
    ),
    "benchmark, data set, flags behind the source": (
        DATASET + f"{BENCH} -i grpc --request_rate 20 dataset --dataset data.json "
        "--tokenizer_dir model --tokenizer_type auto --num_requests 1",
        0,
        ["Tokens per word", r"\[INFO\] Total Latency: ", "Total request latencies"],
    ),
    "benchmark, data set": (
        DATASET + f"{BENCH} -i grpc --max-input-len 100 --num-requests 1 -c 1 dataset "
        "--dataset data.json --tokenizer-dir model",
        0,
        ["Tokens per word", r"\[INFO\] Total Latency: "],
    ),
}  # fmt: skip
PLAIN = {
    "curl, ensemble": (ENSEMBLE + asked(), 0, [r'"text_output":" ']),
    "curl, infer": (
        "curl -s -X POST localhost:8000/v2/models/tensorrt_llm/infer -d "
        """'{"inputs": [{"name": "input_ids", "shape": [1, 2], "datatype": "INT32", "data": """
        """[547, 1319]}, {"name": "input_lengths", "shape": [1, 1], "datatype": "INT32", """
        """"data": [2]}, {"name": "request_output_len", "shape": [1, 1], "datatype": """
        """"INT32", "data": [3]}]}'""",
        0,
        ['"name":"output_ids"', r'"shape":\[1,1,3\]'],
    ),
    "token client": (
        f"{TOKEN} --exclude-input-in-output --request-output-len 20 --tokenizer-dir model",
        0,
        ["^Got completed request$", "^Output beam 0: "],
    ),
    "token client, streaming": (
        f"{TOKEN} --streaming --request-output-len 20 --tokenizer-dir model",
        1,
        [
            "^Received an error from server:$",
            "Streaming is only supported if model is deployed",
        ],
    ),
    "token client, stop": (
        f"{TOKEN} --stop-after-ms 100 --request-output-len 800 --request-id 1 "
        "--exclude-input-in-output --tokenizer-dir model",
        0,
        ["^Got cancellation response from server$"],
    ),
    "end to end": (
        DATASET + f"{CHECK} --max-input-len 500 --dataset data.json --test-bls "
        """--return-log-probs --sampling-params "{'beam_width': 2, 'length_penalty': 0.5}" """,
        0,
        [
            r"^\[INFO\] Start testing on 1 prompts\.$",
            r"^\[INFO\] Functionality test succeed\.$",
            r"^\[INFO\] Start benchmarking on 1 prompts\.$",
        ],
    ),
    "end to end, without a limit": (
        DATASET + f"{CHECK} --dataset data.json",
        0,
        [
            r"^\[INFO\] Start testing on 1 prompts\.$",
            r"^\[INFO\] Functionality test succeed\.$",
        ],
    ),
    "drafts": (
        DATASET + SPECULATIVE,
        0,
        ["^1: Outputs match$", "^accepted 1 of 1 draft tokens", "^failed/total: 0/1$"],
    ),
    "drafts of one prompt": (
        SPECULATIVE_ONE,
        0,
        ["^It was a dark and", "^accepted 9 of 9 draft tokens .*, 4.00 tokens a verify$"],
    ),
    "the process's name": (
        "grep -lx tritonserver /proc/[0-9]*/comm",
        0,
        [r"^/proc/\d+/comm$"],
    ),
    "convert and build of GPT": (
        "python3 tensorrt_llm/examples/gpt/hf_gpt_convert.py -p 2 -i model -o c-model "
        "--tensor-parallelism 2 --storage-type bfloat16 && "
        "python3 tensorrt_llm/examples/gpt/build.py --model_dir=c-model/2-gpu/ --world_size=2 "
        "--dtype bfloat16 --use_inflight_batching --use_gpt_attention_plugin bfloat16 "
        "--paged_kv_cache --use_gemm_plugin bfloat16 --remove_input_padding "
        "--use_layernorm_plugin bfloat16 --hidden_act gelu --parallel_build "
        "--output_dir=engines/2-gpu",
        0,
        [r"^trimaran build: wrote engines/2-gpu: 2 rank\(s\)"],
    ),
    "convert and build of Llama, with an adapter": (
        "export PATH=$PWD/bin:$PATH; "
        "python3 tensorrt_llm/examples/llama/convert_checkpoint.py --model_dir model "
        "--output_dir tllm_checkpoint --dtype bfloat16 --tp_size 2 && "
        "trtllm-build --checkpoint_dir tllm_checkpoint --remove_input_padding enable "
        "--gpt_attention_plugin bfloat16 --context_fmha enable --gemm_plugin bfloat16 "
        "--output_dir engines/llama --kv_cache_type paged --max_batch_size 64 "
        "--lora_plugin bfloat16 --lora_target_modules attn_q attn_k attn_v --max_lora_rank 8 "
        "&& python3 tensorrt_llm/examples/hf_lora_convert.py -i peft/north -o north-weights "
        "--storage-type float16 && ls north-weights",
        0,
        [
            r"^trimaran build: wrote engines/llama: 2 rank\(s\)",
            r"^model\.lora_config\.npy$",
            r"^model\.lora_weights\.npy$",
        ],
    ),
    "build of Llama in one step": (
        "python3 tensorrt_llm/examples/llama/build.py --model_dir model --dtype bfloat16 "
        "--remove_input_padding --use_gpt_attention_plugin bfloat16 --enable_context_fmha "
        "--use_gemm_plugin bfloat16 --output_dir trt_engines --paged_kv_cache "
        "--max_batch_size 64",
        0,
        [r"^trimaran build: wrote trt_engines: 1 rank\(s\)"],
    ),
    "benchmark, http": (
        f"{BENCH} -i http --max-input-len 100 --num-requests 8 -c 4 "
        "token-norm-dist --input-mean 20 --input-stdev 5 --output-mean 8 --output-stdev 2",
        0,
        [r"^\[INFO\] Start benchmarking on 8 prompts", r"^\[INFO\] Total Latency: "],
    ),
}


def _check(server, bench, command, code, expected):
    # The documents' ports are those of the test's server.
    line = command
    for port, own in (
        ("8000", server.http_port), ("8001", server.grpc_port), ("8002", server.metrics_port),
    ):  # fmt: skip
        line = line.replace(f"localhost:{port}", f"localhost:{own}")
    for script, port in ((TOKEN, server.grpc_port), (TEXT, server.grpc_port)):
        line = line.replace(script, f"{script} -u localhost:{port}")
    is_http = " -i http" in line or (CHECK in line and " -i grpc" not in line)
    port = server.http_port if is_http else server.grpc_port
    for script in (BENCH, CHECK):
        line = line.replace(script, f"{script} -u localhost:{port}")
    done = bench.run(line)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{line}\n{said}"
    rest = said
    for pattern in expected:
        found = re.search(pattern, rest, re.MULTILINE)
        assert found, f"no {pattern!r} in\n{line}\n{said}"
        rest = rest[found.end() :]


@pytest.mark.parametrize(("command", "code", "expected"), DECOUPLED.values(), ids=DECOUPLED)
def test_documented_command_lines_work_with_a_decoupled_model(
    decoupled, bench, command, code, expected
):
    _check(decoupled, bench, command, code, expected)


@pytest.mark.parametrize(("command", "code", "expected"), PLAIN.values(), ids=PLAIN)
def test_documented_command_lines_work_with_a_model_that_is_not_decoupled(
    plain, bench, command, code, expected
):
    _check(plain, bench, command, code, expected)
