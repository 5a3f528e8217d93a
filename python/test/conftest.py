# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all Python tests: private servers and folders, and what makes them fail.

Run with the package of a build folder:
    PYTHONPATH=build/release/python $KVF_PYTEST -m pytest python/test
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

FIELDS = {"engine": "test-1", "model": "0" * 64, "kv": "u8 raw"}


def until(condition, what: str, timeout: float = 60.0) -> None:
    """Waits for a state, never for a time."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout} s"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RedisServer:
    """A private redis-server on a unix socket and a TCP port; stopped by its process id."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.options = options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def unix_url(self) -> str:
        return f"redis+unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        program = os.environ.get("KVFT_SERVER", "redis-server")
        with open(self.folder / "redis.log", "ab") as log:
            self.process = subprocess.Popen(
                [program, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket),
                 "--save", "", "--appendonly", "no", "--dir", str(self.folder), "--maxmemory", "1gb",
                 "--maxmemory-policy", "allkeys-lru", *self.options],
                stdout=log, stderr=log,
            )  # fmt: skip
        until(self.answers, "redis-server answers")

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.folder / "redis.log").read_text()
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """Sends one command and returns the first of the reply as it is."""
        parts = [w.encode() if isinstance(w, str) else w for w in words]
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as s:
            s.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            return s.recv(1 << 16)

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pause(self) -> None:
        """It is silent until resume(): connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.runs():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def redis_program() -> str:
    program = os.environ.get("KVFT_SERVER", "redis-server")
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    return program


@pytest.fixture(scope="session")
def shared_redis(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests; `redis` empties it before each."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """A running server, empty: its unix_url, tcp_url, port, socket, command(). For tests that do not stop it."""
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture
def own_redis(redis_program: str, tmp_path: Path) -> Iterator[RedisServer]:
    """A server of its own, which the test may pause, stop and start."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    yield server
    server.stop()


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    """The URL of a folder that is not there yet."""
    return f"file:{tmp_path / 'store'}"


@pytest.fixture(params=["mem", "file", "unix", "tcp"])
def any_url(request: pytest.FixtureRequest) -> str:
    """Each kind of store in turn."""
    if request.param == "mem":
        return "mem:"
    if request.param == "file":
        return str(request.getfixturevalue("folder_url"))
    server = request.getfixturevalue("redis")
    return server.unix_url if request.param == "unix" else server.tcp_url


@pytest.fixture
def store(any_url: str) -> Iterator[kvferry.Store]:
    """A Store of each kind in turn."""
    with kvferry.Store(any_url) as store:
        yield store


@pytest.fixture
def space(store: kvferry.Store) -> kvferry.Space:
    """A Space with blocks of 4 tokens."""
    return kvferry.Space(store, FIELDS, block_tokens=4)


@pytest.fixture
def mem() -> Iterator[kvferry.Store]:
    """A Store in memory, for what is the same everywhere."""
    with kvferry.Store("mem:") as store:
        yield store


@pytest.fixture
def mem_space(mem: kvferry.Store) -> kvferry.Space:
    return kvferry.Space(mem, FIELDS, block_tokens=4)
