"""Reports of expert loads from rank 0 to front ends, over all stages and dp ranks."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from trimaran.comm.control.control_plane import ControlPlane
from trimaran.comm.messages.messages import ExpertReport, FrameBuffer, encode
from trimaran.comm.stages.pipeline import PipelineLinks
from trimaran.worker.experts.loads import ExpertLoads

REPORT_REQUEST = b"experts"
"""Sent in place of a decision: the first rank of each stage and dp rank answers with counts."""

_PERIOD_S = 1.0
"""Shortest time between two reports of a busy engine."""

_NOTHING = ExpertReport(layers=[], counts=b"")


class ExpertReports:
    """One rank's part in the reports: rank 0 asks and adds up, other ranks answer.

    A busy engine does not wait: a later report carries the requested counts.
    """

    def __init__(
        self, loads: ExpertLoads | None, control: ControlPlane, links: PipelineLinks
    ) -> None:
        """``loads`` are those of this rank's stage; None if no layer of it has experts."""
        self._loads = loads
        self._control = control
        self._writer, self._readers = links.report_writer, links.report_readers
        self._is_requested = False
        self._next_s = 0.0

    def answer(self) -> None:
        """Send the counts to rank 0, if this rank is the one that reports."""
        loads = self._loads
        if self._writer is None:
            return
        if loads is None:
            self._writer.post(lambda: encode(_NOTHING), is_ready=True)
            return
        loads.begin()
        self._writer.post(lambda: encode(loads.finish()), is_ready=loads.is_ready())

    def report(self, *, is_idle: bool) -> ExpertReport | None:
        """The report, if one is due: the counts that were requested earlier, or if the engine
        is idle the current counts, after a wait.

        Raises:
            PeerLostError: a rank did not answer.
        """
        if self._loads is None and not self._readers:
            return None
        now = time.monotonic()
        if now < self._next_s and not is_idle:
            return None
        self._next_s = now + _PERIOD_S
        if is_idle:
            if self._is_requested:
                self._take()
            self._request()
            sums = self._take()
            if self._readers:
                self._control.mark_idle()
            return sums
        told = self._take() if self._is_requested and self._is_answered() else None
        if not self._is_requested:
            self._request()
        return told

    def _request(self) -> None:
        self._is_requested = True
        if self._loads is not None:
            self._loads.begin()
        if self._readers:
            self._control.broadcast(REPORT_REQUEST)

    def _is_answered(self) -> bool:
        is_own = self._loads is None or self._loads.is_ready()
        return is_own and all(reader.has_message() for reader in self._readers.values())

    def _take(self) -> ExpertReport:
        """The sum of all answers."""
        self._is_requested = False
        reports = [] if self._loads is None else [self._loads.finish()]
        for reader in self._readers.values():
            (report,) = FrameBuffer().feed(reader.read())
            assert isinstance(report, ExpertReport)
            reports.append(report)
        return added_up(reports)


def added_up(reports: list[ExpertReport]) -> ExpertReport:
    """The counts of all layers in the reports; counts of several dp ranks add up."""
    rows: dict[int, NDArray[np.int64]] = {}
    for report in reports:
        counts = np.frombuffer(report.counts, "<i8").reshape(max(len(report.layers), 1), -1)
        for layer, row in zip(report.layers, counts, strict=False):
            rows[layer] = rows[layer] + row if layer in rows else row
    layers = sorted(rows)
    return ExpertReport(layers=layers, counts=b"".join(rows[each].tobytes() for each in layers))
