"""Adapters of data-parallel ranks, some of which have no room for another adapter."""

from __future__ import annotations

import dataclasses
import shutil
from array import array

import pytest
import torch

from tests.unit.worker.lora_adapters import make_adapter, on_the_wire, write_peft
from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora.adapter_messages import OutgoingAdapter
from trimaran.worker.lora.store import CHUNK
from trimaran.worker.lora.tensor_file import TensorFile
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.data_parallel import DataParallelAdapters


class DataParallelRanks:
    """The adapters of two dp ranks with room for two each; requests stay open until the test
    ends them."""

    def __init__(self, make_engine, model_folder, prefetch_dir) -> None:
        self.weights = {task: make_adapter(model_folder, seed=task) for task in range(5)}
        size = sum(one.a.nbytes + one.b.nbytes for one in self.weights[0])
        self.folder = prefetch_dir
        lora = LoraConfig(prefetch_dir=str(prefetch_dir), host_memory_bytes=int(2.9 * size))
        engine = make_engine(lora=lora).engine
        self.managers = [engine._adapters, engine._adapters.for_other_dp_rank()]
        self.adapters = DataParallelAdapters(self.managers)
        self.open: list[Request] = []
        self.adapters.is_open = lambda request: request in self.open

    def ask(self, task, rank, weights=None, name="") -> Request:
        """A request with an adapter: cached, sent as ``weights``, or from a folder."""
        request = Request(
            source="client",
            request_id=0,
            number=0,
            prompt_ids=array("i", [1]),
            sampling=SamplingParams(),
            dp_rank=rank,
            has_adapter=True,
        )
        # Front ends send a task id alone without further fields.
        adapter = {} if weights is None else on_the_wire(self.weights[weights])
        adapter = {"name": name} if name else adapter
        message = Submit(
            request_id=0, model="test", prompt_ids=b"", adapter_id=task, adapter=adapter
        )
        request.adapter_id = self.adapters.enter(message, request)
        self.open.append(request)
        return request

    def weights_of(self, request: Request) -> object:
        """The content of a request's adapter."""
        return self.managers[request.dp_rank]._on_host[request.adapter_id].content

    def fill(self, rank) -> None:
        """Let requests of one dp rank use all of its adapters."""
        for task in (1, 2):
            self.ask(task, rank, weights=task)


@pytest.fixture
def dp_ranks(make_engine, model_folder, tmp_path):
    return DataParallelRanks(make_engine, model_folder, tmp_path)


@pytest.mark.parametrize("full", [0, 1])
def test_an_adapter_is_served_by_a_dp_rank_with_room_for_the_adapter(dp_ranks, full):
    dp_ranks.fill(full)

    brought = [dp_ranks.ask(3, rank, weights=3) for rank in (0, 1)]
    named = [dp_ranks.ask(3, rank) for rank in (0, 1)]

    assert {request.dp_rank for request in (*brought, *named)} == {1 - full}
    # Adapters that all dp ranks have are served where the request was sent.
    assert dp_ranks.ask(1, full).dp_rank == full


def test_an_adapter_with_a_deleted_folder_is_served_by_the_dp_rank_that_holds_the_adapter(
    dp_ranks,
):
    dp_ranks.fill(0)
    write_peft(dp_ranks.folder / "a", dp_ranks.weights[3], alpha=4.0)

    first = dp_ranks.ask(0, 0, name="a")
    shutil.rmtree(dp_ranks.folder / "a")
    second = dp_ranks.ask(0, 0, name="a")

    assert first.dp_rank == second.dp_rank == 1
    assert dp_ranks.weights_of(first) == dp_ranks.weights_of(second)
    with pytest.raises(RequestError, match="no LoRA adapter is named 'b'"):
        dp_ranks.ask(0, 0, name="b")


def test_a_refused_adapter_folder_is_read_once_for_all_dp_ranks(dp_ranks, monkeypatch):
    spoiled = [dataclasses.replace(one, a=one.a * torch.nan) for one in dp_ranks.weights[3]]
    write_peft(dp_ranks.folder / "a", spoiled, alpha=4.0)
    reads, read = [], TensorFile.read
    monkeypatch.setattr(TensorFile, "read", lambda file: reads.append(file) or read(file))

    with pytest.raises(RequestError, match="holds nan"):
        dp_ranks.ask(0, 0, name="a")

    assert len(reads) == 1


def test_an_adapter_is_converted_once_for_all_dp_ranks(dp_ranks, monkeypatch):
    converted, of = [], OutgoingAdapter.of
    monkeypatch.setattr(OutgoingAdapter, "of", lambda *args: converted.append(1) or of(*args))

    dp_ranks.ask(3, 0, weights=3)

    assert len(converted) == 1
    ops = dp_ranks.adapters.take_ops()
    chunks = [[bytes(op[2]) for op in each if op[0] == CHUNK] for each in ops]
    assert chunks[0] == chunks[1] != []


def test_an_adapter_id_means_its_newest_weights_also_when_a_dp_rank_lacks_room(dp_ranks):
    dp_ranks.fill(0)
    old = dp_ranks.ask(1, 0)

    new = dp_ranks.ask(1, 0, weights=3)
    later = dp_ranks.ask(1, 0)

    assert old.dp_rank == 0 and new.dp_rank == later.dp_rank == 1
    assert dp_ranks.weights_of(new) == dp_ranks.weights_of(later) != dp_ranks.weights_of(old)
    assert dp_ranks.weights_of(later) == on_the_wire(dp_ranks.weights[3])["digest"]
    dp_ranks.open.clear()
    # No request needs the old adapter any more, so there is room again.
    assert dp_ranks.ask(4, 0, weights=4).dp_rank == 0


def test_an_adapter_without_room_in_any_dp_rank_is_refused_and_changes_nothing(dp_ranks):
    dp_ranks.fill(0)
    dp_ranks.fill(1)

    with pytest.raises(RequestError, match="is full of adapters that running") as caught:
        dp_ranks.ask(1, 1, weights=3)

    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert dp_ranks.ask(1, 1).dp_rank == 1
    with pytest.raises(RequestError, match="LoRA task 4 not found in cache"):
        dp_ranks.ask(4, 0)
