"""A local stack: one prefill worker, one decode worker and a router, started, watched, stopped."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from services.cli.child import Child, describe_exit, log_tail
from services.cli.plan import Plan
from services.cli.zygote import Spec
from services.router.config import RouterConfig
from splitwave.core.demands import Demands, RefusedGroup
from splitwave.core.errors import ServingError
from splitwave.core.mode_guard import Standing
from splitwave.core.worker import WorkerDescription
from splitwave.runtime.config import load
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker, list_models

Report = Callable[[str, str], None]
"""Called with who and what, for people."""

POLL_S = 0.1
STOP_GRACE_S = 15.0


FIX = {
    RefusedGroup.UNKNOWN: "look into its log",
    RefusedGroup.UNCERTIFIED: "leave --certify and allow_uncertified as they are",
    RefusedGroup.LEVEL: "make full certificates with `splitwave certify` and the same settings, "
    "or leave --router certificate_level as it is",
}
"""What the user of a stack can do about a group that the router gives no work."""


class StackFailed(Exception):
    """The stack cannot start or go on: who, why, and the end of its log."""

    def __init__(self, who: str, why: str, log: str = "", code: int | None = None) -> None:
        super().__init__(f"{who}: {why}" + (f"\n--- end of its log ---\n{log}" if log else ""))
        self.who = who
        self.why = why
        self.code = code
        """Its exit code, if it has ended."""


@dataclass(slots=True)
class Worker:
    """A forked worker, as the zygote tells of it."""

    name: str
    address: str
    log_path: Path
    pid: int | None = None
    returncode: int | None = None
    ready_ranks: int = 0


@dataclass(slots=True)
class Stack:
    """The running processes. Made by `running`."""

    plan: Plan
    report: Report
    router: Child | None = None
    zygote: Child | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    _status: bytearray = field(default_factory=bytearray)
    _pipe: int = -1

    def start(self) -> None:
        """Start everything; nothing is ready yet."""
        for name, address in self.plan.worker_addresses.items():
            self.workers[name] = Worker(name, address, self.plan.log_path(name))
        theirs = self.listen()
        spec = Spec(preload=self.plan.preload, workers=self.plan.forked_workers())
        command = [sys.executable, "-m", "services.cli.zygote", spec.to_json(), str(theirs)]
        self.zygote = Child.start(
            "workers",
            command,
            self.plan.log_path("workers"),
            environment=self.plan.environment,
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self.router = Child.start(
            "router", self.plan.router_command(), self.plan.log_path("router")
        )
        self.report("stack", f"logs in {self.plan.run_dir}")

    def listen(self) -> int:
        """Open the pipe on which the zygote tells of the workers; returns the zygote's end."""
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        asyncio.get_running_loop().add_reader(self._pipe, self._read_status)
        return theirs

    def check_alive(self) -> None:
        """Raise StackFailed if any process has ended."""
        for worker in self.workers.values():
            if worker.returncode is not None:
                why = f"ended with {describe_exit(worker.returncode)}"
                log = log_tail(worker.log_path)
                raise StackFailed(worker.name, why, log, worker.returncode)
        for child in (self.router, self.zygote):
            if child is not None and child.returncode is not None:
                why = f"ended with {describe_exit(child.returncode)}"
                raise StackFailed(child.name, why, child.log_tail())

    async def ready(self, timeout_s: float) -> None:
        """Return when every rank has stepped and the router answers; StackFailed otherwise."""
        deadline_s = time.monotonic() + timeout_s
        waiting = list(self.workers.values())
        while waiting:
            self.check_alive()
            waiting = [worker for worker in waiting if not await self._worker_ready(worker)]
            await self._wait_until(deadline_s, timeout_s, [worker.name for worker in waiting])
        while not await self._router_ready():
            self.check_alive()
            await self._wait_until(deadline_s, timeout_s, ["router"])
        self.report("router", "ready")

    async def _wait_until(self, deadline_s: float, timeout_s: float, late: list[str]) -> None:
        """Wait a little, or raise StackFailed with the logs of those that are late."""
        if time.monotonic() > deadline_s:
            logs = "\n".join(log_tail(self.plan.log_path(name)) for name in late)
            raise StackFailed(", ".join(late), f"not ready after {timeout_s:.0f} s", logs)
        if late:
            await asyncio.sleep(POLL_S)

    async def describe(self, name: str, *, counters: bool = False) -> WorkerDescription:
        """What the worker of that name (prefill, decode) says of itself."""
        async with channel(self.workers[name].address) as open_channel:
            return await describe_worker(open_channel, 10.0, counters=counters)

    async def stop(self) -> None:
        """Stop the router, then the workers. No process is left afterwards."""
        await asyncio.to_thread(self._stop)
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _stop(self) -> None:
        if self.router is not None:
            self.router.terminate()
            self.router.wait(STOP_GRACE_S)
            self.router.kill_group()
        # Together: a prefill worker that drains goes on answering for its handoffs.
        _stop_trees([w.pid for w in self.workers.values() if w.pid and w.returncode is None])
        if self.zygote is not None:
            self.zygote.terminate()
            self.zygote.wait(STOP_GRACE_S)
            self.zygote.kill_group()

    async def _worker_ready(self, worker: Worker) -> bool:
        if worker.pid is None:
            return False
        try:
            description = await self.describe(worker.name)
        except ServingError:
            return False
        if not description.load.ready:
            return False
        self._check_demands(description)
        self.report(worker.name, f"ready: {description.ranks} rank(s), mode {description.mode}")
        return True

    def _check_demands(self, group: WorkerDescription) -> None:
        """Raise StackFailed for a group that the router will give no work, however long it waits.

        One that is out for a step outside its mode comes back without anybody's doing.
        """
        if group.load.standing is Standing.DECERTIFIED:
            return
        if refused := demands_of(self.plan).refuse(group.certification, group.load.standing):
            kind, why = refused
            raise StackFailed(group.role.value, f"the router gives it no work: {why}; {FIX[kind]}")

    async def _router_ready(self) -> bool:
        try:
            async with channel(self.plan.router_grpc) as open_channel:
                models = await list_models(open_channel, 2.0)
        except ServingError:
            return False
        return bool(models) and await _http_ready(self.plan.router_http)

    def _read_status(self) -> None:
        with contextlib.suppress(BlockingIOError):
            told = os.read(self._pipe, 65536)
            if not told:  # The zygote has ended: the loop must not look at the pipe any more.
                asyncio.get_running_loop().remove_reader(self._pipe)
            self._status += told
        while b"\n" in self._status:
            line, _, rest = bytes(self._status).partition(b"\n")
            self._status[:] = rest
            self._on_status(json.loads(line))

    def _on_status(self, event: dict[str, object]) -> None:
        kind, name = event["event"], str(event.get("name", ""))
        if kind == "preloaded":
            self.report("workers", "imported the engines' modules")
        elif kind == "started":
            self.workers[name].pid = int(str(event["pid"]))
            self.report(name, f"forked, pid {event['pid']}")
        elif kind == "lost":
            how = describe_exit(int(str(event["code"])))
            self.report(name, f"ended with {how}; starting it over")
        elif kind == "exited":
            self.workers[name].returncode = int(str(event["code"]))


@contextlib.asynccontextmanager
async def running(plan: Plan, report: Report) -> AsyncIterator[Stack]:
    """Start a stack and stop it on the way out, whatever happens.

    Raises StackFailed before anything is started if a port is taken or memory is short.
    """
    check_memory(plan)
    check_ports(plan)
    stack = Stack(plan, report)
    try:
        stack.start()
        yield stack
    finally:
        report("stack", "stopping")
        await asyncio.shield(stack.stop())


def demands_of(plan: Plan) -> Demands:
    """What the plan's router demands of groups."""
    return load(RouterConfig, "router", plan.program_flags("router"), os.environ)[0].demands()


def channel(address: str) -> grpc.aio.Channel:
    """A channel with our options."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def check_ports(plan: Plan) -> None:
    """StackFailed, naming flag and port, if one of the plan's ports is taken."""
    for flag, address in plan.listening().items():
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                why = f"cannot listen on {address} ({error.strerror}); give another with {flag}"
                raise StackFailed("ports", why) from None


def check_memory(plan: Plan) -> None:
    """StackFailed if the machine has less memory available than the plan needs."""
    needed, available = plan.memory_bytes(), psutil.virtual_memory().available
    if needed > available:
        why = (
            f"about {needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} GiB available;"
            " use a smaller --model, fewer --decode-ranks, or free memory"
        )
        raise StackFailed("memory", why)


async def _http_ready(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.write(f"GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
    try:
        status = await asyncio.wait_for(reader.readline(), 2.0)
    except TimeoutError:
        return False
    finally:
        writer.close()
    return b" 200 " in status


def _stop_trees(pids: Sequence[int]) -> None:
    """Stop processes, and kill what is left of their descendants after the grace."""
    family: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            family += [process, *process.children(recursive=True)]
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_GRACE_S)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(alive, timeout=5.0)
