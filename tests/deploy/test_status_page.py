"""The operator's page in a real Chromium and in a text browser, on a server under load."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser
from served import Served

BODY = {"text_input": "It was", "max_tokens": 300, "bad_words": "", "stop_words": ""}
ROWS = "document.querySelectorAll('#{} tr').length - 1"
CELL = "document.querySelector('#{} tr:nth-child({}) td:nth-child({})').innerText"


@pytest.fixture(scope="module")
def server(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """The demo model on two ranks with four clients that never stop asking."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with Served(make_repository(demo_engine(2)), world_size=2, log_path=log) as server:
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                server.post("/v2/models/ensemble/generate", BODY)

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        yield server
        done.set()
        for client in clients:
            client.join()


def in_browser(program: str, server: Served, look: Callable[[Browser], object]) -> None:
    """Open the page in the browser."""

    async def run() -> None:
        async with Browser(program) as browser:
            await browser.open(f"http://127.0.0.1:{server.metrics_port}/")
            await look(browser)  # type: ignore[misc]

    asyncio.run(run())


def test_the_status_page_updates_in_chromium(chromium: str, server: Served, tmp_path: Path):
    async def look(browser: Browser) -> None:
        assert await browser.evaluate("document.title") == "triton: ready"
        assert await browser.evaluate(ROWS.format("models")) == 5
        assert await browser.evaluate(ROWS.format("groups")) >= 1
        assert await browser.evaluate(ROWS.format("engines")) == 1
        # Numbers change without a reload: the rate of tokens, and the step counter.
        await browser.evaluate("window.isTheSamePage = true")
        steps = await browser.evaluate(CELL.format("engines", 2, 8))
        await browser.until(f"{CELL.format('engines', 2, 8)} !== '{steps}'")
        await browser.until(
            "[...document.querySelectorAll('#models tr')].some(row => "
            "row.innerText.includes('tensorrt_llm v') && +row.children[4].innerText > 0)"
        )
        # The last ten minutes are drawn: a strip of tokens/s with a second reading.
        await browser.until(
            "document.querySelector('#history svg path')?.getAttribute('d').includes('L')"
        )
        assert await browser.evaluate("document.querySelectorAll('#history svg').length") == 4
        assert await browser.evaluate("window.isTheSamePage")
        assert await browser.evaluate("!document.getElementById('stale').innerText")
        # No resource came from another host.
        hosts = await browser.evaluate(
            "[...new Set(performance.getEntriesByType('resource')"
            ".map(entry => new URL(entry.name).host))]"
        )
        assert hosts == [f"127.0.0.1:{server.metrics_port}"]
        picture = Path(os.environ.get("STATUS_SCREENSHOT") or tmp_path / "page.png")
        await browser.screenshot(picture)
        assert picture.read_bytes().startswith(b"\x89PNG")

    in_browser(chromium, server, look)


def test_the_status_page_shows_when_the_server_stops_answering(
    chromium: str,
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path: Path,
):
    repository = make_repository(demo_engine(1))
    with Served(repository, world_size=1, log_path=tmp_path / "serve.log") as server:

        async def look(browser: Browser) -> None:
            server.kill()
            await browser.until(
                "document.getElementById('stale').innerText.startsWith('no answer')"
            )

        in_browser(chromium, server, look)


def test_the_status_page_is_readable_in_a_text_browser(text_browser: str, server: Served):
    done = subprocess.run(
        [text_browser, "-dump", "-cols", "160", f"http://127.0.0.1:{server.metrics_port}/"],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert shutil.which(text_browser)
    for words in ("triton", "requests running", "tensorrt_llm", "KV cache", "Groups", "ready"):
        assert words in done.stdout
    assert "no answer from the server" not in done.stdout
