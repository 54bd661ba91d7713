"""Settings of a router."""

from dataclasses import dataclass
from typing import ClassVar

from services.router.discovery import AddressError, Workers
from services.router.grants import POOL_WAIT_S
from splitwave.core.demands import Demands
from splitwave.core.evidence import Level
from splitwave.runtime.config import BadSetting, ProcessConfig, check_address, require, setting

_WORKERS = "HOST:PORT[,HOST:PORT...], or dns:NAME:PORT for every address of a name"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    """One router."""

    service: ClassVar[str] = "router"

    http_listen: str = setting("127.0.0.1:0", "host:port of the OpenAI HTTP API; empty: none")
    http_head_max_s: float = setting(
        30.0, "longest time from connecting, or a request's first byte, to the end of its head"
    )
    http_body_max_s: float = setting(60.0, "longest time from there to the end of its body")
    http_idle_max_s: float = setting(
        3630.0,
        "keep-alive time: how long a connection without a request is kept; longer than proxies "
        "keep theirs",
    )
    http_connections_max: int = setting(
        16384, "connections of the HTTP API at once; more are told so and closed"
    )
    vllm_engine: str = setting(
        "auto",
        "serve vLLM's gRPC engine service beside ours; auto: if the extra `smg` is installed",
        choices=("auto", "on", "off"),
    )
    prefill: str = setting("", f"prefill workers: {_WORKERS}")
    decode: str = setting("", f"decode workers: {_WORKERS}")
    model_path: str = setting("", "directory of the model: its tokenizer is used, no weights")
    model: str = setting("default", "served model name")
    router_id: str = setting("", "unique for ever; empty: made up")
    router_index: int = setting(0, "which of `routers` this is, for its share of the workers")
    routers: int = setting(1, "routers of the deployment")
    workers_per_router_max: int = setting(16, "workers of each role that one router serves")
    resolve_s: float = setting(3.0, "seconds between two resolutions of a DNS name")
    live_max: int = setting(4096, "requests served at once; more are refused as OVERLOADED")
    timeout_s: float = setting(600.0, "longest request, and the deadline of one without")
    stall_max_s: float = setting(30.0, "longest gap between two tokens of a stream")
    pool_wait_s: float = setting(
        POOL_WAIT_S, "how long a request waits for any worker of a role to be there"
    )
    reserve_tokens: int = setting(
        256, "completion tokens whose KV is reserved when a request is first admitted, at most"
    )
    trace_text: bool = setting(
        False, "prompts and completions stand in the spans of requests: see who may read those"
    )
    certificate_level: str = setting(
        "full", "least level of a group's certificate", choices=("full", "smoke")
    )
    allow_uncertified: bool = setting(False, "give work to groups without a certificate, too")
    decertified_groups_max: float = setting(
        0.25,
        "share of a pool's groups that may be out for steps outside their mode; further ones "
        "serve on, marked as degraded",
    )
    resumes_per_s: float = setting(32.0, "attempts beyond a request's first, a second")
    resumes_burst: int = setting(512, "and how many of them may come at once")

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if self.http_listen:
            check_address("http_listen", self.http_listen)
        for name in ("prefill", "decode"):
            try:
                if given := getattr(self, name):
                    Workers(given)
            except AddressError as error:
                raise BadSetting(name, str(error)) from error
        self._check_numbers()

    def check_complete(self) -> None:
        """Raise BadSetting if it is not said which workers and which model."""
        for name in ("prefill", "decode"):
            require(self, name, getattr(self, name) != "", f"name the workers: {_WORKERS}")
        require(self, "model_path", self.model_path != "", "set it to the model's directory")

    def demands(self) -> Demands:
        """What is demanded of groups."""
        return Demands(
            level=Level(self.certificate_level),
            allow_uncertified=self.allow_uncertified,
            decertified_groups_max=self.decertified_groups_max,
        )

    def _check_numbers(self) -> None:
        for name in (
            "routers", "workers_per_router_max", "live_max", "reserve_tokens",
            "http_connections_max",
        ):  # fmt: skip
            require(self, name, getattr(self, name) > 0, "set it to 1 or more")
        for name in (
            "resolve_s", "timeout_s", "stall_max_s",
            "http_head_max_s", "http_body_max_s", "http_idle_max_s",
        ):  # fmt: skip
            require(self, name, getattr(self, name) > 0, "set it above 0 seconds")
        for name in ("pool_wait_s", "resumes_per_s", "resumes_burst"):
            require(self, name, getattr(self, name) >= 0, "set it to 0 or more")
        is_share = 0.0 <= self.decertified_groups_max <= 1.0
        require(self, "decertified_groups_max", is_share, "set it to a share from 0 to 1")
        in_range = 0 <= self.router_index < self.routers
        require(self, "router_index", in_range, "count routers from 0, below `routers`")
