"""The token budget of a step, by the folder, the flags and the device."""

from __future__ import annotations

import pytest
from launcher_repository import resolve, write_engine, write_model


@pytest.mark.parametrize(
    ("flags", "chunks", "built_seqs", "expected"),
    [
        (("--device", "cpu"), True, 2048, 256),
        (("--device", "cpu"), True, 16, 256),
        (("--device", "cpu"), True, 1024, 1024),
        (("--device", "cpu"), False, 2048, 8192),
        (("--device", "cpu", "--max-num-tokens", "4096"), True, 2048, 4096),
        (("--device", "cpu", "--max-batch-size", "600"), True, 2048, 600),
    ],
)
def test_running_requests_do_not_wait_for_large_steps_of_cpus(
    tmp_path, flags, chunks, built_seqs, expected
):
    sizes = {"max_num_tokens": 8192, "max_batch_size": built_seqs}
    engine = write_engine(tmp_path / "engine", tp_size=1, **sizes)
    keys = {"gpt_model_path": str(engine), "enable_chunked_context": str(chunks)}
    write_model(tmp_path / "repo" / "tensorrt_llm", **keys)
    scheduler = resolve(tmp_path / "repo", *flags).groups[0].engine.scheduler
    assert scheduler.max_num_batched_tokens == expected
    assert scheduler.max_num_seqs == min(600 if "600" in flags else built_seqs, expected)
