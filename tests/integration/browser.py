"""Headless Chromium through chromedriver, by plain WebDriver over HTTP (W3C WebDriver, level 2)."""

import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
ABSENT = "NOT RUN: no Chromium here; apt-get install chromium chromium-driver"

START_S = 20.0
COMMAND_S = 30.0


@dataclass(slots=True)
class Browser:
    """One session with one window."""

    port: int
    session_id: str = ""

    def command(self, method: str, path: str, body: object = None) -> object:
        """Send a command; return its value. AssertionError with what the driver says otherwise."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=COMMAND_S)
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        value = json.loads(response.read())["value"]
        connection.close()
        assert response.status == 200, value
        return value

    def start(self, options: dict[str, object]) -> None:
        """Open the window."""
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        value = self.command("POST", "/session", wanted)
        assert isinstance(value, dict)
        self.session_id = value["sessionId"]

    def open(self, url: str) -> None:
        """Go to a page and wait for its load event."""
        self.command("POST", f"/session/{self.session_id}/url", {"url": url})

    def run(self, script: str) -> object:
        """Run the body of a function in the page; its result is JSON."""
        body = {"script": script, "args": []}
        return self.command("POST", f"/session/{self.session_id}/execute/sync", body)

    def until(self, script: str, within_s: float = 10.0) -> object:
        """Run a script until what it returns is true to JavaScript's mind; return that."""
        deadline_s = time.monotonic() + within_s
        while True:
            value = self.run(script)
            if value:
                return value
            assert time.monotonic() < deadline_s, f"never true: {script}"
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """Write the window as PNG."""
        value = self.command("GET", f"/session/{self.session_id}/screenshot")
        path.write_bytes(base64.b64decode(str(value)))

    def quit(self) -> None:
        """Close the window, and with it the browser."""
        if self.session_id:
            self.command("DELETE", f"/session/{self.session_id}")


@contextlib.contextmanager
def browsing(profile: Path, *flags: str, size: str = "1360,1000") -> Iterator[Browser]:
    """A browser with a new profile in an empty directory; nothing of it is left afterwards."""
    driver = subprocess.Popen(
        [str(CHROMEDRIVER), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    browser: Browser | None = None
    try:
        browser = Browser(_port(driver))
        own = (f"--window-size={size}", f"--user-data-dir={profile}")
        browser.start({"binary": CHROMIUM, "args": [*_FLAGS, *own, *flags]})
        yield browser
    finally:
        if browser is not None:
            with contextlib.suppress(OSError, AssertionError):
                browser.quit()
        driver.terminate()
        driver.wait(10.0)
        assert driver.stdout is not None
        driver.stdout.close()


_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _port(driver: subprocess.Popen[str]) -> int:
    """The port that chromedriver says it has taken."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip(".\n ").rsplit(" ", 1)[1])
    raise AssertionError("chromedriver ended before it listened")
