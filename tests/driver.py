"""Engines that tests drive by hand: on one rank, or from rank 0 over all ranks of a run."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane, connect_control
from trimaran.comm.messages.messages import FinishReason, RequestFailed, StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.comm.stages.world_group import WorldGroup
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import (
    EngineConfig,
    ParallelConfig,
    ProfileConfig,
    RankConfig,
)
from trimaran.worker.engine.engine import Engine


class Driver:
    """An engine and its messages, by request."""

    def __init__(
        self,
        config: EngineConfig,
        profile: ProfileConfig | None = None,
        ties: tuple[Any, ...] = (),
    ) -> None:
        """``ties`` are the engine's layout, control plane, group and ranks; new ones by
        default."""
        self.engine = Engine.load(
            RankConfig(engine=config, group="test", profile=profile),
            *(ties or (ParallelLayout(), LocalControlPlane(), SingleRankGroup())),
        )
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[int, int], FinishReason] = {}
        self.extras: dict[tuple[int, int], list[dict]] = defaultdict(list)
        self.failed: dict[int, str] | None = None
        """Errors of requests, for a test that expects some; otherwise errors fail the test."""
        self.num_steps = 0
        self._num_idle = 0
        """Steps in which no request ran or could start."""
        self._last_id = 0

    def submit(self, prompt, source="client", output=(), **fields) -> int:
        """Submit one request; ``Submit``'s own fields and sampling's go by name."""
        self._last_id += 1
        own = {f.name for f in dataclasses.fields(Submit)}
        message = Submit(
            request_id=self._last_id,
            model="test",
            prompt_ids=pack_ids(list(prompt)),
            output_ids=pack_ids(list(output)),
            sampling=SamplingParams(
                **{name: value for name, value in fields.items() if name not in own}
            ).to_wire(),
            **{name: value for name, value in fields.items() if name in own},
        )
        self.engine.submit(source, message)
        return self._last_id

    def step(self) -> None:
        """One engine step; its messages are recorded."""
        scheduler = self.engine.scheduler
        self.num_steps += 1
        self._num_idle += not (scheduler.running or scheduler.waiting)
        for _, message in self.engine.step().messages:
            if self.failed is not None and isinstance(message, RequestFailed):
                self.failed[message.request_id] = message.text
                continue
            assert isinstance(message, StepOutput), message
            self._file(message)

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is no work."""
        while self.engine.has_work:
            # The number of idle steps until a guide is compiled depends on the machine.
            assert self.num_steps - self._num_idle < max_steps, (
                "the engine does not come to an end"
            )
            self.step()

    def _file(self, message: StepOutput) -> None:
        ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        counts = np.frombuffer(message.num_tokens, dtype=np.uint16).tolist()
        keys = zip(
            np.frombuffer(message.request_ids, dtype=np.uint64).tolist(),
            np.frombuffer(message.sequence_indices, dtype=np.uint16).tolist(),
            strict=True,
        )
        reasons = np.frombuffer(message.finish_reasons, dtype=np.uint8).tolist()
        start = 0
        for row, (key, count, reason) in enumerate(zip(keys, counts, reasons, strict=True)):
            assert key not in self.reasons, f"{key} sent output after its end"
            self.tokens[key] += ids[start : start + count]
            start += count
            if row in message.extras:
                self.extras[key].append(message.extras[row])
            if reason:
                self.reasons[key] = FinishReason(reason)

    def output(self, request_id: int, index: int = 0) -> list[int]:
        """The tokens of one sequence so far."""
        return self.tokens[request_id, index]

    def outputs(self, request_id: int) -> list[list[int]]:
        """The tokens of each of a request's sequences so far, or of its beams at the end."""
        for extras in reversed(self.extras[request_id, 0]):
            if "beams" in extras:
                return [np.frombuffer(ids, np.int32).tolist() for ids in extras["beams"]["ids"]]
        return [ids for (number, _), ids in sorted(self.tokens.items()) if number == request_id]

    def told(self, request_id: int, name: str) -> list[Any]:
        """The messages of a request under this name, over all steps."""
        return [each for extras in self.extras[request_id, 0] for each in extras.get(name, ())]

    def serve(
        self, prompts: Iterable[Any], samplings: Iterable[dict[str, Any]] = ({},)
    ) -> list[list[list[int]]]:
        """The results of all prompts under all samplings, submitted together for 12 tokens
        each.
        """
        samplings = list(samplings)
        requests = [
            self.submit(prompt, **{"max_tokens": 12, **sampling})
            for prompt in prompts
            for sampling in samplings
        ]
        self.run(max_steps=100_000)
        return [self.outputs(request) for request in requests]

    def check_idle(self) -> None:
        """Check that no state of any request is left."""
        scheduler = self.engine.scheduler
        cache = scheduler.cache
        assert not scheduler.running and not scheduler.waiting
        cache.check([])
        assert cache.num_free == cache.num_available == cache.num_blocks
        assert len(scheduler.rows.free) == scheduler.config.max_num_seqs
        assert scheduler.preemptions.num_waiting == 0
        assert not self.engine._requests and not self.engine._in_flight


class Ranks:
    """The objects that connect the ranks of a run as ``parallel`` defines; see `run`.
    Collective.
    """

    def __init__(
        self,
        world: mpi.World,
        parallel: ParallelConfig,
        device: torch.device | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """``device`` is the device of this rank; None for the CPU."""
        device = device or torch.device("cpu")
        if device.type == "cuda":
            # Like in a rank: kernels are launched on the current device.
            torch.cuda.set_device(device)
        layout = ParallelLayout(
            rank=world.rank,
            tp_size=parallel.tp_size,
            pp_size=parallel.pp_size,
            dp_size=parallel.dp_size,
            hosts=world.hosts,
        )
        self._world, self._timeout_s = world, timeout_s
        self.group = connect_group(world.subgroup(layout.tp_ranks), device, timeout_s)
        self.control = connect_control(world, timeout_s)
        shares = parallel.expert_dp_size > 1
        everyone = WorldGroup.connect(world, layout, device, timeout_s, shares_experts=shares)
        self.ties = (layout, self.control, self.group, everyone)

    def run(self, driver: Driver, drive: Callable[[Driver], Any]) -> Any:
        """The result of ``drive`` on rank 0, while the other ranks execute its steps. Ends
        the engine."""
        result = None
        if self._world.rank == 0:
            result = drive(driver)
            self.control.close()
        else:
            while (payload := self.control.receive()) is not None:
                driver.engine.follow(payload)
            self.control.close()
        self._world.barrier(self._timeout_s, "all served")
        driver.engine.shutdown()
        driver.engine.links.close()
        self.group.close()
        return result
