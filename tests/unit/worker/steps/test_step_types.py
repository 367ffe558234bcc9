"""A step's decision travels between ranks unchanged."""

import numpy as np
import pytest
import torch

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, int32s


def decision_with_everything() -> SchedulerOutput:
    sampling = SamplingParams(top_k=4, stop_words=((1, 2), (3,)))
    return SchedulerOutput(
        step=7,
        rows=int32s([3, 0]),
        num_scheduled_tokens=int32s([1, 40]),
        num_computed_tokens=int32s([12, 0]),
        sampled=int32s([0]),
        new_blocks=int32s([(0, 0, 0, 5), (0, 0, 1, 6)], 4),
        block_copies=int32s([(0, 1, 2)], 3),
        finished_rows=int32s([9]),
        transfers=int32s([(1, 0, 8, 4), (2, 6, 0, 0)], 4),
        new_rows=[
            NewRow(
                row=0,
                token_ids=int32s(range(64)),
                num_prompt_tokens=60,
                sequence_index=2,
                sampling=sampling.to_wire(),
                adapter_id=5,
            )
        ],
        num_decodes=1,
    )


def test_a_decision_survives_encoding():
    sent = decision_with_everything()

    received = SchedulerOutput.decode(sent.encode())

    for name in ("rows", "num_scheduled_tokens", "num_computed_tokens", "sampled"):
        assert np.array_equal(getattr(received, name), getattr(sent, name)), name
    assert received.new_blocks.tolist() == [[0, 0, 0, 5], [0, 0, 1, 6]]
    assert received.block_copies.tolist() == [[0, 1, 2]]
    assert received.finished_rows.tolist() == [9]
    assert received.transfers.tolist() == [[1, 0, 8, 4], [2, 6, 0, 0]]
    assert (received.step, received.num_decodes, received.num_tokens) == (7, 1, 41)
    (row,) = received.new_rows
    assert row.token_ids.tolist() == list(range(64))
    assert (row.row, row.num_prompt_tokens, row.sequence_index, row.adapter_id) == (0, 60, 2, 5)
    restored = SamplingParams.from_wire(row.sampling)
    assert restored == SamplingParams(top_k=4, stop_words=((1, 2), (3,)))


def test_arrays_of_a_message_are_copied_to_the_device_without_a_warning():
    received = SchedulerOutput.decode(decision_with_everything().encode())

    tensor = to_device(received.rows, torch.device("cpu"))

    assert tensor.tolist() == [3, 0]


def test_a_decode_step_of_256_requests_fits_in_8_kib():
    rows = int32s(range(256))
    empty = int32s([])
    decision = SchedulerOutput(
        step=1,
        rows=rows,
        num_scheduled_tokens=rows,
        num_computed_tokens=rows,
        sampled=rows,
        new_blocks=int32s([(0, row, 1, row) for row in range(128)], 4),
        block_copies=empty.reshape(0, 3),
        finished_rows=empty,
    )

    assert len(decision.encode()) <= 8192


def test_an_invalid_decision_is_refused():
    with pytest.raises(ProtocolError, match="of 3 bytes"):
        SchedulerOutput.decode(b"\x93\x01\x02")
