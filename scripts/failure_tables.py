"""Where a failure shows: its fields, details, attributes and counts, as the code names them."""

from google.rpc.error_details_pb2 import ErrorInfo
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from services.router import metrics
from services.router.openai.answers import DONE
from splitwave.core.errors import Reason, ServingError
from splitwave.runtime import tracing_names
from splitwave.runtime.metrics import Family
from splitwave.runtime.tracing import Tracing
from splitwave.wire.errors import openai_error_body, to_status

_SAMPLE = ServingError(Reason.OVERLOADED, "", retry_after_s=1.0)
"""One for which waiting helps, so that all that can be told of a failure is."""


def place_rows() -> list[list[str]]:
    """Where; before the first byte; after it."""
    requests, refused, shed = map(_metric, (metrics.REQUESTS, metrics.REFUSED, metrics.SHED))
    return [
        ["HTTP", f"the status, and {_body()}", ""],
        [
            "HTTP, streaming",
            "the same: a stream begins with its first token, so a request that fails before has"
            " its own status",
            f"an event whose data is that body, then `{DONE.decode()}`; the status was 200",
        ],
        ["gRPC", f"the code, with {_details()}", "the same, after the messages that came"],
        ["`finish_reason`", "none", "none: only a completion that ended well has one"],
        ["trace", _root(), "the same"],
        [
            "metrics",
            f"{requests}; {refused} for a call for which nothing was admitted, and {shed} if that"
            " was for load",
            requests,
        ],
    ]


def ended_span(reason: Reason) -> ReadableSpan:
    """A span that ended with a reason."""
    span = TracerProvider().get_tracer("docs").start_span("docs")
    Tracing().end(span, reason.value)
    assert isinstance(span, ReadableSpan)
    return span


def _root() -> str:
    span = ended_span(_SAMPLE.reason)
    said = [name for name, value in (span.attributes or {}).items() if value == _SAMPLE.reason]
    names = " and ".join(f"`{name}`" for name in (*said, tracing_names.OUTCOME))
    return (
        f"the request's span has status {span.status.status_code.name}, {names} are the reason in"
        " lower case"
    )


def _body() -> str:
    fields = openai_error_body(_SAMPLE)["error"]
    assert fields["code"] == _SAMPLE.reason.value
    names = ", ".join(f'"{name}"' for name in fields)
    return (
        f'`{{"error": {{{names}}}}}`: `code` is the reason in lower case, `param` the field that is'
        " wrong"
    )


def _details() -> str:
    status = to_status(_SAMPLE)
    info, wait = status.details
    said = ErrorInfo()
    assert info.Unpack(said)
    assert said.reason == _SAMPLE.reason.name
    kinds = [each.TypeName().rpartition(".")[2] for each in (info, wait)]
    return (
        f"`{status.DESCRIPTOR.full_name}`: one `{kinds[0]}` (domain `{said.domain}`, `reason`), and"
        f" `{kinds[1]}` where waiting helps"
    )


def _metric(family: Family) -> str:
    return f"`{family.samples[0]}{{{', '.join(family.labels)}}}`"
