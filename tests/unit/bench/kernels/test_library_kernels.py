"""Kernels of other libraries as peers: discovery, inputs and comparison of results."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from trimaran.bench.kernels import command as kernels
from trimaran.bench.kernels import flashinfer_attention, library_kernels
from trimaran.bench.kernels.kernel_case import KernelCase
from trimaran.bench.kernels.library_kernels import LibraryKernel
from trimaran.bench.kernels.paged_inputs import paged_inputs
from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionSpec
from trimaran.launcher.cli.main import main

CPU = torch.device("cpu")
SPEC = AttentionSpec(scale=128**-0.5)
FLAGS = ["--shape", "tiny", "--device", "cpu", "--ceiling-seconds", "0.1"]


class StandIn:
    """FlashInfer's two wrappers in torch: pages by its own words, in its own layout."""

    def __init__(self, workspace, kv_layout, **choices):
        assert kv_layout == "HND" and choices.get("backend") in ("fa2", "fa3")

    def plan(self, *positional, sm_scale, q_data_type, kv_data_type, causal=False):
        *self.queries, self.begins, self.blocks, self.last = positional[:-4]
        self.num_heads, self.num_kv_heads, _, self.block_size = positional[-4:]
        self.scale = sm_scale

    def run(self, query, paged_kv_cache, out):
        count = len(self.last)
        starts = self.queries[0] if self.queries else torch.arange(count + 1)
        for number in range(count):
            rows = slice(starts[number], starts[number + 1])
            out[rows] = self._attend(query[rows], number, paged_kv_cache)

    def _attend(self, query, number, paged_kv_cache):
        blocks = self.blocks[self.begins[number] : self.begins[number + 1]].long()
        length = (len(blocks) - 1) * self.block_size + self.last[number]
        groups = self.num_heads // self.num_kv_heads
        keys, values = (
            each[blocks].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(groups, 0)
            for each in paged_kv_cache
        )
        scores = self.scale * query.transpose(0, 1).float() @ keys.float().transpose(1, 2)
        seen = torch.ones(scores.shape[1:]).tril(int(length) - len(query)).bool()
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (shares @ values.float()).transpose(0, 1)


@pytest.fixture
def flashinfer(monkeypatch):
    """A stand-in for the library, whose kernels run on a CPU."""
    library, utils = ModuleType("flashinfer"), ModuleType("flashinfer.utils")
    library.__spec__ = ModuleSpec("flashinfer", None)
    library.__version__ = "0.0.1"
    library.BatchDecodeWithPagedKVCacheWrapper = StandIn
    library.BatchPrefillWithPagedKVCacheWrapper = StandIn
    utils.is_sm90a_supported = lambda device: True
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setitem(sys.modules, "flashinfer.utils", utils)
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_BYTES", 1024)


@pytest.fixture
def only(monkeypatch):
    """Makes these the only cases of `bench kernels`."""
    return lambda *cases: monkeypatch.setattr(kernels, "_cases", lambda *_: iter(cases))


def case(*libraries, value=2.0):
    return KernelCase(
        name="twice", shape="1", dtype="float32", num_bytes=4, libraries=libraries,
        run=lambda: torch.full((1, 4), value),
    )  # fmt: skip


def kernel(backend, value):
    return LibraryKernel("flashinfer", backend, lambda: torch.full((1, 4), value))


@pytest.mark.parametrize(
    ("of", "lengths"),
    [
        (flashinfer_attention.of_decodes, [(0, 1), (31, 1), (32, 1), (99, 1)]),
        (flashinfer_attention.of_prompts, [(0, 5), (64, 3), (31, 40)]),
    ],
)
def test_flashinfer_reads_the_pages_of_the_cache_and_gives_equal_outputs(
    flashinfer, of, lengths
):
    inputs = paged_inputs(CPU, torch.bfloat16, lengths)
    inputs = type(inputs)(inputs.heads, inputs.layers[:2], inputs.metadata)
    layers = iter(inputs.layers)

    def ours():
        return reference.paged_attention(inputs.query, next(layers), inputs.metadata, SPEC)

    found = of(inputs, SPEC)

    assert len(found) == 2
    assert library_kernels.differing(ours, found) == {}
    # And of the next layer.
    torch.testing.assert_close(found[0].run().float(), ours().float(), atol=2e-2, rtol=2e-2)


def test_without_flashinfer_kernels_are_measured_without_a_peer(
    monkeypatch, only, tmp_path, capsys
):
    monkeypatch.setattr(library_kernels, "LIBRARIES", ("no_such_library",))
    only(case())
    output = tmp_path / "kernels.jsonl"

    assert main(["bench", "kernels", *FLAGS, "--output", str(output)]) == 0

    assert "flashinfer" not in capsys.readouterr().out
    assert not [key for key in json.loads(output.read_text()) if "flashinfer" in key]
    inputs = paged_inputs(CPU, torch.bfloat16, [(3, 1)])
    assert flashinfer_attention.of_decodes(inputs, SPEC) == ()


def test_the_fastest_kernel_of_flashinfer_is_the_peer(flashinfer, only, tmp_path, capsys):
    only(case(kernel("fa2", 2.0), kernel("fa3", 2.0)))
    output = tmp_path / "kernels.jsonl"

    assert main(["bench", "kernels", *FLAGS, "--output", str(output)]) == 0

    head, row = capsys.readouterr().out.splitlines()[-2:]
    line = json.loads(output.read_text())
    assert line["torch_us"] is None
    assert line["flashinfer_us"] == min(line["flashinfer_backends"].values()) > 0
    assert line["flashinfer_backends"][line["flashinfer_backend"]] == line["flashinfer_us"]
    assert set(line["flashinfer_backends"]) == {"fa2", "fa3"}
    assert line["flashinfer_version"] == "0.0.1"
    assert head.endswith("flashinfer us")
    assert row.endswith(f"{line['flashinfer_us']:.1f}")
    assert len(row) == len(head)
    assert main(["bench", "report", str(output)]) == 0
    assert "| torch us | flashinfer us |" in capsys.readouterr().out


@pytest.mark.parametrize("value", [2.2, float("nan")])
def test_peers_with_different_results_are_not_timed(flashinfer, only, tmp_path, capsys, value):
    only(case(kernel("fa2", 2.0), kernel("fa3", value)))
    output = tmp_path / "kernels.jsonl"

    assert main(["bench", "kernels", *FLAGS, "--output", str(output)]) == 1

    assert "flashinfer's fa3 is" in capsys.readouterr().out
    assert set(json.loads(output.read_text())["flashinfer_backends"]) == {"fa2"}
