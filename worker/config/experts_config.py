"""Configuration of expert-parallel load balancing; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.comm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Whether and how experts move between expert-parallel ranks to balance their loads."""

    rebalance_steps: int = 0
    """Steps between two rebalances (``--moe-rebalance-steps``); 0 disables them."""

    num_redundant: int = 0
    """Expert slots of a layer, over all ranks, for second copies of its busiest experts
    (``--moe-redundant-experts``)."""

    def check(
        self, num_experts: int, num_parts: int, *, is_deterministic: bool = False
    ) -> None:
        """Refuse settings without effect for this model's experts in ``num_parts`` parts.

        Raises:
            ConfigError: names the flag, its value and the remedy.
        """
        flag, other = "--moe-rebalance-steps", "--moe-redundant-experts"
        steps, redundant = self.rebalance_steps, self.num_redundant
        if not steps and not redundant:
            return
        if not steps:
            raise ConfigError(
                f"{other} is {redundant} but {flag} is 0, so that no expert would get a second "
                f"slot. Set {flag}, or leave {other} out."
            )
        if num_parts == 1 or not num_experts:
            what = (
                "all ranks have a part of every expert" if num_experts else "it has no experts"
            )
            raise ConfigError(
                f"{flag} is {steps} but none of the model's experts can move: {what}. Leave "
                f"{flag} out, or share experts out with --moe-ep-size."
            )
        if is_deterministic:
            raise ConfigError(
                f"{flag} is {steps} but --deterministic is set: the order of sums changes "
                "where experts move. Leave one of them out."
            )
        most = num_experts * (num_parts - 1)
        if redundant % num_parts or redundant > most:
            raise ConfigError(
                f"{other} is {redundant} but must be a multiple of the {num_parts} parts that "
                f"share the experts, at most {most}."
            )
