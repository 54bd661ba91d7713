"""Write the parts of the documents that code knows better than people.

Each stands between two markers; `make gen` renews them, and a test finds a stale one.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from scripts.failure_tables import ended_span, place_rows
from scripts.operators_tables import METRICS, SETTINGS, metric_rows, setting_rows
from services.router import parity
from services.router.openai import openapi
from services.router.openai.answers import DONE
from services.router.openai.http_faults import HTTP_FAULTS
from services.router.openai.reading import UNSUPPORTED
from services.router.openai.schema import UNSUPPORTED_OF_MESSAGES
from splitwave.core.errors import Reason, ServingError
from splitwave.core.mode_rules import FEATURES, RULES
from splitwave.core.refusal import TOLD as TOLD_REFUSALS
from splitwave.core.refusal import RefusalKind
from splitwave.runtime.tracing_names import REQUEST, SPANS
from splitwave.v1alpha1.generation_pb2 import FinishReason
from splitwave.wire.errors import TOLD, openai_error_body, openai_type
from splitwave.wire.generation import finish_reason_to_proto

ROOT = Path(__file__).parents[1]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def errors() -> str:
    """The truth table of failures."""
    head = ["reason", "gRPC", "HTTP", "`error.type`", "the router before it says so", "the client"]
    rows = [
        [
            f"`{reason.name}`",
            TOLD[reason].code.name,
            str(TOLD[reason].http_status),
            openai_type(reason),
            _router_does(reason),
            TOLD[reason].do,
        ]
        for reason in Reason
    ]
    return table(head, rows)


def ends() -> str:
    """How each reason ends a stream, a completion and a trace, by the code that says so."""
    head = [
        "reason",
        "the stream's last events",
        "gRPC `finish_reason`",
        "span: status, `error.type`",
    ]
    none = FinishReason.Name(finish_reason_to_proto(None))
    rows = []
    for reason in Reason:
        body = openai_error_body(ServingError(reason, ""))["error"]
        span = ended_span(reason)
        told = str((span.attributes or {})["error.type"])
        last = f"`error.code` `{body['code']}`, then `{DONE.decode()}`"
        rows.append([f"`{reason.name}`", last, none, f"{span.status.status_code.name}, `{told}`"])
    return table(head, rows)


def _router_does(reason: Reason) -> str:
    if reason is Reason.OVERLOADED:
        return "asks the other workers"
    if reason.worker_elsewhere:
        return "goes on at another worker"
    return "prefills again, and goes on" if reason.resumable else "nothing"


def places() -> str:
    """Where a failure shows."""
    return table(["", "before the first byte", "after it"], place_rows())


def http_faults() -> str:
    """Failures of HTTP itself."""
    head = ["HTTP", "`error.code`", "when", "the client"]
    return table(head, [[str(x), f"`{y.code}`", y.when, y.do] for x, y in HTTP_FAULTS.items()])


def routes() -> str:
    """The routes of the HTTP API and what they are over gRPC."""
    head = ["HTTP", "", "gRPC"]
    rows = [
        [f"`{x.method.upper()} {x.path}`", x.summary, parity.ROUTES[x.path]] for x in openapi.ROUTES
    ]
    return table(head, rows)


def fields() -> str:
    """The fields of requests over HTTP and over gRPC."""
    head = ["HTTP", "completions", "chats", "gRPC `GenerateRequest`"]
    rows = []
    for name in sorted({*parity.COMPLETIONS, *parity.CHATS}):
        there = [name in fields for fields in (parity.COMPLETIONS, parity.CHATS)]
        told = parity.COMPLETIONS.get(name) or parity.CHATS[name]
        rows.append([f"`{name}`", *("yes" if x else "" for x in there), told])
    return table(head, rows)


def unsupported() -> str:
    """Fields that are known and refused."""
    rows = [[f"`{name}`", why] for name, (why, _) in UNSUPPORTED.items()]
    rows += [[f"`messages[].{name}`", why] for name, why in UNSUPPORTED_OF_MESSAGES.items()]
    return table(["field", "why"], rows)


def metrics(who: str) -> str:
    """What a service exports."""
    return table(["metric", "kind", "labels", ""], metric_rows(METRICS[who]))


def settings(service: str) -> str:
    """What a service can be told."""
    head = ["in the file", "flag", "variable", "default", ""]
    return table(head, setting_rows(service))


def spans() -> str:
    """The spans of a request: who makes each, below which, and what it says."""
    head = ["span", "made by", "below", "covers", "attributes"]
    rows = [
        [
            _span(x.name),
            x.service,
            " or ".join(map(_span, x.parents)) or "the client's",
            x.covers,
            ", ".join(f"`{said}`" for said in x.says),
        ]
        for x in SPANS
    ]
    return table(head, rows)


def _span(name: str) -> str:
    return "the request" if name == REQUEST else f"`{name}`"


def refusals() -> str:
    """Why a certificate is refused."""
    rows = [[f"`{kind}`", *TOLD_REFUSALS[kind]] for kind in RefusalKind]
    return table(["refused as", "since", "the message names", "do"], rows)


def rules() -> str:
    """What may not go together in a mode."""
    rows = [[f"`{name}`", (rule.__doc__ or "").rstrip(".")] for name, rule in RULES.items()]
    rows += [
        [f"`no_{name}`", f"if a mode excludes it: {why}; {fix}"]
        for name, (why, fix) in FEATURES.items()
    ]
    return table(["rule", "says"], rows)


def trace_costs() -> str:
    """What the trace of a request costs each service."""
    result = json.loads((ROOT / "bench/results/tracing.json").read_text(encoding="utf-8"))
    services = result["cpu_us_per_request"]
    words = {
        "off": "no exporter",
        "unsampled": "an exporter, and a request that is not sampled",
        "on_no_export": "traced, and exported nowhere",
        "on_file": "traced into a file",
        "on_otlp_encoded": "traced, and encoded for a collector",
    }
    rows = [[said, *(f"{x[name]:.0f}" for x in services.values())] for name, said in words.items()]
    return table(["", *services], rows)


def wave_figures() -> str:
    """Waves under Splitwave's coordinator and under vLLM's, side by side."""
    result = json.loads((ROOT / "bench/results/waves.json").read_text(encoding="utf-8"))
    sides = [result[name]["summary"] for name in ("vllm", "splitwave")]
    rows = [
        [
            f"wake-up latency, {which}",
            *(f"{side[f'wake_{which}_s'] * 1e3:.1f} ms" for side in sides),
        ]
        for which in ("p50", "p99")
    ]
    for name, words in (
        ("dummy_share", "dummy steps"),
        ("dummy_behind_share", "of all steps, dummy ones behind the last answer"),
    ):
        rows += [
            [f"{words}, requests at once: {load}", *(f"{side[name][load]:.1%}" for side in sides)]
            for load in sides[0].get(name, {})
        ]
    idle = [f"{sum(side['idle_cpu_share'].values()):.1%} of a core" for side in sides]
    return table(
        ["", "vLLM's coordinator", "Splitwave's"], [*rows, ["CPU of an idle group", *idle]]
    )


def wave_simulation() -> str:
    """How many simulated schedules have been run, and what they met."""
    result = json.loads((ROOT / "bench/results/wave_sim.json").read_text(encoding="utf-8"))
    rows = [
        ["schedules", f"{result['seeds']:,}"],
        ["of them broke an invariant", f"{len(result['broken']):,}"],
        ["messages and other events", f"{result['events']:,}"],
        ["events of a schedule, at least", f"{result['events_per_seed_min']:,}"],
        ["kinds of fault in a schedule, at least", f"{result['fault_kinds_per_seed_min']:,}"],
        ["triples of state, message and fault", f"{result['triples']:,}"],
        ["meetings of the scarcest", f"{result['triple_hits_min']:,}"],
        ["CPU of a schedule", f"{result['cpu_ms_per_seed']} ms"],
    ]
    return table([f"at {result['git_sha'][:12]}", ""], rows) + f"\n\n{result['note']}."


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/errors.md": {
        "errors": errors,
        "http faults": http_faults,
        "places": places,
        "ends": ends,
    },
    "docs/api.md": {"routes": routes, "fields": fields, "unsupported": unsupported},
    "docs/operations.md": {f"{who} metrics": partial(metrics, who) for who in METRICS},
    "docs/tracing.md": {"costs": trace_costs, "spans": spans},
    "docs/waves.md": {"figures": wave_figures, "simulation": wave_simulation},
    "docs/certification.md": {"refusals": refusals, "rules": rules},
    "docs/configuration.md": {f"{who} settings": partial(settings, who) for who in SETTINGS},
}
"""By document and marker."""


def filled(document: str) -> str:
    """A document with its tables as they are now. Raises ValueError if a marker is missing."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for name, make in TABLES[document].items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{document}: has no lines `{begin.strip()}` and `{end}`; add them")
        text = f"{before}{begin}{make()}\n{end}{after}"
    return text


def main() -> int:
    """Renew every document."""
    for document in TABLES:
        (ROOT / document).write_text(filled(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
