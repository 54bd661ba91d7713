"""Log lines for people or as JSON, on standard error. No prompt or completion text is logged.

A line about one request carries its id and that of its trace: those of the `scope` that it is
written in, or of its own: `log.info("...", extra={"request_id": ...})`. Whatever else stands in
`extra` is shown the same way.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

OURS = ("splitwave", "services")
_LATER = frozenset({"message", "asctime", "taskName"})
_SCOPE: ContextVar[dict[str, str] | None] = ContextVar("splitwave_log_scope", default=None)


def configure(service: str, *, log_format: str, level: str) -> None:
    """Send records to standard error, once a process. Of other packages only warnings count."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service) if log_format == "json" else HumanLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for package in OURS:
        logging.getLogger(package).setLevel(level.upper())


@contextlib.contextmanager
def scope(**fields: str) -> Iterator[None]:
    """Give every line that is written within the block, and by tasks begun in it, these fields."""
    entered = _SCOPE.set(fields)
    try:
        yield
    finally:
        _SCOPE.reset(entered)


def about(**fields: str) -> None:
    """Add to the scope that this is in, if it is in one."""
    inside = _SCOPE.get()
    if inside is not None:
        inside.update(fields)


def extras(record: logging.LogRecord) -> dict[str, object]:
    """What a record was given in `extra`, behind what its scope says; empty texts say nothing."""
    # A library may have set a record factory of its own, whose fields are no extras.
    standard = vars(logging.makeLogRecord({})).keys() | _LATER
    own = {name: value for name, value in vars(record).items() if name not in standard}
    said = {**(_SCOPE.get() or {}), **own}
    return {name: value for name, value in said.items() if value != ""}


class HumanLines(logging.Formatter):
    """`12:30:01.123 INFO prefill: ready address=127.0.0.1:50051`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback behind it if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {self._service}: "
        line += record.getMessage()
        line += "".join(f" {name}={value}" for name, value in extras(record).items())
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonLines(logging.Formatter):
    """One JSON object a line: time_s (Unix), level, service, logger, message and the extras."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        line: dict[str, object] = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
