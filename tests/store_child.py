"""What other processes do in the store's tests: `python store_child.py VERB STORE …`."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import duckdb
from store_tables import SMALL, edges_of

from circuitlab import migrations
from circuitlab.errors import CircuitlabError
from circuitlab.store import Store


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def save(path: str, first: str, count: str) -> None:
    """Save runs one by one; say each id when its save has returned."""
    with Store(path) as store:
        for seed in range(int(first), int(first) + int(count)):
            say(store.save(edges_of(seed)))


def save_for_ever(path: str, first: str) -> None:
    """Save and fold until killed; say each id when its save has returned."""
    store = Store(path)
    seed = int(first)
    while True:
        say(store.save(edges_of(seed)))
        if seed % 3 == 0:
            store.fold(wait=0.0)
        seed += 1


def killed_while_saving(
    path: str, first: str, least: str, most: str, seconds: str
) -> None:
    """Be the parent of writers that are killed at random instants, one after another.

    Writers are forked from this warm process, so that a life costs no imports. The
    first one lives on for a while and shows how long a life has to be to matter.
    """
    generator = random.Random(int(first))
    until = time.monotonic() + float(seconds)
    longest, life = _one_life(path, first), 1
    while life <= int(least) or (life <= int(most) and time.monotonic() < until):
        child = os.fork()
        if child == 0:
            save_for_ever(path, str(int(first) + life * 100))
        time.sleep(generator.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        life += 1
    say("kills", life - 1)


def _one_life(path: str, first: str) -> float:
    """Seconds that a new process takes to save three runs and fold once."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        store = Store(path)
        for seed in range(int(first), int(first) + 3):
            say(store.save(edges_of(seed)))
        store.fold(wait=0.0)
        os._exit(0)
    os.waitpid(child, 0)
    return time.monotonic() - started


def read(path: str, count: str, seconds: str) -> None:
    """Query until so many runs are seen; say how many queries it took."""
    store, queries, seen = Store(path), 0, 0
    until = time.monotonic() + float(seconds)
    while seen < int(count) and time.monotonic() < until:
        try:
            found = store.sql(
                "select count(distinct run_id) as runs, count(*) as rows from v_edge"
            ).to_pylist()[0]
        except CircuitlabError as error:
            if error.code != "store_missing":
                raise
            time.sleep(0.02)
            continue
        assert found["runs"] * SMALL.n_edges == found["rows"], found
        assert found["runs"] >= seen, (found, seen)
        queries, seen = queries + 1, found["runs"]
    say(queries, seen)


def hold(path: str, mode: str) -> None:
    """Have the file open like a shell, until the standard input ends."""
    con = duckdb.connect(path, read_only=mode == "read")
    say("held")
    sys.stdin.read()
    con.close()


def limited(path: str, size: str, first: str, count: str) -> None:
    """Save with a limit on the size of files; say ids, or the code of the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    store = Store(path)
    for seed in range(int(first), int(first) + int(count)):
        try:
            say("saved", store.save(edges_of(seed)))
        except CircuitlabError as error:
            say("refused", error.code)
    try:
        found = store.fold()
        say("folded", found.runs, found.pending)
    except CircuitlabError as error:
        say("refused", error.code)


def unprivileged(path: str, what: str) -> None:
    """Save or read as a user without rights; say the result or the code."""
    steps = migrations.migrations()
    os.setgid(65534)
    os.setuid(65534)
    try:
        store = Store(path, steps=steps)
        if what == "save":
            say("saved", store.save(edges_of(99)))
        else:
            say("read", store.runs().num_rows)
        store.close()
    except CircuitlabError as error:
        say("refused", error.code)


def migrate(path: str, folder: str) -> None:
    """Open a store with other migrations, and read it; say its version."""
    steps = migrations.migrations(Path(folder))
    store = Store(path, steps=steps)
    say(store.sql("select max(version) as v from schema_version").to_pylist()[0]["v"])


VERBS = {
    "save": save,
    "save_for_ever": save_for_ever,
    "killed_while_saving": killed_while_saving,
    "read": read,
    "hold": hold,
    "limited": limited,
    "unprivileged": unprivileged,
    "migrate": migrate,
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
