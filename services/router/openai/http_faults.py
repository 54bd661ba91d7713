"""Failures of HTTP itself, beside the catalogue of reasons: what clients are told of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from splitwave.core.errors import Reason, ServingError
from splitwave.wire.errors import openai_error_body

BODY_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpFault:
    """One of them. In metrics they count as INVALID_REQUEST."""

    code: str
    """In the error's body, where a reason stands otherwise."""
    when: str
    do: str


HTTP_FAULTS: Final[Mapping[int, HttpFault]] = {
    404: HttpFault("not_found", "there is no such path", "use one of /openapi.json"),
    405: HttpFault(
        "method_not_allowed", "the path has no such method", "use one that the header Allow names"
    ),
    408: HttpFault("request_timeout", "the head or the body came too late", "send it at once"),
    413: HttpFault(
        "body_too_large",
        f"the body has more than {BODY_BYTES_MAX >> 20} MiB",
        "send less, or several requests",
    ),
}
"""By status."""


def fault_error(status: int, where: str, said: str) -> ServingError:
    """The failure as an error. `said`: what is known of a status that is none of these."""
    fault = HTTP_FAULTS.get(status)
    why = said if fault is None else f"{fault.when}; {fault.do}"
    return ServingError(Reason.INVALID_REQUEST, f"{where}: {why}")


def error_body(error: ServingError, status: int) -> dict[str, dict[str, str | None]]:
    """The JSON body of a failed call."""
    body = openai_error_body(error)
    if error.reason is Reason.INVALID_REQUEST and status in HTTP_FAULTS:
        body["error"]["code"] = HTTP_FAULTS[status].code
    return body
