"""A GPU's sampling, in Triton's interpreter: the ids and log-probabilities of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.sampling import device_sampler
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.sampling.sampler import HostSampler
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import NO_ID, NewRow, int32s

CPU = torch.device("cpu")
HOST = HostSampler(SingleRankGroup())
DEVICE = device_sampler.DeviceSampler(SingleRankGroup())
VOCAB = 300


class Steps:
    """Rows that are entered into the CPU's sampler and into that of the kernels."""

    def __init__(self, params, lengths, num_ids=VOCAB):
        rng = np.random.default_rng(len(params))
        self.order = int32s(np.arange(len(params))[::-1])
        self.lengths = int32s(lengths)
        self.table = torch.from_numpy(rng.integers(0, num_ids, (len(params) + 1, 2100))).int()
        self.on_cpu, self.on_device = (
            self._enter(params, kernels) for kernels in (False, True)
        )

    def _enter(self, params, kernels):
        rows = SamplingRows(len(params), VOCAB, CPU)
        if kernels:
            rows.device_state = DeviceSamplingState(len(params), CPU)
        for entry, row in enumerate(self.order.tolist()):
            prompt = min(int(self.lengths[entry]), 3)
            rows.enter(
                NewRow(
                    row=row,
                    token_ids=self.table[row, :prompt].numpy(),
                    num_prompt_tokens=prompt,
                    sampling=params[entry].to_wire(),
                )
            )
        return rows

    def over_shards(self, logits, masks):
        """The result of a tensor group with one rank, whose shard is the whole vocabulary."""
        device = torch.from_numpy(self.order), torch.from_numpy(self.lengths)
        batch = self.on_device.batch(self.order, self.lengths, *device)
        batch.masks = masks
        return DEVICE.sample_shards(logits, 0, batch, self.table)

    def both(self, logits, masks=None):
        """The results of the CPU and of the kernels."""
        device = torch.from_numpy(self.order), torch.from_numpy(self.lengths)
        batch = self.on_cpu.batch(self.order, self.lengths)
        batch.masks = masks
        expected = HOST.sample(logits.float().clone(), batch, self.table)
        batch = self.on_device.batch(self.order, self.lengths, *device)
        batch.masks = masks
        return expected, DEVICE.sample(logits, batch, self.table)


EDITS = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"repetition_penalty": 0.6, "presence_penalty": 0.5, "top_k": 20, "seed": 3},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "top_p": 1.0, "seed": 4},
    {"no_repeat_ngram_size": 3},
    {"min_tokens": 100, "end_id": 5, "end_ids": (2, 7, 8)},
    {"bad_words": ((7,), (1, 2), (3, 4, 5, 6))},
    {"embedding_bias": np.linspace(-3, 3, VOCAB, dtype="<f4").tobytes()},
    {"top_p": 0.8, "seed": 6, "return_log_probs": True},
    {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "bad_words": ((9,),), "top_p": 0.9},
    {},
]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("num_ids", [VOCAB, 9])
def test_edited_logits_give_the_ids_and_log_probs_of_the_cpu(num_ids):
    torch.manual_seed(num_ids)
    params = [SamplingParams(**fields) for fields in EDITS]
    # Longer than a tile of the kernels; and shorter than an n-gram.
    lengths = [2050, 40, 600, 30, 90, 2, 50, 20, 10, 60, 1500, 5]
    steps = Steps(params, lengths, num_ids)

    logits = torch.randn(len(params), VOCAB) * 2
    before = logits.clone()
    expected, sampled = steps.both(logits)
    assert torch.equal(sampled.token_ids, expected.token_ids)
    torch.testing.assert_close(sampled.log_probs, expected.log_probs)
    assert torch.equal(logits, before)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("size", [2, 7, 300])
def test_long_ngrams_that_repeat_are_found_by_the_kernels(size):
    periods, lengths = [37, 1, 1, 2, 11], [2050, size, size - 1, 1200, 700]
    steps = Steps([SamplingParams(no_repeat_ngram_size=size)] * 5, lengths)
    logits = torch.zeros(5, VOCAB)
    logits[:, 100] = 4.0
    for entry, (row, period) in enumerate(zip(steps.order, periods, strict=True)):
        steps.table[row] = torch.arange(steps.table.shape[1]) % period
        logits[entry, lengths[entry] % period] = 5.0
    expected, sampled = steps.both(logits)
    # The third sequence is too short to repeat an n-gram.
    assert sampled.token_ids.tolist() == [100, 100, 0, 100, 100]
    assert torch.equal(sampled.token_ids, expected.token_ids)


def test_bad_words_match_sampled_ids():
    words = ((11,), (40, 12), (30, 40, 13), (31, 40, 14), (1, 2, 3, 40, 15))
    steps = Steps([SamplingParams(bad_words=words)] * 2, [6, 1])
    steps.table[1, :6] = torch.tensor([8, 2, 2, 3, 30, 40])
    steps.table[0, :1] = 40
    for likely in (11, 12, 13, 14, 15, 20):
        logits = torch.zeros(2, VOCAB)
        logits[:, likely], logits[:, 20] = 5.0, 4.0
        expected, sampled = steps.both(logits)
        assert torch.equal(sampled.token_ids, expected.token_ids)
        assert (sampled.token_ids[0] == 20) == (likely in (11, 12, 13, 20))


# The probabilities of such rows are NaN, of which the interpreter warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_rows_that_forbid_every_id_are_reported():
    never = tuple((token_id,) for token_id in range(VOCAB))
    fields = [
        {"bad_words": never, "return_log_probs": True},
        {"bad_words": never[1:], "top_p": 0.5, "seed": 1},
        {"bad_words": never, "top_p": 0.5, "seed": 2},
        {},
        {"bad_words": never, "top_k": 5, "seed": 3},
        {"bad_words": never, "top_k": 0, "top_p": 1.0, "seed": 4},
    ]
    steps = Steps([SamplingParams(**each) for each in fields], [4] * len(fields))
    stuck = [each.get("bad_words") == never for each in fields]
    for sampled in steps.both(torch.randn(len(fields), VOCAB)):
        assert sampled.is_stuck.tolist() == stuck
        assert (sampled.ids_for_host() == NO_ID).tolist() == stuck
        assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB)).all()


def test_a_step_with_more_rows_than_a_chunk_of_edits_is_sampled_like_on_the_cpu(monkeypatch):
    monkeypatch.setattr(device_sampler, "_EDITED_ROWS", 4)
    torch.manual_seed(2)
    params = [
        SamplingParams(**fields)
        for fields in [{"frequency_penalty": 1.0}] + [{}] * 4 + [{"repetition_penalty": 2.0}]
    ]
    steps = Steps(params, [30] * 6)
    expected, sampled = steps.both(torch.randn(6, VOCAB))

    assert torch.equal(sampled.token_ids, expected.token_ids)
    assert sampled.log_probs is None


@pytest.mark.matrix(keep=0)
def test_a_reset_id_resets_the_top_p_of_its_row_alone():
    torch.manual_seed(5)
    fields = {"top_p": 0.9, "top_p_decay": 0.6, "top_p_min": 0.01, "seed": 4}
    params = [SamplingParams(**fields, top_p_reset_ids=reset) for reset in (7, -1, 7)]
    steps = Steps(params, [9, 9, 3])
    steps.table[:, 3:9] = torch.tensor([7, 1, 1, 7, 1, 1])
    for _ in range(2):
        expected, sampled = steps.both(torch.randn(len(params), VOCAB))
        assert torch.equal(sampled.token_ids, expected.token_ids)


def test_beam_candidates_of_any_width_are_those_of_the_cpu(monkeypatch):
    # Some parts have beams of other widths, and some parts have no beams.
    monkeypatch.setattr(device_sampler, "_EDITED_ROWS", 2)
    torch.manual_seed(6)
    fields = [
        {"beam_width": 2, "repetition_penalty": 1.4},
        {},
        {"beam_width": 5, "temperature": 1.7, "stop_words": ((3, 4), (9,)), "end_id": 8},
        {"top_k": 9, "seed": 2},
        {"beam_width": 3, "bad_words": ((7,),)},
        {},
        {"presence_penalty": 1.0},
        {},
        {"beam_width": 2, "return_log_probs": True},
    ]
    steps = Steps([SamplingParams(**each) for each in fields], [20] * len(fields))

    expected, sampled = steps.both(torch.randn(len(fields), VOCAB))

    assert expected.beams.token_ids.shape == (4, 5 + 3)
    for ours, theirs, count in zip(
        sampled.beams.to_lists(), expected.beams.to_lists(), (3, 8, 4, 3), strict=True
    ):
        assert ours[0][:count] == theirs[0][:count]
        assert ours[1][:count] == pytest.approx(theirs[1][:count], rel=1e-6)


def masked(vocab_size, allowed):
    """int32 [n, W]: the allowed ids of each row."""
    masks = np.zeros((len(allowed), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, ids in enumerate(allowed):
        masks[row, ids] = 1
    return torch.from_numpy(np.packbits(masks, axis=1, bitorder="little").view(np.int32))


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("at_once", [4, 1, 2, 128])
def test_edits_of_logits_change_no_other_row(monkeypatch, at_once):
    """Guided, penalised, filtered and plain rows, of logits in the model's dtype."""
    monkeypatch.setattr(device_sampler, "_EDITED_ROWS", at_once)
    torch.manual_seed(at_once)
    guide = {"guide_type": "json", "guide": "{}"}
    fields = [
        {"top_p": 1.0},
        {**guide},
        {"top_k": 20},
        {"repetition_penalty": 1.5, "top_p": 0.9},
        {**guide, "top_p": 1.0, "frequency_penalty": 0.4, "return_log_probs": True},
        {},
        {"top_p": 0.8, "return_log_probs": True},
        {**guide, "top_k": 5},
        {"top_p": 1.0, "min_p": 0.1},
    ]
    params = [SamplingParams(**each, seed=place) for place, each in enumerate(fields)]
    steps = Steps(params, [40] * len(fields))
    allowed = [[3, 299], list(range(64, 128)), [0, 31, 32, 170]]
    logits = (torch.randn(len(fields), VOCAB) * 2).bfloat16()
    before = logits.clone()

    expected, sampled = steps.both(logits, masked(VOCAB, allowed))

    assert torch.equal(sampled.token_ids, expected.token_ids)
    torch.testing.assert_close(sampled.log_probs, expected.log_probs)
    assert torch.equal(logits, before)
    # A shard's last columns may be padding.
    padded = torch.nn.functional.pad(logits, (0, 4), value=99.0)
    sharded = steps.over_shards(padded, masked(VOCAB, allowed))
    assert torch.equal(sharded.token_ids, sampled.token_ids)
    torch.testing.assert_close(sharded.log_probs[[4, 6]], expected.log_probs[[4, 6]])
    guided = [int(sampled.token_ids[entry]) for entry in (1, 4, 7)]
    assert all(token in ids for token, ids in zip(guided, allowed, strict=True))
