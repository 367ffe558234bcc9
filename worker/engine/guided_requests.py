"""Requests whose guides are being compiled."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.guided.guide import Grammar
from trimaran.worker.requests.request import Request


class Compiled(NamedTuple):
    """A request whose grammar is in place, or why its guide cannot be followed."""

    request: Request
    error: RequestError | None


class GuidedRequests:
    """Holds requests back, in no order, until their grammars are there."""

    def __init__(self, compiler: GuideCompiler | None) -> None:
        """Without a compiler every guide is refused."""
        self._compiler = compiler
        self._held: dict[Request, Future[Grammar]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: Request) -> None:
        """Compile a request's guide, and hold it meanwhile.

        Raises:
            RequestError: guides are not served, or this is none.
        """
        sampling = request.sampling
        if self._compiler is None:
            raise RequestError(
                f"guided_decoding_guide_type is {sampling.guide_type!r} but this model serves "
                "no guided decoding. Set guided_decoding_backend to xgrammar in its "
                "config.pbtxt.",
                ErrorKind.UNSUPPORTED,
            )
        self._held[request] = self._compiler.submit(sampling.guide_type, sampling.guide)

    def drop(self, request: Request) -> None:
        """Hold ``request`` no longer, if it was held: it has been ended."""
        future = self._held.pop(request, None)
        if future is not None:
            # What has not begun would keep the others waiting.
            future.cancel()

    def sleep(self, seconds: float) -> None:
        """Wait for some grammar, for there is nothing else to do."""
        wait(self._held.values(), seconds, FIRST_COMPLETED)

    def take_compiled(self) -> list[Compiled]:
        """Those that are held no longer."""
        done = [item for item in self._held.items() if item[1].done()]
        for request, _ in done:
            del self._held[request]
        return [Compiled(request, _settle(request, future)) for request, future in done]

    def close(self) -> None:
        """Compile no more."""
        if self._compiler is not None:
            self._compiler.close()


def _settle(request: Request, future: Future[Grammar]) -> RequestError | None:
    """Give the request its grammar, which its output so far must follow."""
    try:
        request.grammar = future.result()
        request.grammar.start(request.sampling.end_id, request.output_ids)
    except RequestError as error:
        return error
    return None
