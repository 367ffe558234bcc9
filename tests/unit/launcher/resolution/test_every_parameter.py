"""Every key of a token-level model's config.pbtxt reaches its engine, or is shown elsewhere."""

from __future__ import annotations

import pytest
from launcher_repository import resolve, write_checkpoint, write_model

from trimaran.server.repository.parameter_table import TOKEN_PARAMETERS, Effect
from trimaran.worker.config.engine_config import EngineConfig

WINDOW = {"max_attention_window_size": "64"}
GUIDED = {"guided_decoding_backend": "xgrammar"}

# The other set keys, and the key's value; {folder} and {file} exist.
REACH_THE_ENGINE = {
    "gpt_model_type": ({}, "V1"),
    "gpt_model_path": ({}, "{folder}/hf2"),
    "stats_check_period_ms": ({}, "250"),
    "gpu_device_ids": ({}, "1"),
    "enable_trt_overlap": ({}, "False"),
    "enable_overlap_scheduler": ({}, "False"),
    "disable_overlap_scheduler": ({}, "True"),
    "max_num_sequences": ({}, "3"),
    "max_tokens_in_paged_kv_cache": ({}, "2560"),
    "kv_cache_free_gpu_mem_fraction": ({}, "0.5"),
    "kv_cache_host_memory_bytes": ({}, "1000000"),
    "enable_kv_cache_reuse": ({}, "False"),
    "max_attention_window_size": ({}, "16,64"),
    "max_kv_cache_length": ({}, "64"),
    "sink_token_length": (WINDOW, "4"),
    "batch_scheduler_policy": ({}, "max_utilization"),
    "enable_chunked_context": ({}, "False"),
    "lora_cache_max_adapter_size": ({}, "128"),
    "lora_cache_gpu_memory_fraction": ({}, "0.25"),
    "lora_cache_host_memory_bytes": ({}, "123456"),
    "lora_prefetch_dir": ({}, "{folder}"),
    "max_beam_width": ({}, "4"),
    "guided_decoding_backend": ({}, "xgrammar"),
    "tokenizer_dir": (GUIDED, "{folder}/hf2"),
    "xgrammar_tokenizer_info_path": (GUIDED, "{file}"),
    "cuda_graph_mode": ({}, "False"),
    "cuda_graph_cache_size": ({}, "8"),
}
ELSEWHERE = {
    # It stands in for gpt_model_path: the test below.
    "engine_dir",
    # They are the front end's: tests/unit/pipelines.
    "exclude_input_in_output",
    "normalize_log_probs",
    # They need flags or GPUs to place groups by: test_resolver.py.
    "participant_ids",
    "num_nodes",
    # False is refused beside host memory, because blocks there have no other use.
    "kv_cache_onboard_blocks",
    # It must fit the engine's drafter: test_draft_flags.py.
    "decoding_mode",
    # They need an engine that is built for lookahead decoding: test_draft_flags.py.
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    # These need an engine that is built for such heads: test_draft_flags.py.
    "medusa_choices",
    "eagle_choices",
}


def test_every_served_key_is_covered_here_or_by_a_named_test():
    served = {key for key, known in TOKEN_PARAMETERS.items() if known.effect is Effect.SERVED}
    assert REACH_THE_ENGINE.keys() | ELSEWHERE == served


@pytest.mark.feature(*(f"parameter:{key}" for key in REACH_THE_ENGINE))
def test_every_key_reaches_the_engine(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "hf")
    (checkpoint / "tokenizer.json").write_text("{}")
    write_checkpoint(tmp_path / "hf2")
    info = tmp_path / "info.json"
    info.write_text("{}")
    groups = {}

    def group(keys):
        number = len(groups)
        named = {"gpt_model_path": str(checkpoint), **keys}
        folder = tmp_path / f"repository{number}"
        write_model(
            folder / "m",
            **{key: v.format(folder=tmp_path, file=info) for key, v in named.items()},
        )
        groups[number] = resolve(folder).groups[0]
        return groups[number]

    dropped = []
    for key, (besides, value) in REACH_THE_ENGINE.items():
        with_it = group({**besides, key: value})
        if with_it == group(besides):
            dropped.append(key)
        assert EngineConfig.from_wire(with_it.engine.to_wire()) == with_it.engine
    assert dropped == []


@pytest.mark.feature("parameter:engine_dir")
def test_models_without_in_flight_batching_name_their_folder_in_engine_dir(tmp_path):
    for key in ("engine_dir", "gpt_model_path"):
        checkpoint = write_checkpoint(tmp_path / key)
        write_model(tmp_path / f"of_{key}" / "m", **{key: str(checkpoint)})
        (group,) = resolve(tmp_path / f"of_{key}").groups
        assert group.engine.engine_dir == str(checkpoint)


def test_the_import_path_of_an_admission_policy_reaches_the_engine(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "hf")
    path = "admission_policy.ShortestPromptFirst"
    values = {"gpt_model_path": str(checkpoint), "batch_scheduler_policy": path}
    write_model(tmp_path / "repository" / "m", **values)

    assert resolve(tmp_path / "repository").groups[0].engine.scheduler.policy == path
