"""A real group of ranks under mpirun, with the test as its supervisor and its front end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from waiting import started, wait_until

from trimaran.comm.env import ChildEnv
from trimaran.comm.messages.messages import (
    ChildConfig,
    ChildHello,
    ChildState,
    Command,
    EngineHello,
    FrameBuffer,
    FrontendHello,
    Message,
    StepOutput,
    Submit,
    encode,
)
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.comm.transport.sockets import Address
from trimaran.launcher.starters.run_dir import MpiSessionDirs, RunDir
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RankConfig,
    SchedulerConfig,
)

BIN = Path(sys.executable).parent
DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_models" / "base"
START_TIMEOUT_S = 180.0


class Connection:
    """One accepted connection; a thread collects its messages.

    The error of a failed wait includes the text of ``told``.
    """

    def __init__(self, sock, told: Callable[[], str]) -> None:
        self.sock = sock
        self._told = told
        self.messages: list[Message] = []
        self.is_closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        inbox = FrameBuffer()
        try:
            while data := self.sock.recv(1 << 16):
                self.messages += inbox.feed(data)
        except OSError:
            pass
        self.is_closed = True

    def send(self, message: Message) -> None:
        self.sock.sendall(encode(message))

    def of_type(self, message_type: type[Message]) -> list[Message]:
        return [m for m in list(self.messages) if isinstance(m, message_type)]

    def wait_for(self, message_type: type[Message]) -> Message:
        self.wait_until(lambda: bool(self.of_type(message_type)), message_type.__name__)
        return self.of_type(message_type)[0]

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for what messages bring; fail at once if no more can come."""

        def ended() -> str:
            return "the connection was closed" if self.is_closed else ""

        wait_until(is_done, what, ended=ended, told=self._told)

    def close(self) -> None:
        # The reader holds the socket: only a shutdown shows the loss to the peer.
        try:
            self.sock.shutdown(2)
        except OSError:
            pass
        self._thread.join()
        self.sock.close()


class RankGroup:
    """Ranks of one model. A context manager: all its processes end with the block."""

    def __init__(self, folder: Path, world_size: int, **changes: object) -> None:
        self.world_size = world_size
        self.ranks: dict[int, Connection] = {}
        self.hellos: dict[int, ChildHello] = {}
        self._engines: list[Connection] = []
        self._supervisor = Address(path=str(folder / "s.sock")).listen()
        self._frontend = Address(path=str(folder / "f.sock")).listen()
        self.config = self._rank_config(f"unix:{folder}/f.sock", **changes)
        env = ChildEnv(supervisor=f"unix:{folder}/s.sock", token="t", group="g")
        self._run_dir = RunDir()
        self._session_dirs = MpiSessionDirs(self._run_dir)
        self._session_dirs.prepare("g")
        self.log_path = folder / "ranks.log"
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
             "-n", str(world_size), str(BIN / "trimaran-rank")],
            env={
                **os.environ, **env.to_environ(), **_mpi_environment(),
                **self._session_dirs.env("g", is_here_alone=True),
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        started.append(self)
        self._acceptor = threading.Thread(target=self._accept_ranks, daemon=True)
        self._acceptor.start()

    def _rank_config(
        self,
        frontend: str,
        tp_size: int = 0,
        hang_timeout_s: float = 3.0,
        engine_dir: Path = DEMO_MODEL,
    ) -> RankConfig:
        engine = EngineConfig(
            model="demo",
            engine_dir=str(engine_dir),
            dtype="float32",
            device="cpu",
            parallel=ParallelConfig(tp_size=tp_size or self.world_size),
            scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=16),
            cache=CacheConfig(max_tokens=8192),
        )
        return RankConfig(
            engine=engine,
            group="g",
            incarnation=1,
            frontends=(frontend,),
            start_method="mpirun",
            hang_timeout_s=hang_timeout_s,
        )

    def _accept_ranks(self) -> None:
        for _ in range(self.world_size):
            connection = Connection(self._supervisor.accept()[0], self.log)
            hello = connection.wait_for(ChildHello)
            assert isinstance(hello, ChildHello)
            connection.send(ChildConfig(config=self.config.to_wire()))
            self.hellos[hello.rank] = hello
            self.ranks[hello.rank] = connection

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in self.processes():
                process.kill()
            self.process.wait()
        for connection in (*self.ranks.values(), *self._engines):
            connection.close()
        self._supervisor.close()
        self._frontend.close()
        self._log.close()
        self._session_dirs.remove()
        self._run_dir.remove()

    # ---- actions of tests ---------------------------------------------------------------

    def wait_ready(self) -> Connection:
        """Every rank is ready and rank 0 has dialled in: its connection."""
        self.wait_for_state("ready")
        return self.accept_engine()

    def wait_for_state(self, state: str, ranks: tuple[int, ...] = ()) -> None:
        wanted = ranks or tuple(range(self.world_size))

        def has_come() -> bool:
            return all(
                rank in self.ranks and any(s.state == state for s in self.states(rank))
                for rank in wanted
            )

        self.wait_until(has_come, f"state {state} of ranks {wanted}")

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for an effect of ranks; fail with their log, at once if mpirun has ended."""

        def ended() -> str:
            code = self.process.poll()
            return "" if code is None else f"mpirun ended with code {code}"

        wait_until(is_done, what, START_TIMEOUT_S, ended=ended, told=self.log)

    def states(self, rank: int) -> list[ChildState]:
        return [m for m in self.ranks[rank].of_type(ChildState) if isinstance(m, ChildState)]

    def accept_engine(self) -> Connection:
        self.wait_until(
            lambda: bool(select.select([self._frontend], [], [], 0)[0]), "rank 0 dials in"
        )
        engine = Connection(self._frontend.accept()[0], self.log)
        self._engines.append(engine)
        engine.wait_for(EngineHello)
        engine.send(FrontendHello())
        return engine

    def shut_down(self) -> int:
        """Tell all ranks to end; mpirun's exit code."""
        for connection in self.ranks.values():
            connection.send(Command(verb="shutdown"))
        return self.wait_ended(30)

    def pid(self, rank: int) -> int:
        return self.hellos[rank].pid

    def processes(self) -> list[psutil.Process]:
        """mpirun and its live descendants."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_ended(self, timeout_s: float) -> int:
        """mpirun has ended; its exit code."""
        wait_until(
            lambda: self.process.poll() is not None, "end of mpirun", timeout_s, told=self.log
        )
        return self.process.wait()

    def wait_gone(self, timeout_s: float = 20.0) -> int:
        """All ranks and mpirun have ended; mpirun's exit code."""
        pids = [hello.pid for hello in self.hellos.values()]
        code = self.wait_ended(timeout_s)
        wait_until(
            lambda: not any(psutil.pid_exists(pid) for pid in pids),
            f"end of the ranks {pids}",
            timeout_s,
            told=self.log,
        )
        return code

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")


def _mpi_environment() -> dict[str, str]:
    names = [f"{p}_ALLOW_RUN_AS_ROOT{s}" for p in ("OMPI", "PRTE") for s in ("", "_CONFIRM")]
    return {
        **dict.fromkeys(names, "1"),
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl": "^ofi",
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
    }


def submit(request_id: int, prompt: list[int], max_tokens: int) -> Submit:
    """A greedy request that runs to its length."""
    return Submit(
        request_id=request_id,
        model="demo",
        prompt_ids=pack_ids(prompt),
        sampling={"max_tokens": max_tokens},
        streaming=True,
    )


def tokens_of(engine: Connection, request_id: int) -> tuple[list[int], int]:
    """Ids so far of one request, and its finish reason (0: still running)."""
    ids: list[int] = []
    reason = 0
    for message in engine.of_type(StepOutput):
        assert isinstance(message, StepOutput)
        counts = np.frombuffer(message.num_tokens, "<u2")
        starts = np.cumsum(counts) - counts
        tokens = np.frombuffer(message.token_ids, "<i4")
        reasons = np.frombuffer(message.finish_reasons, "u1")
        for row in np.flatnonzero(np.frombuffer(message.request_ids, "<u8") == request_id):
            ids += tokens[starts[row] : starts[row] + counts[row]].tolist()
            reason = reason or int(reasons[row])
    return ids, reason


def finish(engine: Connection, request_id: int) -> tuple[list[int], int]:
    """Wait for a request's end."""
    engine.wait_until(lambda: tokens_of(engine, request_id)[1] != 0, f"end of {request_id}")
    return tokens_of(engine, request_id)
