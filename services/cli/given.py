"""What users give on a command line: addresses, times and token ids, checked as they are read."""

import argparse

import grpc.aio

from splitwave.core.errors import ServingError
from splitwave.core.reach import COUNT_MAX, SECONDS_MAX
from splitwave.runtime.config import BadSetting, check_address


def seconds(text: str) -> float:
    """A time above 0."""
    value = _number(text)
    if not 0 < value <= SECONDS_MAX:
        fix = f"set it above 0, to {SECONDS_MAX:.0f} at most"
        raise argparse.ArgumentTypeError(f"is {text}; {fix}")
    return value


def seconds_or_none(text: str) -> float:
    """A time that may be 0."""
    value = _number(text)
    return value if value == 0 else seconds(text)


def count(text: str) -> int:
    """A whole number of 1 or more."""
    value = _whole(text)
    if not 1 <= value <= COUNT_MAX:
        fix = f"set it to 1 or more, {COUNT_MAX} at most"
        raise argparse.ArgumentTypeError(f"is {text}; {fix}")
    return value


def address(text: str) -> str:
    """HOST:PORT, with http:// before it if it was copied from a browser."""
    scheme, slashes, rest = text.strip().partition("://")
    if slashes and scheme == "https":
        raise argparse.ArgumentTypeError(f"is {text!r}; there is no TLS here: write HOST:PORT")
    where = rest.split("/")[0] if slashes and scheme == "http" else text.strip()
    try:
        check_address("", where)
    except BadSetting:
        fix = "write HOST:PORT, such as 127.0.0.1:8080"
        raise argparse.ArgumentTypeError(f"is {text!r}; {fix}") from None
    return where


def addresses(text: str) -> list[str]:
    """At least one address, with commas between several."""
    found = [address(word) for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("names nobody; write HOST:PORT[,HOST:PORT...]")
    return found


def token_ids(text: str) -> list[int]:
    """At least one token id, with commas between several."""
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdecimal() for word in words):
        fix = "give whole numbers separated by commas, such as 1,2,3"
        raise argparse.ArgumentTypeError(f"is {text!r}; {fix}")
    found = [_whole(word) for word in words]
    if max(found) > COUNT_MAX:
        raise argparse.ArgumentTypeError(f"has {max(found)}, which no model has as a token id")
    return found


def answers_otherwise(error: ServingError) -> bool:
    """True if somebody answered a call, but does not serve what was asked for."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return False
    speaks_http = "http1" in (cause.details() or "").lower()
    return cause.code() is grpc.StatusCode.UNIMPLEMENTED or speaks_http


def why_no_worker(where: str, error: ServingError) -> str:
    """Why there is no worker at an address."""
    if answers_otherwise(error):
        return (
            f"{where} answers, but is no worker; give the gRPC address of a worker, not a router's"
        )
    return f"no worker answers at {where} ({error.message})"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; write seconds") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; write a whole number") from None
