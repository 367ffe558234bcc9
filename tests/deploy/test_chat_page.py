"""The chat page in a real Chromium, on a server with the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser
from served import Served

from trimaran.bench.serving.free_ports import free_ports

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
QUESTION = "It was <b>the best</b> of times"
LAST = "[...document.querySelectorAll('article.{}')].at(-1)?.querySelector('.{}')?.innerText"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def address(
    demo_engine: Callable[[int], Path],
    make_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Served, str]]:
    """A server, and the URL of the page."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "template.jinja").write_text(TEMPLATE)
    (port,) = free_ports(1)
    flags = ("--openai-port", str(port), "--chat-template", str(folder / "template.jinja"))
    with Served(
        make_repository(demo_engine(1)), flags=flags, log_path=folder / "log"
    ) as server:
        yield server, f"http://127.0.0.1:{port}/chat"


async def press(browser: Browser, key: str, code: int, text: str = "") -> None:
    """Press and release one key."""
    named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
    written = {"text": text} if text else {}
    await browser.send("Input.dispatchKeyEvent", type="keyDown", **named, **written)
    await browser.send("Input.dispatchKeyEvent", type="keyUp", **named)


async def ask(browser: Browser, text: str) -> None:
    """Type a message and press Enter."""
    await browser.until("document.querySelector('#model').value === 'ensemble'")
    await browser.send("Input.insertText", text=text)
    await press(browser, "Enter", 13, "\r")


async def set_number(browser: Browser, name: str, value: int) -> None:
    await browser.evaluate(f"document.querySelector('[name={name}]').value = {value}")


async def by_keyboard(browser: Browser) -> None:
    """Ask, stop, change a setting, ask again, in the light and in the dark."""
    await set_number(browser, "temperature", 0)
    await set_number(browser, "max_tokens", 100_000)
    await ask(browser, QUESTION)
    await browser.until(f"{LAST.format('assistant', 'text')}?.length > 40")
    # The text came in parts: the answer has not ended.
    assert not await browser.evaluate("document.querySelector('#stop').hidden")
    await press(browser, "Escape", 27)
    await browser.until(f"{LAST.format('assistant', 'facts')}?.includes('stopped')")
    assert await browser.evaluate("document.querySelector('#stop').hidden")

    await set_number(browser, "max_tokens", 12)
    await ask(browser, "The sea was")
    await browser.until(f"{LAST.format('assistant', 'facts')}?.startsWith('12 tokens')")
    facts = await browser.evaluate(LAST.format("assistant", "facts"))
    assert "cut at the token limit" in facts
    assert await browser.evaluate("document.querySelectorAll('article.user').length") == 2


def in_browser(
    program: str, address: str, look: Callable[[Browser], object], width: int = 1000
) -> None:
    async def run() -> None:
        async with Browser(program, width=width, height=760) as browser:
            await browser.open(address)
            await look(browser)  # type: ignore[misc]

    asyncio.run(run())


def test_a_chat_is_held_by_keyboard_alone(
    chromium: str, address: tuple[Served, str], tmp_path: Path
):
    server, url = address

    async def look(browser: Browser) -> None:
        await by_keyboard(browser)
        # What a user or a model writes is text.
        assert await browser.evaluate("document.querySelectorAll('article b').length") == 0
        assert await browser.evaluate(LAST.format("user", "text")) == "The sea was"
        hosts = await browser.evaluate(
            "[...new Set(performance.getEntriesByType('resource')"
            ".map(entry => new URL(entry.name).host))]"
        )
        assert hosts == [url.split("/")[2]]
        picture = Path(os.environ.get("CHAT_SCREENSHOT") or tmp_path / "chat.png")
        await browser.screenshot(picture)
        assert picture.read_bytes().startswith(b"\x89PNG")

    in_browser(chromium, url, look)
    # The stopped answer ended at the server too.
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.metrics_port}/status.json"
    ) as answer:
        assert json.load(answer)["server"]["running_requests"] == 0


def num_cancelled(server: Served) -> float:
    name = "nv_inference_request_failure"
    return server.metric(name, model="ensemble", reason="CANCELED")


async def click(browser: Browser, selector: str) -> None:
    """Press and release the mouse on the middle of an element."""
    box = await browser.evaluate(
        f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
        f"(document.querySelector('{selector}').getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        await browser.send(
            "Input.dispatchMouseEvent",
            type=kind, x=box[0], y=box[1], button="left", clickCount=1,
        )  # fmt: skip


def test_the_stop_button_ends_a_long_answer_at_the_server(
    chromium: str, address: tuple[Served, str]
):
    server, url = address

    async def look(browser: Browser) -> None:
        await set_number(browser, "max_tokens", 100_000)
        cancelled = num_cancelled(server)
        await ask(browser, QUESTION)
        await browser.until(f"{LAST.format('assistant', 'text')}?.length > 0")
        await click(browser, "#stop")
        await browser.until(f"{LAST.format('assistant', 'facts')}?.includes('stopped')")
        # The answer did not run on to its last token.
        while num_cancelled(server) == cancelled:
            await asyncio.sleep(0.02)
        # The page takes the next message at once.
        await set_number(browser, "max_tokens", 3)
        await ask(browser, "The sea was")
        await browser.until(f"{LAST.format('assistant', 'facts')}?.startsWith('3 tokens')")

    in_browser(chromium, url, look)


def test_the_page_follows_the_colors_of_the_system(chromium: str, address: tuple[Served, str]):
    async def look(browser: Browser) -> None:
        colors = set()
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            await browser.send("Emulation.setEmulatedMedia", features=[feature])
            colors.add(await browser.evaluate(BACKGROUND))
        assert len(colors) == 2

    in_browser(chromium, address[1], look)


def test_the_page_fits_a_telephone(chromium: str, address: tuple[Served, str]):
    async def look(browser: Browser) -> None:
        size = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
        await browser.send("Emulation.setDeviceMetricsOverride", **size)
        await set_number(browser, "max_tokens", 5)
        await ask(browser, "x" * 200)
        await browser.until(f"{LAST.format('assistant', 'facts')}?.startsWith('5 tokens')")
        assert await browser.evaluate("document.documentElement.scrollWidth") == 360

    in_browser(chromium, address[1], look)


def test_a_refused_request_is_shown_with_its_reason(chromium: str, address: tuple[Served, str]):
    async def look(browser: Browser) -> None:
        await set_number(browser, "temperature", 3)
        await ask(browser, "It was")
        await browser.until(f"{LAST.format('error', 'text')}?.includes('between 0 and 2')")
        # The message is back in its field.
        await set_number(browser, "temperature", 0)
        await set_number(browser, "max_tokens", 3)
        await press(browser, "Enter", 13, "\r")
        await browser.until(f"{LAST.format('assistant', 'facts')}?.startsWith('3 tokens')")

    in_browser(chromium, address[1], look)
