"""Priorities and queue limits of a request: ``dynamic_batching`` settings."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy

from trimaran.comm.errors import ConfigError
from trimaran.server.inference.request import InferRequest


def check_queue(path: Path, config: ModelConfig) -> None:
    """Refuse priority levels that no request can have.

    Raises:
        ConfigError: names the file, the field, its value and the valid levels.
    """
    batching = config.dynamic_batching
    num_levels = int(batching.priority_levels)
    named = [("priority_queue_policy", int(key)) for key in batching.priority_queue_policy]
    if num_levels or batching.default_priority_level:
        named.append(("default_priority_level", int(batching.default_priority_level)))
    for field, level in named:
        if not 1 <= level <= num_levels:
            raise ConfigError(
                f"{path}: {field} of dynamic_batching names level {level} but priority_levels "
                f"is {num_levels}. Name one of 1 to {num_levels}, or set priority_levels."
            )


class QueuePolicy:
    """The ``dynamic_batching`` settings of a model, as applied to one request."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.dynamic_batching
        self._num_levels = int(batching.priority_levels)
        self._default_level = int(batching.default_priority_level)
        self._policies = dict(batching.priority_queue_policy)
        self._default_policy = batching.default_queue_policy
        policies = (self._default_policy, *self._policies.values())
        delay = ModelQueuePolicy.TimeoutAction.DELAY
        self._has_timeout = any(
            policy.timeout_action != delay and policy.default_timeout_microseconds
            for policy in policies
        )

    def level(self, request: InferRequest) -> int:
        """1 is the most urgent; 0 if the model has no levels."""
        if 1 <= request.priority <= self._num_levels:
            return request.priority
        return self._default_level if self._num_levels else 0

    def priority(self, request: InferRequest) -> int:
        """The engine's form of the level: higher runs first."""
        return -self.level(request)

    @property
    def queue_sizes(self) -> tuple[int, ...]:
        """Requests that may wait at each level, level 1 first; 0 means no limit. A level
        without its own policy has the default policy. Empty if the model has no levels.
        """
        return tuple(self.max_queue_size(level + 1) for level in range(self._num_levels))

    def max_queue_size(self, level: int) -> int:
        """Requests that may wait at a level; 0 means no limit."""
        return int(self._policies.get(level, self._default_policy).max_queue_size)

    def timeout_s(self, request: InferRequest) -> float:
        """The longest wait for the first token; 0 means no limit.

        A client may shorten the model's own limit where the model allows that.
        """
        if not self._has_timeout:
            return 0.0
        policy = self._policies.get(self.level(request), self._default_policy)
        if policy.timeout_action == ModelQueuePolicy.TimeoutAction.DELAY:
            return 0.0
        timeout_us = int(policy.default_timeout_microseconds)
        if policy.allow_timeout_override and 0 < request.timeout_us < timeout_us:
            timeout_us = request.timeout_us
        return timeout_us / 1e6
