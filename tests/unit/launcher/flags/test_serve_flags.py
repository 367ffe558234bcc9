"""Flags, run files and repository keys, and the resulting configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launcher_repository import parse, resolve, write_checkpoint, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli import main as cli
from trimaran.worker.config.engine_config import EngineConfig, GuidedConfig, LoraConfig


@pytest.fixture
def repository(tmp_path):
    """A repository whose model is an engine for two ranks."""
    engine = write_engine(tmp_path / "engine", tp_size=2)
    write_model(tmp_path / "repo" / "tensorrt_llm", gpt_model_path=str(engine))
    return tmp_path / "repo"


def test_flags_of_launch_triton_server_take_effect_in_their_spelling(repository, tmp_path):
    config = resolve(
        repository, "--world_size=2", "--http_port", "9000", "--grpc_port=9001",
        "--metrics_port=9002", "--log", "--log-file", "x.txt", "--exit_timeout=5", "-f",
        "--tensorrt_llm_model_name", "tensorrt_llm", "--oversubscribe",
    )  # fmt: skip
    frontend = config.frontend
    assert (frontend.http_port, frontend.grpc_port, frontend.metrics_port) == (9000, 9001, 9002)
    assert (config.log.file, config.log.level, frontend.log_verbose_level) == (
        "x.txt",
        "DEBUG",
        3,
    )
    assert (config.exit_timeout_s, frontend.exit_timeout_s) == (5, 5)
    assert config.mpi.oversubscribe
    assert config.groups[0].world_size == 2


@pytest.mark.feature("setting:max_queue_size", of="request")
def test_the_engine_folder_gives_the_limits_and_the_world_size(repository):
    engine = resolve(repository).groups[0].engine
    assert engine.parallel.tp_size == 2
    scheduler = engine.scheduler
    assert scheduler.max_num_batched_tokens == 64
    assert scheduler.max_num_seqs == 16
    assert (scheduler.max_input_len, scheduler.max_seq_len) == (100, 200)
    assert (scheduler.max_queue_size, scheduler.level_queue_sizes) == (7, ())


@pytest.mark.feature("setting:max_queue_size", of="request")
def test_the_queue_size_of_each_priority_level_reaches_the_engine(repository):
    path = repository / "tensorrt_llm" / "config.pbtxt"
    levels = (
        "dynamic_batching { priority_levels: 3 default_priority_level: 2 "
        "priority_queue_policy { key: 3 value { max_queue_size: 2 } } "
    )
    path.write_text(path.read_text().replace("dynamic_batching {", levels))

    engine = resolve(repository).groups[0].engine

    assert engine.scheduler.level_queue_sizes == (7, 7, 2)
    assert EngineConfig.from_wire(engine.to_wire()) == engine


def test_flags_override_the_engine_folder(repository):
    engine = resolve(
        repository, "--max-batch-size", "4", "--max-num-tokens", "32", "--tokens-per-block",
        "16", "--depth", "1", "--expected-output-tokens", "99",
        "--dtype", "float32", "--num-threads", "3", "--deterministic",
        "--prompt-graph-tokens", "512", "--adapter-graphs", "--guide-timeout", "2.5",
    ).groups[0].engine  # fmt: skip
    assert engine.scheduler.max_num_seqs == 4
    assert engine.scheduler.max_num_batched_tokens == 32
    assert engine.scheduler.depth == 1
    assert engine.scheduler.expected_output_tokens == 99
    assert engine.cache.tokens_per_block == 16
    assert (engine.dtype, engine.num_threads, engine.deterministic) == ("float32", 3, True)
    assert (engine.prompt_graph_tokens, engine.lora.has_graphs) == (512, True)
    assert engine.guided.timeout_s == 2.5
    assert EngineConfig.from_wire(engine.to_wire()) == engine


def test_graphs_and_all_reduce_are_chosen_by_the_engine_unless_a_flag_is_set(repository):
    def chosen(*flags):
        engine = resolve(repository, *flags).groups[0].engine
        assert EngineConfig.from_wire(engine.to_wire()) == engine
        return engine.prompt_graph_tokens, engine.collective_graphs, engine.all_reduce

    assert chosen() == (None, None, "auto")
    assert chosen(
        "--prompt-graph-tokens", "0", "--no-collective-graphs", "--all-reduce", "nccl"
    ) == (0, False, "nccl")


def test_the_first_layer_table_is_chosen_by_the_engine_unless_a_flag_is_set(repository):
    def chosen(*flags):
        engine = resolve(repository, *flags).groups[0].engine
        assert EngineConfig.from_wire(engine.to_wire()) == engine
        return engine.first_layer_table

    assert chosen() is None
    assert chosen("--first-layer-table") is True
    assert chosen("--no-first-layer-table") is False


@pytest.mark.parametrize("flags", [("--all-reduce", "peer"), ("--collective-graphs",)])
def test_all_reduce_flags_for_gpus_are_refused_on_the_cpu(repository, flags):
    with pytest.raises(ConfigError, match=f"{' '.join(flags)} is about sums between GPUs"):
        resolve(repository, "--device", "cpu", *flags)


def test_expert_parallel_sizes_reach_the_engine_or_are_refused(tmp_path):
    moe = Path(__file__).parents[4] / "examples" / "demo_models" / "moe"
    write_model(tmp_path / "m", gpt_model_path=str(moe))
    sizes = ("--world-size", "4", "--moe-ep-size", "2")
    parallel = resolve(tmp_path, *sizes).groups[0].engine.parallel
    assert (parallel.tp_size, parallel.moe_tp_size, parallel.moe_ep_size) == (4, 2, 2)
    assert resolve(tmp_path).groups[0].engine.parallel.expert_parts == 1
    with pytest.raises(ConfigError, match=r"times --moe-ep-size \(2\) must be --tp-size \(4\)"):
        resolve(tmp_path, *sizes, "--moe-tp-size", "4")


def test_a_ready_file_that_cannot_be_written_is_refused_before_anything_starts(
    repository, tmp_path
):
    (tmp_path / "file").touch()
    path = str(tmp_path / "new" / "ready.json")
    assert resolve(repository, "--ready-file", path).ready_file == path
    with pytest.raises(ConfigError, match=r"file: File exists\. Name a folder"):
        resolve(repository, "--ready-file", str(tmp_path / "file" / "ready.json"))
    with pytest.raises(ConfigError, match=r"is a folder\. Name a file"):
        resolve(repository, "--ready-file", str(tmp_path))
    with pytest.raises(ConfigError, match=r"File name too long\. Name another file"):
        resolve(repository, "--ready-file", str(tmp_path / ("x" * 300)))


def test_a_ready_file_does_not_replace_a_device_or_fifo(repository, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), ("/dev/null", "a device")):
        with pytest.raises(ConfigError, match=rf"it is {kind}, not a file\. Name a file"):
            resolve(repository, "--ready-file", str(path))


def test_traced_steps_are_given_by_number_and_written_to_the_log_folder(repository, tmp_path):
    assert resolve(repository).profile is None
    logs = tmp_path / "logs"
    profile = resolve(repository, "--profile", "steps=5:9", "--log-dir", str(logs)).profile
    assert profile is not None
    assert (profile.first, profile.last, profile.folder) == (5, 9, str(logs))
    with pytest.raises(ConfigError, match="Add --log-dir DIR"):
        resolve(repository, "--profile", "steps=5:9")


def test_repository_keys_reach_the_engine(tmp_path):
    write_model(
        tmp_path / "repo" / "m",
        gpt_model_path=str(write_checkpoint(tmp_path / "hf")),
        gpt_model_type="V1",
        batch_scheduler_policy="max_utilization",
        enable_chunked_context="false",
        max_tokens_in_paged_kv_cache="2560",
        kv_cache_free_gpu_mem_fraction="0.5",
        enable_kv_cache_reuse="False",
        gpu_device_ids="1",
        stats_check_period_ms="250",
        cuda_graph_mode="false",
        cuda_graph_cache_size="8",
    )
    group = resolve(tmp_path / "repo").groups[0]
    engine = group.engine
    assert (engine.scheduler.batching, engine.scheduler.policy) == ("V1", "max_utilization")
    assert not engine.scheduler.enable_chunked_context
    assert (engine.cache.max_tokens, engine.cache.free_memory_fraction) == (2560, 0.5)
    assert not engine.cache.enable_block_reuse
    assert engine.gpu_device_ids == (1,)
    assert (engine.cuda_graphs, engine.max_cuda_graphs) == (False, 8)
    assert group.stats_period_ms == 250


def test_keys_of_the_cache_and_of_old_configurations_reach_the_engine(tmp_path):
    write_model(
        tmp_path / "repo" / "m",
        gpt_model_path=str(write_checkpoint(tmp_path / "hf")),
        max_attention_window_size="16, 4096",
        sink_token_length="4",
        kv_cache_host_memory_bytes="1000000",
        kv_cache_onboard_blocks="True",
        max_num_sequences="3",
        enable_trt_overlap="False",
    )
    engine = resolve(tmp_path / "repo").groups[0].engine
    assert engine.cache.attention_windows == (16, 4096)
    assert (engine.cache.num_sinks, engine.cache.host_bytes) == (4, 1000000)
    assert (engine.scheduler.max_num_seqs, engine.scheduler.depth) == (3, 1)
    assert EngineConfig.from_wire(engine.to_wire()) == engine


@pytest.mark.feature("parameter:decoding_mode")
def test_a_beam_width_reaches_the_engine_and_must_match_the_decoding_mode(tmp_path):
    path = str(write_checkpoint(tmp_path / "hf"))
    keys = {"gpt_model_path": path, "max_beam_width": "4"}
    write_model(tmp_path / "a" / "m", **keys, decoding_mode="beam_search")
    assert resolve(tmp_path / "a").groups[0].engine.scheduler.max_beam_width == 4
    write_model(tmp_path / "b" / "m", **keys, decoding_mode="top_k")
    with pytest.raises(ConfigError, match="max_beam_width is 4 but decoding_mode is top_k"):
        resolve(tmp_path / "b")


def test_a_beam_width_above_that_of_the_engine_folder_is_refused(tmp_path):
    path = str(write_engine(tmp_path / "engine", 1, max_beam_width=3))
    for name, value, width in (("a", "${max_beam_width}", 3), ("b", "2", 2)):
        write_model(tmp_path / name / "m", gpt_model_path=path, max_beam_width=value)
        assert resolve(tmp_path / name).groups[0].engine.scheduler.max_beam_width == width
    write_model(tmp_path / "c" / "m", gpt_model_path=path, max_beam_width="4")
    with pytest.raises(
        ConfigError, match=r"is 4 but .*engine was built for 3.* --max-beam-width 4"
    ):
        resolve(tmp_path / "c")


def test_keys_of_adapters_reach_the_engine(tmp_path):
    (tmp_path / "adapters").mkdir()
    write_model(
        tmp_path / "repo" / "m",
        gpt_model_path=str(write_checkpoint(tmp_path / "hf")),
        lora_cache_max_adapter_size="128",
        lora_cache_gpu_memory_fraction="0.25",
        lora_cache_host_memory_bytes="123456",
        lora_prefetch_dir=str(tmp_path / "adapters"),
    )
    engine = resolve(tmp_path / "repo").groups[0].engine
    assert engine.lora == LoraConfig(
        max_adapter_size=128,
        gpu_memory_fraction=0.25,
        host_memory_bytes=123456,
        prefetch_dir=str(tmp_path / "adapters"),
    )
    assert EngineConfig.from_wire(engine.to_wire()) == engine


def test_keys_of_guided_decoding_reach_the_engine(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "hf")
    info = tmp_path / "info.json"
    info.write_text("{}")
    keys = {"guided_decoding_backend": "xgrammar", "tokenizer_dir": str(checkpoint)}
    write_model(
        tmp_path / "repo" / "m",
        gpt_model_path=str(checkpoint),
        xgrammar_tokenizer_info_path=str(info),
        **keys,
    )

    engine = resolve(tmp_path / "repo").groups[0].engine

    assert engine.guided == GuidedConfig(
        backend="xgrammar", tokenizer_dir=str(checkpoint), tokenizer_info_path=str(info)
    )
    assert EngineConfig.from_wire(engine.to_wire()) == engine


def test_guided_decoding_without_a_tokenizer_is_refused_before_anything_starts(tmp_path):
    engine = write_engine(tmp_path / "engine", tp_size=1)
    keys = {"guided_decoding_backend": "xgrammar"}
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(engine), **keys)

    with pytest.raises(ConfigError, match="Please provide 'tokenizer_dir'"):
        resolve(tmp_path / "repo")
    (engine / "tokenizer.json").write_text("{}")
    assert resolve(tmp_path / "repo").groups[0].engine.guided.backend == "xgrammar"


@pytest.mark.parametrize(
    ("key", "value", "depth"),
    [
        ("enable_trt_overlap", "true", 2),
        ("enable_overlap_scheduler", "false", 1),
        ("disable_overlap_scheduler", "true", 1),
        ("disable_overlap_scheduler", "false", 2),
    ],
)
def test_each_of_three_keys_sets_the_overlap(tmp_path, key, value, depth):
    checkpoint = write_checkpoint(tmp_path / "hf")
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(checkpoint), **{key: value})
    assert resolve(tmp_path / "repo").groups[0].engine.scheduler.depth == depth


def test_pipeline_depth_is_chosen_by_the_engine_unless_a_flag_is_set_and_has_a_limit(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "hf")
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(checkpoint))

    def depth(*flags):
        return resolve(tmp_path / "repo", *flags).groups[0].engine.scheduler.depth

    assert depth("--pp-size", "2", "--depth", "3") == 3
    assert (depth(), depth("--pp-size", "2"), depth("--depth", "1")) == (0, 0, 1)
    with pytest.raises(ConfigError, match="--depth is 3 but with 1 pipeline"):
        depth("--depth", "3")


def test_unfilled_template_keys_keep_the_defaults(tmp_path):
    write_model(
        tmp_path / "repo" / "m",
        gpt_model_path=str(write_checkpoint(tmp_path / "hf")),
        batch_scheduler_policy="${batch_scheduler_policy}",
        kv_cache_free_gpu_mem_fraction="${kv_cache_free_gpu_mem_fraction}",
    )
    engine = resolve(tmp_path / "repo").groups[0].engine
    assert engine.scheduler.policy == "guaranteed_no_evict"
    assert engine.scheduler.enable_chunked_context
    assert engine.cache.free_memory_fraction == 0.9
    assert engine.parallel.world_size == 1
    assert engine.cuda_graphs


def test_flags_of_the_command_line_override_a_run_file(repository, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(
        "http_port: 7000\ngrpc-port: 7001\nlog: true\nforce: false\nstrict-readiness: false\n"
        "collective-graphs: false\n"
        "metrics_config: [counter_latencies=true, histogram_latencies=true]\n"
    )
    config = resolve(repository, "--config", str(run), "--http-port=7777")
    assert (config.frontend.http_port, config.frontend.grpc_port) == (7777, 7001)
    assert config.log.file == "triton_log.txt"
    assert not config.frontend.strict_readiness
    assert config.groups[0].engine.collective_graphs is False
    assert config.frontend.metrics_config == {
        "counter_latencies": "true", "histogram_latencies": "true",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("http_prot: 1", "no flag 'http_prot'; did you mean http-port?"),
        ("log: 3", "log is 3, not true or false"),
        ("- a", "must hold lines of the form"),
        ("a: [", "is not YAML"),
        ("http-port: {a: 1}", "not a single value"),
        ('log_file: "a\\0b"', "not a single value"),
    ],
)
def test_a_wrong_run_file_is_refused(repository, tmp_path, text, complaint):
    run = tmp_path / "run.yaml"
    run.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        resolve(repository, "--config", str(run))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--world-size", "4"], "Start 2 ranks, or build again with --tp-size 4"),
        (["--no-mpi"], "world size must be 1 when using no-mpi"),
        (["--multi-model", "--world-size", "2"], "World size must be 1 when using multi-model"),
        (["--disable-spawn-processes"], "Add --multi-model"),
        (["--load-model", "m"], "requires setting '--model-control-mode=explicit' as well."),
        (["--tensorrt-llm-model-name", "other"], "The repository holds tensorrt_llm"),
        (["--tensorrt-llm-model-name", "a,b"], "a: no token-level model of that name"),
        (
            ["--max-batch-size", "100"],
            "--max-batch-size 100: a step computes at most 64 tokens (--max-num-tokens",
        ),
        (["--max-num-tokens=65537", "--max-batch-size=65537"], "(65537) is above the 65536"),
        (["--metrics-config", "x"], "not of the form KEY=VALUE"),
        (["--metrics-config", "x=true"], "x=true: known keys are counter_latencies"),
        (["--metrics-config", "summary_quantiles=nan:0"], "nan is no quantile"),
        (["--no-mpi", "--oversubscribe"], "--oversubscribe is for our mpirun, but --no-mpi"),
        (["--mpi", "job", "--mpirun", "/x"], "leave out --mpirun"),
    ],
)
def test_flags_that_cannot_take_effect_are_refused(repository, flags, complaint):
    with pytest.raises(ConfigError) as caught:
        resolve(repository, *flags)
    assert complaint in str(caught.value)


@pytest.mark.feature("parameter:kv_cache_onboard_blocks")
@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({}, "gpt_model_path (engine_dir) is not set"),
        (
            {"gpt_model_path": "/no/such"},
            "Decoder (GPT) model path at /no/such does not exist.",
        ),
        ({"gpu_device_ids": "0,1,2,3,4"}, "places it on 5: tp_size (5) is above num_attention"),
        ({"gpu_device_ids": "0;1"}, "names 2 lists for 1 instance(s)"),
        ({"kv_cache_free_gpu_mem_fraction": "1.5"}, "must be above 0 and at most 1"),
        ({"max_attention_window_size": "4096;8"}, "is '4096;8' but must be a number of tokens"),
        ({"max_attention_window_size": "0"}, "attention windows are [0] but each must be 1"),
        ({"sink_token_length": "4"}, "Set max_attention_window_size too"),
        ({"lora_prefetch_dir": "/no/such"}, "lora_prefetch_dir is '/no/such', which is no"),
        (
            {"kv_cache_host_memory_bytes": "9", "kv_cache_onboard_blocks": "False"},
            "kv_cache_onboard_blocks is False but blocks on the host",
        ),
        (
            {"kv_cache_host_memory_bytes": "9", "enable_kv_cache_reuse": "False"},
            "Set enable_kv_cache_reuse to True",
        ),
        (
            {"enable_trt_overlap": "True", "disable_overlap_scheduler": "True"},
            "enable_trt_overlap and disable_overlap_scheduler contradict each other",
        ),
    ],
)
def test_a_wrong_repository_key_is_refused_with_its_file(tmp_path, parameters, complaint):
    checkpoint = write_checkpoint(tmp_path / "hf")
    if parameters:
        parameters = {"gpt_model_path": str(checkpoint), **parameters}
    folder = write_model(tmp_path / "repo" / "m", **parameters)
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path / "repo")
    assert complaint in str(caught.value)
    assert f"{folder}/config.pbtxt" in str(caught.value)


def test_a_model_of_the_llm_api_is_refused_by_name(tmp_path):
    folder = tmp_path / "repo" / "tensorrt_llm"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"')
    (folder / "1" / "model.py").write_text("from tensorrt_llm import LLM")
    (folder / "1" / "model.yaml").write_text("model: some")

    with pytest.raises(ConfigError, match=r"1/model\.yaml: models of the LLM API"):
        resolve(tmp_path / "repo")


def test_two_token_models_need_a_choice(repository, tmp_path):
    hf = write_checkpoint(tmp_path / "hf")
    write_model(repository / "second", gpt_model_path=str(hf))
    with pytest.raises(ConfigError, match=r"2 token-level models \(second, tensorrt_llm\)"):
        resolve(repository)
    config = resolve(repository, "--tensorrt-llm-model-name", "second")
    assert config.frontend.groups == {"second": ("second",)}


def test_flags_without_effect_are_noted_once_each(repository):
    config = resolve(repository, "--tritonserver", "/x", "--backend-config", "a,b", "-f")
    assert len(config.notes) == 3
    assert config.notes[0].startswith("--tritonserver has no effect")


@pytest.mark.parametrize(
    "flags",
    [["--http-port", "70000"], ["--depth", "0"], ["--no-such"], ["--log-format", "xml"],
     ["--world-size", "0"], ["--hang-timeout", "-1"], ["--strict-readiness", "maybe"]],
)  # fmt: skip
def test_a_malformed_flag_is_one_line_and_code_2(capsys, flags):
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_configuration_error_is_one_line_and_code_2(capsys, tmp_path):
    assert cli.main(["serve", "--model-repo", str(tmp_path / "none")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("trimaran: error: model repository ")


def test_help_fits_a_screen_and_shows_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert len(text.splitlines()) <= 50
    assert "trimaran serve --model-repo repository --world-size 2" in text
    assert "--hang-timeout" in text


def test_help_all_shows_every_flag(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    text = capsys.readouterr().out
    for flag in ("--multi-model", "--tritonserver", "--strict-readiness", "--replay-timeout"):
        assert flag in text


def test_an_unknown_command_names_the_known_ones(capsys):
    assert cli.main(["sreve"]) == 2
    assert "serve, build" in capsys.readouterr().err


def test_the_number_of_front_ends_is_limited(repository):
    assert resolve(repository, "--frontend-processes", "4").frontend.num_frontends == 4
    with pytest.raises(ConfigError, match="is 65 but at most 64"):
        resolve(repository, "--frontend-processes", "65")


def test_quantiles_of_several_front_ends_are_refused(repository):
    flags = ("--frontend-processes", "2", "--metrics-config", "summary_latencies=true")
    with pytest.raises(ConfigError, match="cannot be added up"):
        resolve(repository, *flags)
