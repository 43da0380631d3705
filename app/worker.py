"""Jobs: commands of circuitlab in processes of their own, beside the store.

A page starts a job and looks at its folder from then on, so that a job outlives the
page, the session and the app, and its address can be shared. A supervisor (this file,
run as a program) starts the command, keeps its log, and stops it when asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "done", "failed", "cancelled", "lost"]

ID = re.compile(r"[0-9a-f]{12}")
BEAT = 1.0
"""Seconds between the supervisor's signs of life."""
PATIENCE = 15.0
"""Without a sign of life for this long, in seconds, a job counts as lost."""

PROGRAM = "from circuitlab.cli import main; main()"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-B0-2]|[\x00-\x08\x0b-\x1f]")
_PERCENT = re.compile(r"(\d{1,3})%\|")


@dataclass(frozen=True)
class Job:
    """One job, as its folder tells."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def facts(self) -> dict[str, Any]:
        """Title, command and start (seconds since 1970), as written at the start."""
        return _json(self.folder / "job.json")

    @property
    def state(self) -> State:
        end = _json(self.folder / "end.json")
        if end:
            if end["code"] == 0:
                return "done"
            return "cancelled" if (self.folder / "cancel").exists() else "failed"
        alive = self.folder / "alive"
        try:
            seen = alive.stat().st_mtime
        except OSError:
            seen = self.facts.get("started", 0.0)
        return "running" if time.time() - seen < PATIENCE else "lost"

    @property
    def seconds(self) -> float:
        end = _json(self.folder / "end.json")
        return float(end.get("ended", time.time()) - self.facts.get("started", 0.0))

    def log(self, most: int = 20_000) -> str:
        """The end of what the command said, as a terminal would show it."""
        with contextlib.suppress(OSError):
            raw = (self.folder / "log").read_bytes()[-most:]
            lines = raw.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
            # A bar rewrites its line: what stands last is what one sees.
            last = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            shown = [_ESCAPES.sub("", line).rstrip() for line in last]
            return "\n".join(line for line in shown if line)
        return ""

    @property
    def progress(self) -> float | None:
        """The share that is done, where the command says so."""
        found = _PERCENT.findall(self.log(4000))
        return min(1.0, int(found[-1]) / 100) if found else None

    @property
    def run_id(self) -> str:
        """The run that the command left in the store; empty where there is none."""
        found = _json(self.folder / "out").get("run_id", "")
        return found if isinstance(found, str) else ""

    def cancel(self) -> None:
        """Ask the supervisor to stop the command; what is finished stays."""
        (self.folder / "cancel").touch()


def jobs_folder(store: str) -> Path:
    """Where a store's jobs are; a remote store's are kept in the home folder."""
    if "://" in store:
        return Path.home() / ".circuitlab" / "jobs"
    return Path(store + ".jobs")


def start(store: str, title: str, arguments: Sequence[str]) -> str:
    """Start `circuitlab ARGUMENTS --store STORE --json`; returns the job's id.

    `validate` is the app's own program, prove.py.
    """
    folder = jobs_folder(store) / secrets.token_hex(6)
    folder.mkdir(parents=True)
    command = [*arguments, "--store", store, "--json"]
    facts = {"title": title, "command": command, "started": time.time()}
    (folder / "job.json").write_text(json.dumps(facts), encoding="utf-8")
    # The job's own folder is its working directory: no name there means a file here.
    subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), str(folder)],
        cwd=folder,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return folder.name


def job(store: str, job_id: str) -> Job | None:
    """The job of an id, None where there is none. An id is no path."""
    if not ID.fullmatch(job_id):
        return None
    found = Job(jobs_folder(store) / job_id)
    return found if found.facts else None


def recent(store: str, most: int = 20) -> list[Job]:
    """The newest jobs, newest first."""
    with contextlib.suppress(OSError):
        found = [Job(p) for p in jobs_folder(store).iterdir() if ID.fullmatch(p.name)]
        kept = [one for one in found if one.facts]
        return sorted(kept, key=lambda one: -one.facts["started"])[:most]
    return []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- the supervisor ---


def supervise(folder: Path) -> int:
    """Run a job's command to its end; returns its exit code."""
    verb, *rest = Job(folder).facts["command"]
    program = ["-c", PROGRAM, verb]
    if verb == "validate":
        program = [str(Path(__file__).with_name("prove.py"))]
    command = [sys.executable, *program, *rest]
    with (folder / "log").open("wb") as log, (folder / "out").open("wb") as out:
        reader, writer = _terminal()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=writer, cwd=folder
        )
        os.close(writer)
        code = _watch(process, folder, reader, log)
    end = {"code": code, "ended": time.time()}
    waiting = folder / "end.json.tmp"
    waiting.write_text(json.dumps(end), encoding="utf-8")
    waiting.replace(folder / "end.json")
    return code


def _terminal() -> tuple[int, int]:
    """A pair of descriptors: a terminal, because commands draw bars only for one."""
    try:
        import fcntl
        import pty
        import struct
        import termios
    except ImportError:
        return os.pipe()
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    return reader, writer


def _watch(process: subprocess.Popen, folder: Path, reader: int, log: Any) -> int:
    import threading

    def copy() -> None:
        # A terminal whose other end is closed raises, and that is its end.
        with contextlib.suppress(OSError):
            while chunk := os.read(reader, 65536):
                log.write(chunk)
                log.flush()

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    asked = None
    beaten = 0.0
    while process.poll() is None:
        if time.time() - beaten > BEAT:
            (folder / "alive").touch()
            beaten = time.time()
        if (folder / "cancel").exists():
            asked = asked or time.time()
            _stop(process, time.time() - asked)
        time.sleep(0.1)
    copying.join(2)
    os.close(reader)
    return process.returncode


def _stop(process: subprocess.Popen, waited: float) -> None:
    """Ctrl-C first, which keeps what is finished; then less politely."""
    if waited < 0.05:
        process.send_signal(signal.SIGINT)
    elif waited > 20:
        process.kill()
    elif waited > 10:
        process.terminate()


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1])))
