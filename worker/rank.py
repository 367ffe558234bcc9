"""One rank of a worker group, from its start to an orderly end or a reported failure."""

from __future__ import annotations

from trimaran.comm import mpi  # isort: skip  # initialises MPI: nothing that can fail comes first

import faulthandler
import gc
import logging
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any

from trimaran.comm.deadlines import StepTimeouts, Watchdog
from trimaran.comm.env import LOG_PIPE, SUPERVISOR, ChildEnv
from trimaran.comm.errors import ConfigError
from trimaran.comm.log import join_log, setup_logging
from trimaran.comm.messages.messages import EngineHello
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.worker.config.engine_config import ParallelConfig, RankConfig
from trimaran.worker.serving.rank_process import GarbageCollection, StartTimes, pin_near

if TYPE_CHECKING:
    import torch

    from trimaran.comm.collectives.tensor_group import TensorParallelGroup
    from trimaran.comm.control.control_plane import ControlPlane
    from trimaran.comm.stages.world_group import WorldGroup
    from trimaran.comm.topology import ParallelLayout
    from trimaran.worker.engine.engine import Engine

logger = logging.getLogger(__name__)

FINALIZE_TIMEOUT_S = 10.0
NEVER_S = 1e6
"""Seconds used without a hang timeout: 11 days, near the longest timeout of a socket."""
PING_SHARE = 1.5
"""Multiple of the hang timeout after which the supervisor gives up an unreachable rank."""
CONFIG_ERROR_CODE = 2
FAILURE_CODE = 1


class RankProcess:
    """The parts of this process, in the order of their start.

    Any error ends in `fail`, which reports to the supervisor and aborts every rank, because a
    group with a missing rank would hang.
    """

    def __init__(self) -> None:
        self._link: SupervisorLink | None = None
        self._watchdog: Watchdog | None = None
        self._control: ControlPlane | None = None
        self._group: TensorParallelGroup | None = None
        self._hang_timeout_s = NEVER_S
        self._device = ""
        self._times = StartTimes()

    def run(self) -> None:
        """Start, load, serve and end. Returns after MPI is finalised."""
        env = ChildEnv.from_environ(mpi.job_environ(os.environ))
        # Leads to the interface on which this rank listens; in a job only rank 0 has it.
        os.environ[SUPERVISOR] = env.supervisor
        rank, size = mpi.MPI.COMM_WORLD.Get_rank(), mpi.MPI.COMM_WORLD.Get_size()
        setup_logging(
            "rank",
            rank=rank,
            group=env.group,
            log_format=env.log_format,
            level=env.log_level,
            directory=env.log_dir,
        )
        self._times.end("interpreter and MPI")
        self._link, wire = SupervisorLink.connect(env, "rank", rank, size)
        config = RankConfig.from_wire(wire)
        self._hang_timeout_s = min(config.hang_timeout_s or NEVER_S, NEVER_S)
        self._link.expect_pings(PING_SHARE * self._hang_timeout_s)
        self._watchdog = Watchdog(self._hang_timeout_s, self._abort_hung)
        self._watchdog.watch(lambda: "starting up", config.start_timeout_s)
        world = mpi.World.discover()
        mpi.require_threads()
        if config.participants:
            is_idle = world.rank not in config.participants
            mine = (world.rank,) if is_idle else config.participants
            world = world.subgroup(mine, is_apart=True)
            if is_idle:
                self._idle()
                return
        engine, topology = self._load(world, config)
        self._watchdog.watch(lambda: "waiting for the other ranks", config.start_timeout_s)
        world.barrier(config.start_timeout_s, "model loaded")
        self._watchdog.pause()
        self._serve(engine, topology, config, env)
        self._end(engine)

    def fail(self, error: BaseException) -> None:
        """Log and report the error, then abort all ranks."""
        is_config_error = isinstance(error, ConfigError)
        if is_config_error:
            text = str(error)
            logger.error("%s", text)
        else:
            text = f"{type(error).__name__}: {error}"
            logger.critical("rank fails%s", self._last_step(), exc_info=error)
        self._report_failure(text, is_config_error)
        code = CONFIG_ERROR_CODE if is_config_error else FAILURE_CODE
        if self._link is None and mpi.MPI.COMM_WORLD.Get_size() == 1:
            sys.exit(code)
        mpi.abort(code)

    # ---- stages of the process ----------------------------------------------------------

    def _load(self, world: mpi.World, config: RankConfig) -> tuple[Engine, ParallelLayout]:
        """Load everything up to a warm engine. Collective."""
        link = self._require_link()
        link.state("loading", "connecting the ranks")
        # torch is imported late, after MPI and the supervisor are connected. Its objects stay,
        # so the garbage collector, which would take a quarter of the import's time, is off.
        with GarbageCollection():
            import torch

            from trimaran.comm.control.control_plane import connect_control
            from trimaran.comm.control.pause_notices import PauseNotices
            from trimaran.comm.time_limit import pauses
            from trimaran.worker.engine.engine import Engine
            from trimaran.worker.execution.device import select_device

            gc.freeze()
        torch.set_num_threads(config.engine.num_threads)
        topology = _topology(world, config.engine.parallel)
        self._times.end("torch")
        device = select_device(config.engine, topology)
        self._device = str(device)
        if device.type == "cuda":
            # Kernels are launched on the current device, whichever device holds their tensors.
            torch.cuda.set_device(device)
            pin_near(device)
        self._control = connect_control(world, self._hang_timeout_s)
        self._group, ranks = self._connect(world, config, topology, device)
        link.state("loading", f"loading the model on {device}")
        self._times.end("connections")
        engine = Engine.load(config, topology, self._control, self._group, ranks)
        self._times.end("engine")
        if device.type == "cuda":
            notices = PauseNotices.connect(world)
            if notices is not None:
                pauses.connect(notices.state)
            engine.compilations.watch(self._watchdog, config.start_timeout_s, notices)
        waits = StepTimeouts.of(topology, self._hang_timeout_s)
        self._group.timeout_s = waits.tensor_s
        engine.links.set_timeouts(waits)
        return engine, topology

    def _connect(
        self,
        world: mpi.World,
        config: RankConfig,
        topology: ParallelLayout,
        device: torch.device,
    ) -> tuple[TensorParallelGroup, WorldGroup]:
        """This rank's tensor group, and all ranks of the engine. Collective."""
        from trimaran.comm.collectives.connect import connect_group
        from trimaran.comm.stages.world_group import WorldGroup

        timeout_s = config.start_timeout_s
        group = connect_group(world.subgroup(topology.tp_ranks), device, timeout_s)
        shares_experts = config.engine.parallel.expert_dp_size > 1
        ranks = WorldGroup.connect(
            world,
            topology,
            device,
            timeout_s,
            shares_experts=shares_experts,
            on_failure=self.fail,
        )
        return group, ranks

    def _serve(
        self, engine: Engine, topology: ParallelLayout, config: RankConfig, env: ChildEnv
    ) -> None:
        """Report ready and run this rank's loop until shutdown."""
        from trimaran.worker.serving.frontend_link import FrontendLinks
        from trimaran.worker.serving.serve_loop import LeaderLoop, follow

        link, watchdog, control = self._require_link(), self._watchdog, self._control
        assert watchdog is not None and control is not None
        if not topology.is_leader:
            link.state("ready", facts={"device": self._device})
            follow(engine, control, watchdog)
            return
        facts = self._facts(engine, config)
        logger.info("warm: %s", ", ".join(f"{name}={facts[name]}" for name in sorted(facts)))
        hello = EngineHello(
            token=env.token,
            model=config.engine.model,
            group=config.group,
            incarnation=config.incarnation,
            facts=facts,
        )
        links = FrontendLinks(config.frontends, hello, link.fileno())
        link.state("ready", facts={**facts, "device": self._device})
        self._times.end("other ranks")
        logger.info("ready after %s", self._times)
        loop = LeaderLoop(engine, links, control, link, watchdog, config.stats_period_ms)
        loop.run()
        links.close()

    def _idle(self) -> None:
        """Hold a place in the job that runs no engine, until shutdown."""
        link = self._require_link()
        assert self._watchdog is not None
        self._watchdog.pause()
        link.state("ready", facts={"device": "none"})
        while all(command.verb != "shutdown" for command in link.commands()):
            select.select([link.fileno()], [], [])
        self._leave()

    def _end(self, engine: Engine) -> None:
        """Shut down in order: first the followers' loops, last the supervisor's connection."""
        watchdog = self._watchdog
        assert watchdog is not None and self._control is not None and self._group is not None
        watchdog.watch(lambda: "shutting down", FINALIZE_TIMEOUT_S)
        self._control.close()
        engine.shutdown()
        engine.links.close()
        self._group.close()
        self._leave()

    def _leave(self) -> None:
        """Leave MPI with the other ranks of the job, then the supervisor."""
        link, watchdog = self._require_link(), self._watchdog
        assert watchdog is not None
        watchdog.watch(lambda: "leaving MPI", FINALIZE_TIMEOUT_S)
        is_spawned = mpi.is_spawned()
        if is_spawned:
            # MPI_Finalize would wait for the orchestrator, which goes on running.
            mpi.World.discover().barrier(FINALIZE_TIMEOUT_S, "end")
        else:
            mpi.finalize()
        watchdog.stop()
        link.close()
        if is_spawned:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    # ---- helpers ------------------------------------------------------------------------

    def _require_link(self) -> SupervisorLink:
        assert self._link is not None
        return self._link

    def _facts(self, engine: Engine, config: RankConfig) -> dict[str, Any]:
        """Facts about this group for the front ends and the metrics."""
        assert self._control is not None and self._group is not None
        facts = dict(engine.facts())
        facts["transports"] = {
            **self._group.transports(),
            **engine.links.transports(),
            "control": self._control.transport,
        }
        facts["start_method"] = config.start_method
        facts["mpi"] = mpi.library_version()
        return facts

    def _last_step(self) -> str:
        if self._control is None or not self._control.last_decision:
            return ""
        from trimaran.worker.serving.serve_loop import describe_decision

        return f" after {describe_decision(self._control.last_decision)}"

    def _report_failure(self, text: str, is_config_error: bool) -> None:
        if self._link is not None:
            self._link.state("failed", text, is_config_error=is_config_error)

    def _abort_hung(self) -> None:
        """Called by the watchdog's thread, which has logged the main thread's stack."""
        self._report_failure("a step or the start took too long; the log has the stacks", False)
        mpi.abort(FAILURE_CODE)


def _topology(world: mpi.World, parallel: ParallelConfig) -> ParallelLayout:
    """The layout as seen from this rank; rank 0 warns of tensor groups that span hosts."""
    from trimaran.comm.topology import ParallelLayout

    topology = ParallelLayout(
        rank=world.rank,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        dp_size=parallel.dp_size,
        hosts=world.hosts,
    )
    if topology.is_leader and topology.split_tensor_groups:
        logger.warning(
            "tensor groups of ranks %s span hosts: every layer waits for the network. Give "
            "each host a multiple of tp_size (%d) ranks, or share the layers out by "
            "--pp-size instead",
            topology.split_tensor_groups,
            topology.tp_size,
        )
    return topology


def main() -> None:
    """Entry of ``trimaran-rank``, which mpirun or srun starts for the supervisor."""
    # The supervisor drains first and then ends this process; a signal to the job must not.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if LOG_PIPE in os.environ:
        join_log(os.environ[LOG_PIPE])
    faulthandler.enable()
    mpi.die_with_parent()
    process = RankProcess()
    try:
        process.run()
    except BaseException as error:
        process.fail(error)
    sys.exit(0)


if __name__ == "__main__":
    main()
