"""What the openai package sees in one session, and what must be true of it on any stack."""

import json
import subprocess
from pathlib import Path
from typing import Any  # JSON

from tests.clients.environments import client

SESSION = Path(__file__).with_name("openai_session.py")
STREAMS = 32
TIMEOUT_S = 300.0


def openai_session(address: str, model: str, streams: int = STREAMS) -> dict[str, Any]:
    """Run the session, with so many streams at once, against the API at host:port."""
    python, api = str(client("openai") / "python"), f"http://{address}/v1"
    done = subprocess.run(
        [python, str(SESSION), api, model, str(streams)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def check_texts(told: dict[str, Any], model: str) -> None:
    """Streams and choices say what the whole says, and each ends once."""
    texts, chats = told["texts"], told["chats"]
    assert model in told["models"]
    assert texts["streamed"] == texts["whole"]
    assert texts["several"] == [texts["whole"]] * 3
    assert [reason for reason in texts["finish_reasons"] if reason] == ["length"]
    assert texts["usage"][1] == texts["stream_usage"] == 24
    assert chats["streamed"] == [chats["whole"]] * 2
    assert chats["roles"] == ["assistant"] * 2
    assert chats["stopped"] == chats["whole"][: chats["whole"].index(chats["stop"])]
    assert chats["stopped_by"] == "stop"
    assert chats["logprobs"] == 16
    assert all(told["many"]["lengths"])
