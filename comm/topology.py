"""The parallel layout of a group: axis sizes, coordinates of a rank, and its peer groups."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.comm.errors import ConfigError

MAX_RANKS = 4096
"""Most ranks of a server: supervisor and rank 0 have a connection to each."""


@dataclass(frozen=True, slots=True)
class Coord:
    """Position on every parallel axis."""

    pp: int
    tp: int
    dp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes as seen from one rank.

    Ranks of one tensor group are neighbours, and so are the ranks of one data-parallel rank:
    rank = (dp * pp_size + pp) * tp_size + tp.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    """Data-parallel ranks: copies of the attention layers, each with its own requests."""

    hosts: tuple[str, ...] = ()
    """Host of every rank; empty means that all ranks share a host."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside a world of {self.world_size}")
        if self.hosts and len(self.hosts) != self.world_size:
            raise ConfigError(
                f"{len(self.hosts)} rank(s) were started but tp_size {self.tp_size} times "
                f"pp_size {self.pp_size} times dp_size {self.dp_size} needs {self.world_size}. "
                f"Start {self.world_size} ranks (--world-size), or build the engine for the "
                "number you have."
            )

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.num_ranks_per_dp * self.dp_size

    @property
    def num_ranks_per_dp(self) -> int:
        """Ranks of one data-parallel rank."""
        return self.tp_size * self.pp_size

    @property
    def coord(self) -> Coord:
        """Position of this rank."""
        return self.coord_of(self.rank)

    @property
    def tp_rank(self) -> int:
        """Position on the tensor axis."""
        return self.coord.tp

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.coord.pp

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank."""
        return self.coord.dp

    @property
    def is_leader(self) -> bool:
        """Whether this rank schedules and serves the front ends."""
        return self.rank == 0

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's tensor group, in order."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.tp_size))

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's pipeline, first stage first."""
        first = self.dp_rank * self.num_ranks_per_dp
        return tuple(range(first + self.tp_rank, first + self.num_ranks_per_dp, self.tp_size))

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks that hold this rank's layers in every data-parallel rank, in their
        order."""
        first = self.pp_rank * self.tp_size
        return tuple(
            dp_rank + first + tp
            for dp_rank in range(0, self.world_size, self.num_ranks_per_dp)
            for tp in range(self.tp_size)
        )

    def output_rank_of(self, dp_rank: int) -> int:
        """The rank that sends a dp rank's tokens to rank 0: the first of its last stage."""
        return (dp_rank + 1) * self.num_ranks_per_dp - self.tp_size

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host, in order."""
        if not self.hosts:
            return tuple(range(self.world_size))
        here = self.hosts[self.rank]
        return tuple(r for r, host in enumerate(self.hosts) if host == here)

    @property
    def local_rank(self) -> int:
        """Position among the ranks of the same host; picks the GPU."""
        return self.local_ranks.index(self.rank)

    @property
    def num_hosts(self) -> int:
        """Hosts that the group spans."""
        return len(set(self.hosts)) if self.hosts else 1

    @property
    def split_tensor_groups(self) -> list[tuple[int, ...]]:
        """Tensor groups with ranks on several hosts, where every layer waits for a network."""
        groups = [
            tuple(range(first, first + self.tp_size))
            for first in range(0, self.world_size, self.tp_size)
        ]
        hosts = self.hosts or ("",) * self.world_size
        return [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1]

    def coord_of(self, rank: int) -> Coord:
        """Position of any rank."""
        stage, tp = divmod(rank, self.tp_size)
        dp, pp = divmod(stage, self.pp_size)
        return Coord(pp=pp, tp=tp, dp=dp)
