"""One frozen dataclass a service, filled from flags > environment > TOML file > defaults.

A field of the dataclass is a setting. Its help stands in its metadata, so the command
line, the environment and the file cannot drift apart:

    listen   --listen   SPLITWAVE_PREFILL_LISTEN   listen = "..." in the file
"""

import argparse
import dataclasses
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints  # Any: dataclasses know no better

from splitwave.runtime.convert import BadValue, check_reach, convert, is_table

T = TypeVar("T")

EXIT_BAD_CONFIG = 2
"""Exit code of a process whose settings cannot work; argparse uses the same."""
_SERVICE_LINK = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
    r"=.*|(\w+_)?PORT=\w+://.*"
)
"""What Kubernetes sets of itself for a service that is called as one of ours: no settings."""


class ConfigError(Exception):
    """A setting that cannot work. The message names the field, where it came from and the fix."""


class BadSetting(ValueError):
    """Raised by a config's own checks: which field, and what to do about it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


def setting(default: T, help_text: str, *, choices: tuple[str, ...] = ()) -> T:
    """A field of a config, with the help that the command line shows."""
    metadata = {"help": help_text, "choices": choices}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What every service has: where it listens, how it logs, how it stops."""

    service: ClassVar[str] = ""
    """Name of the service, in its flags' help and its variables."""

    listen: str = setting("127.0.0.1:0", "host:port of the gRPC server; port 0 takes a free one")
    advertise: str = setting(
        "", "host:port by which others reach it; empty: as listened on, or this host's name"
    )
    metrics_listen: str = setting("", "host:port of /metrics; empty: none")
    log_format: str = setting("human", "how log lines look", choices=("human", "json"))
    log_level: str = setting(
        "info", "least level that is logged", choices=("debug", "info", "warning", "error")
    )
    trace_exporter: str = setting(
        "none", "where traces go", choices=("none", "otlp", "file", "console")
    )
    trace_endpoint: str = setting(
        "http://127.0.0.1:4317", "otlp: the collector, as http(s)://host:port, gRPC"
    )
    trace_dir: str = setting("traces", "file: directory; each process writes one file into it")
    trace_ratio: float = setting(
        1.0, "share of the requests without a traceparent that are traced; others follow theirs"
    )
    trace_queue_max: int = setting(
        8192, "spans that may wait for the exporter; more are dropped, and counted"
    )
    drain_unready_s: float = setting(
        1.0, "on SIGTERM: seconds between NOT_SERVING and refusing work, for clients to notice"
    )
    drain_grace_s: float = setting(30.0, "on SIGTERM: seconds that admitted work has to finish")

    def __post_init__(self) -> None:
        for name in ("listen", "advertise", "metrics_listen"):
            address = getattr(self, name)
            if address or name == "listen":
                check_address(name, address)
        for name in ("drain_unready_s", "drain_grace_s"):
            require(self, name, getattr(self, name) >= 0, "set it to 0 or more seconds")
        self._check_traces()

    def check_complete(self) -> None:
        """Raise BadSetting if something that has no default is not set.

        Apart from the other checks, so that an incomplete config can be printed and filled in.
        """

    def _check_traces(self) -> None:
        is_share = 0.0 <= self.trace_ratio <= 1.0
        require(self, "trace_ratio", is_share, "set it to a share from 0 to 1")
        require(self, "trace_queue_max", self.trace_queue_max >= 1, "set it to 1 or more")
        require(self, "trace_dir", self.trace_dir != "", "set it to a directory")
        scheme, _, address = self.trace_endpoint.partition("://")
        if scheme not in ("http", "https"):
            fix = "write it as http(s)://host:port, such as http://127.0.0.1:4317"
            raise BadSetting("trace_endpoint", f"is {self.trace_endpoint!r}; {fix}")
        check_address("trace_endpoint", address.rstrip("/"))


def require(config: object, name: str, holds: bool, fix: str) -> None:
    """Raise BadSetting for a field whose value cannot work."""
    if not holds:
        raise BadSetting(name, f"is {getattr(config, name)!r}; {fix}")


def check_address(name: str, address: str) -> None:
    """Raise BadSetting if `address` is no host:port."""
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise BadSetting(name, f"is {address!r}; write it as host:port, such as 127.0.0.1:50051")


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it came from."""

    value: object
    source: str


def load(
    kind: type[T],
    service: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    flag_sources: Mapping[str, str] | None = None,
) -> tuple[T, Mapping[str, str]]:
    """Return the config, which may be incomplete, and where each field that was set came from.

    `flag_sources`: by field where a flag comes from that no user has written. Raises ConfigError;
    exits as argparse does for --help and for flags without their value.
    """
    flags = _read_flags(kind, service, arguments)
    path = flags.pop("config") or environ.get(variable(service, "config"))
    given = _from_file(kind, str(path)) if path else {}
    _merge(given, _from_environment(kind, service, environ))
    _merge(given, _from_flags(flags, flag_sources or {}))
    return _make(kind, given), {name: item.source for name, item in given.items()}


def check_complete(config: ProcessConfig, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for what is not set and has to be, with its source."""
    try:
        config.check_complete()
    except BadSetting as error:
        raise ConfigError(f"{error} ({sources.get(error.name, 'default')})") from None


def wants_print(arguments: Sequence[str]) -> bool:
    """True if the config is to be printed and nothing to be started."""
    return "--print-config" in arguments


def variable(service: str, name: str) -> str:
    """Environment variable of a field."""
    return f"SPLITWAVE_{service}_{name}".upper()


def to_toml(
    config: object,
    sources: Mapping[str, str],
    *,
    table: str = "",
    leave_out: Container[str] = (),
) -> str:
    """The whole config as a file that `--config` takes, each line with its source.

    `table`: as a table of that name in a larger file. `leave_out`: fields that are not shown.
    """
    plain, tables = [f"[{table}]"] if table else [], []
    for item in dataclasses.fields(config):  # type: ignore[arg-type]  # every config is a dataclass
        if item.name in leave_out:
            continue
        value = getattr(config, item.name)
        note = f"  # {sources.get(item.name, 'default')}"
        if isinstance(value, Mapping):
            tables.append(f"\n[{f'{table}.' if table else ''}{item.name}]{note}")
            tables += [f"{_toml(name)} = {_toml(text)}" for name, text in value.items()]
        elif value is not None:
            plain.append(f"{item.name} = {_toml(value)}{note}")
    return "\n".join([*plain, *tables]) + "\n"


def build(kind: type[T], texts: Mapping[str, str], source: str, fixed: Mapping[str, object]) -> T:
    """Make a dataclass of another layer from texts by field name; dots reach into nested ones.

    `fixed` wins over `texts`, and naming a fixed field in `texts` is an error.
    """
    for name in texts.keys() & fixed.keys():
        raise ConfigError(f"{name}: has a setting of its own; remove it here ({source})")
    given = {name: _Given(value, source) for name, value in texts.items()}
    return _make(kind, given, fixed)


def _make(
    kind: type[T], given: Mapping[str, _Given], fixed: Mapping[str, object] | None = None
) -> T:
    fixed = fixed or {}
    hints = get_type_hints(kind)
    names = names_of(kind)
    values = dict(fixed)
    nested: dict[str, dict[str, _Given]] = {}
    for name, item in given.items():
        first, dot, rest = name.partition(".")
        if first not in names:
            raise unknown(name, item.source, names - fixed.keys())
        if dot:
            nested.setdefault(first, {})[rest] = item
            continue
        try:
            values[name] = convert(item.value, hints[name])
            check_reach(name, values[name])
            _check_choice(kind, name, values[name])
        except BadValue as error:
            raise ConfigError(f"{name}: {error} ({item.source})") from None
    for first, inner in nested.items():
        values[first] = _make(hints[first], inner)
    return _checked(kind, values, given)


def unknown(name: str, source: str, known: Iterable[str]) -> ConfigError:
    """What is said of a setting that there is not."""
    return ConfigError(f"{name}: unknown ({source}); known are {', '.join(sorted(known))}")


def _check_choice(kind: type[Any], name: str, value: object) -> None:
    choices = next(f for f in _fields(kind) if f.name == name).metadata.get("choices")
    if choices and value not in choices:
        raise BadValue(f"is {value!r}; write one of {', '.join(choices)}")


def _checked(kind: type[T], values: Mapping[str, object], given: Mapping[str, _Given]) -> T:
    """Make the dataclass; what its own checks say comes back with the value's source."""
    lacking = [f.name for f in _fields(kind) if _required(f) and f.name not in values]
    if lacking:
        raise ConfigError(f"{lacking[0]}: not set; give it as {flag(lacking[0])}")
    try:
        return kind(**values)
    except BadSetting as error:
        item = given.get(error.name)
        raise ConfigError(f"{error} ({item.source if item else 'default'})") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read_flags(kind: type[Any], service: str, arguments: Sequence[str]) -> dict[str, object]:
    flags, rest = _parser(kind, service).parse_known_args(arguments)
    for word in rest:
        if not word.startswith("-"):
            raise ConfigError(f"{word!r} is no setting; write --NAME VALUE, as --help shows")
        known = (flag(item.name) for item in _fields(kind))
        raise unknown(word.partition("=")[0], "flag", known)
    return vars(flags)


def _parser(kind: type[Any], service: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"splitwave {service}",
        allow_abbrev=False,
        description=f"Settings come from flags, then from SPLITWAVE_{service.upper()}_<FIELD>, "
        "then from the file, then from the defaults shown here.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings by field name")
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting with its source, and exit"
    )
    hints = get_type_hints(kind)
    for item in _fields(kind):
        table = is_table(hints[item.name])
        default = "none" if table else item.default if item.default != "" else "empty"
        parser.add_argument(
            flag(item.name),
            dest=item.name,
            action="append" if table else "store",
            metavar="NAME=VALUE" if table else item.name.rpartition("_")[2].upper(),
            help=_help(item, default),
        )
    return parser


def _help(item: "dataclasses.Field[Any]", default: object) -> str:  # any field of any config
    words = str(item.metadata.get("help", ""))
    if choices := item.metadata.get("choices"):
        words += f"; one of {', '.join(choices)}"
    return f"{words} (default: {default})".replace("%", "%%")


def _from_flags(flags: Mapping[str, object], sources: Mapping[str, str]) -> dict[str, _Given]:
    given = {}
    for name, value in flags.items():
        if value is not None and name != "print_config":
            text = ",".join(value) if isinstance(value, list) else value
            given[name] = _Given(text, sources.get(name, f"flag {flag(name)}"))
    return given


def _from_environment(
    kind: type[Any], service: str, environ: Mapping[str, str]
) -> dict[str, _Given]:
    known = {variable(service, name): name for name in (*names_of(kind), "config")}
    given = {}
    for key, value in environ.items():
        name = key.removeprefix(variable(service, ""))
        if name == key or _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        if key not in known:
            raise unknown(name.lower(), f"environment {key}", names_of(kind))
        given[known[key]] = _Given(value, f"environment {key}")
    given.pop("config", None)
    return given


def _from_file(kind: type[Any], path: str) -> dict[str, _Given]:
    try:
        document = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config: {path} is not TOML: {error}") from None
    for name in sorted(document.keys() - names_of(kind)):
        raise unknown(name, f"file {path}", names_of(kind))
    return {name: _Given(value, f"file {path}") for name, value in document.items()}


def _merge(given: dict[str, _Given], stronger: Mapping[str, _Given]) -> None:
    """Let `stronger` win. Tables are merged key by key."""
    for name, item in stronger.items():
        weaker = given.get(name)
        if weaker is not None and isinstance(weaker.value, Mapping):
            item = _Given({**weaker.value, **dict(_pairs(item))}, f"{weaker.source}, {item.source}")
        given[name] = item


def _pairs(item: _Given) -> Iterator[tuple[str, object]]:
    table = convert(item.value, Mapping[str, str])
    assert isinstance(table, Mapping)
    yield from table.items()


def _fields(kind: type[Any]) -> "tuple[dataclasses.Field[Any], ...]":  # any config's fields
    return dataclasses.fields(kind)


def names_of(kind: type[Any]) -> frozenset[str]:  # any config
    """Names of a config's settings."""
    return frozenset(item.name for item in _fields(kind))


def _required(item: "dataclasses.Field[Any]") -> bool:  # any field of any config
    missing = dataclasses.MISSING
    return item.init and item.default is missing and item.default_factory is missing


def flag(name: str) -> str:
    """Flag of a field."""
    return "--" + name.replace("_", "-")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
