"""A real Chromium without a window, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0


class Browser:
    """One page of one browser. Use as an asynchronous context manager."""

    def __init__(self, program: str, width: int = 1280, height: int = 900) -> None:
        self._program = program
        self._size = (width, height)
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        self._ids = itertools.count(1)

    async def __aenter__(self) -> Browser:
        width, height = self._size
        self._process = subprocess.Popen(
            [
                self._program, "--headless=new", "--no-sandbox", "--disable-gpu",
                "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                "--disable-background-networking", "--remote-debugging-port=0",
                f"--window-size={width},{height}", f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(await self._page_url(), max_msg_size=0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.send("Browser.close")
        await self._socket.close()
        await self._session.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Helpers of the browser may write for a moment longer.
        self._profile._ignore_cleanup_errors = True  # type: ignore[attr-defined]
        self._profile.cleanup()

    async def open(self, url: str) -> None:
        """Load a page to its end."""
        await self.send("Page.navigate", url=url)
        await self.until(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not await self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            await asyncio.sleep(0.1)

    async def screenshot(self, path: Path) -> None:
        """Write a screenshot as PNG."""
        answer = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive(ANSWER_TIMEOUT_S)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return {}
            answer = json.loads(message.data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def _page_url(self) -> str:
        port_file = Path(self._profile.name, "DevToolsActivePort")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (port_file.exists() and port_file.read_text().strip()):
            assert self._process.poll() is None, f"{self._program} ended at once"
            assert time.monotonic() < deadline, f"{self._program} did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        while True:
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                pages = [p for p in await reply.json() if p["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
