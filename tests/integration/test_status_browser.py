"""The status page in headless Chromium, before a stack of real processes: it is alive and safe."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitwave.demo_model import DemoModelOptions, Variant, build
from tests.e2e.live_stack import LiveStack, running
from tests.integration.browser import ABSENT, CHROMEDRIVER, CHROMIUM, Browser, browsing

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason=ABSENT),
]

NASTY_ID = "<img/src=x/onerror=document.title='owned'>"
"""A request id that a careless page would take for markup; ids may be any printable characters."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    slow = ("--decode-setting", "step_fixed_s=0.02")
    with running(model, tmp_path_factory.mktemp("run"), "--engine", "sim", *slow) as started:
        yield started


@pytest.fixture
def page(stack: LiveStack, tmp_path: Path) -> Iterator[Browser]:
    with browsing(tmp_path / "profile") as browser:
        browser.open(f"http://{stack.address('http')}/")
        browser.until("return document.querySelectorAll('.group tbody tr').length >= 3")
        yield browser


def ask(stack: LiveStack, request_id: str, tokens: int) -> int:
    """One completion of so many tokens."""
    body = {"model": stack.served_model, "prompt": "Hello", "max_tokens": tokens}
    host, _, port = stack.address("http").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        return response.status


def row(request_id: str) -> str:
    """JavaScript: the row of a request, by its id."""
    rows = "[...document.querySelectorAll('[data-request]')]"
    return f"{rows}.find((r) => r.dataset.request === {json.dumps(request_id)})"


def test_it_shows_pools_groups_and_ranks(page: Browser) -> None:
    assert page.run("return document.getElementById('state').textContent") == "serving"
    assert "1 of 1 group serving, 1 ranks" in str(
        page.run("return document.getElementById('prefill-title').textContent")
    )
    assert "1 of 1 group serving, 2 ranks" in str(
        page.run("return document.getElementById('decode-title').textContent")
    )
    text = str(page.run("return document.getElementById('decode').innerText"))
    assert "decode_cpu_eager" in text
    assert "eager" in text
    assert page.run("return document.getElementById('banner').hidden") is True


def test_live_values_change_while_a_request_runs(stack: LiveStack, page: Browser) -> None:
    asking = threading.Thread(target=ask, args=(stack, "watched", 300))
    asking.start()
    try:
        tokens = f"return Number(({row('watched')}?.cells[3].textContent || '0').replace(',', ''))"
        first = page.until(tokens, 20.0)
        later = page.until(f"{tokens} > {first}", 10.0)
        assert later is True
        meters = "[...document.querySelectorAll('#decode [role=meter]')]"
        held = f"return {meters}.some((meter) => meter.ariaValueNow > 0)"
        assert page.until(held, 5.0) is True
        rates = page.until(
            "return document.querySelector('#decode .kind').textContent.match(/eager ([1-9]\\d*)/)"
        )
        assert rates
    finally:
        asking.join(60.0)
    ended = page.until(f"return {row('watched')}?.cells[1].textContent === 'finished'", 10.0)
    assert ended is True
    words = page.run(f"return {row('watched')}.querySelector('[role=img]').ariaLabel")
    assert [x for x in ("prefill", "handoff", "decode", "wait") if x not in str(words)] == []


def test_what_clients_chose_is_text_and_never_markup(stack: LiveStack, page: Browser) -> None:
    assert ask(stack, NASTY_ID, 3) == 200

    page.until(f"return {row(NASTY_ID)}?.cells[0].textContent === {json.dumps(NASTY_ID)}")

    assert page.run("return document.images.length") == 0
    assert "owned" not in str(page.run("return document.title"))


def test_it_pauses_and_goes_on(stack: LiveStack, page: Browser) -> None:
    page.run("document.getElementById('pause').click()")
    page.until("return document.getElementById('age').textContent === 'paused'")
    assert ask(stack, "unseen", 3) == 200
    assert page.run(f"return !{row('unseen')}") is True
    page.run("document.getElementById('pause').click()")
    assert page.until(f"return !!{row('unseen')}") is True


def test_it_can_be_read_without_eyes_and_on_a_phone(page: Browser) -> None:
    nameless = """
        return [...document.querySelectorAll('[role=meter], [role=img], button, table')]
          .filter((x) => !(x.ariaLabel || x.textContent.trim() || x.caption)).length"""
    assert page.run(nameless) == 0
    assert page.run("return document.documentElement.lang") == "en"
    path = f"/session/{page.session_id}/window/rect"
    page.command("POST", path, {"width": 500, "height": 900})
    assert page.run("return document.documentElement.scrollWidth <= innerWidth") is True


def test_it_says_when_the_router_is_gone(tmp_path: Path, stack: LiveStack) -> None:
    with browsing(tmp_path / "profile") as browser:
        browser.open(f"http://{stack.address('http')}/")
        browser.until("return document.getElementById('state').textContent === 'serving'")
        browser.run("window.fetch = () => Promise.reject(new Error('gone'))")
        said = browser.until(
            "const banner = document.getElementById('banner');"
            " return !banner.hidden && banner.textContent"
        )
    assert "does not answer" in str(said)
