"""CI fails a run that leaves a process behind, whatever that process did to hide."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/leave_nothing.py"


def run(shell: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command under the check, without its grace."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import leave_nothing as it; "
    code += "it.GRACE_S = 0.5; sys.exit(it.main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "sh", "-c", shell], capture_output=True, text=True, check=False
    )


def test_a_run_that_leaves_nothing_keeps_its_status() -> None:
    assert run("true").returncode == 0
    assert run("exit 7").returncode == 7


def test_a_process_that_ends_within_the_grace_is_no_fault() -> None:
    assert run("sleep 0.2 &").returncode == 0


def test_a_daemon_is_named_and_ended() -> None:
    done = run("setsid sh -c 'sleep 60 >/dev/null 2>&1 & echo $!'")

    pid = int(done.stdout.split()[-1])
    assert done.returncode == 1
    assert f"left running: {pid} " in done.stderr
    assert not Path(f"/proc/{pid}").exists()


def test_an_orphan_that_has_died_is_buried_while_the_command_runs() -> None:
    done = run("pid=$(sleep 0.05 >&- & echo $!); sleep 0.5; test ! -e /proc/$pid")

    assert done.returncode == 0


def test_a_command_hears_ctrl_c_although_a_background_job_would_not() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    shell = f"trap '' INT; exec {sys.executable} -c '{code}'"
    deaf = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert deaf.stdout == "False\n"

    script = f"trap '' INT; exec {sys.executable} {SCRIPT} {sys.executable} -c '{code}'"
    heard = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert heard.stdout == "True\n"
