# SPDX-License-Identifier: Apache-2.0
"""A real Triton and a redis-server for tests and checks: start, ask, stop. Standard library only."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

TRITON = os.environ.get("KVF_TRITON", "")
BUILD = os.environ.get("KVF_BUILD", "")


def need_all():
    if not os.access(os.path.join(TRITON, "bin/tritonserver"), os.X_OK):
        print("there is no Triton: make setup-triton", file=sys.stderr)
        sys.exit(77)


def free_ports(num):
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def folder(kind):
    return tempfile.TemporaryDirectory(prefix=f"kvferry-{kind}-")


def wait_until(what, condition, seconds=120):
    """Waits for a state. The bound is for a state that never comes, not for a slow machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for this: {what}")
        time.sleep(0.01)


class Triton:
    """One tritonserver. options: more of its command line."""

    def __init__(self, folder, repository, options=(), env=None, ready=True):
        self.http, self.grpc, self.metrics = free_ports(3)
        self.log_path = os.path.join(folder, f"triton-{time.monotonic_ns()}.log")
        command = [
            f"{TRITON}/bin/tritonserver",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            f"--metrics-port={self.metrics}",
            "--metrics-address=127.0.0.1",
            *([f"--model-repository={repository}"] if repository else []),
            *options,
        ]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})})
        if ready:
            wait_until("Triton is ready", self.is_ready)

    def is_ready(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"tritonserver ended with {self.process.returncode}:\n" + self.log()[-3000:])
        try:
            return self.get("/v2/health/ready")[0] == 200
        except OSError:
            return False

    def log(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def connect(self, timeout=120):
        return http.client.HTTPConnection("127.0.0.1", self.http, timeout=timeout)

    def get(self, path, port=None):
        c = http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=30)
        c.request("GET", path)
        r = c.getresponse()
        body = r.read()
        c.close()
        return r.status, body

    def post(self, path, body, connection=None):
        c = connection or self.connect()
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        text = r.read()
        if connection is None:
            c.close()
        return r.status, json.loads(text) if text else None

    def metric(self, name, labels=""):
        """The sum of a metric over all lines that have these labels."""
        lines = self.get("/metrics", self.metrics)[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and labels in line)

    def stop(self, sig=signal.SIGTERM, wait=120):
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(wait)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError("tritonserver does not end:\n" + self.log()[-3000:]) from None

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            lines = [line for line in self.log().splitlines() if line.strip() and line[0] not in "+|"]
            sys.stderr.write("\n".join(lines[-30:]) + "\n")
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Redis:
    """A private redis-server on a TCP port and a unix socket."""

    def __init__(self, folder, *options):
        (self.port,), self.folder, self.options = free_ports(1), folder, options
        self.socket = os.path.join(folder, f"redis-{self.port}.sock")
        self.url = f"redis+unix://{self.socket}"
        self.start()

    def start(self):
        with open(os.path.join(self.folder, "redis.log"), "a") as log:
            self.process = subprocess.Popen(
                [
                    os.environ.get("KVFT_SERVER", "redis-server"),
                    "--port",
                    str(self.port),
                    "--bind",
                    "127.0.0.1",
                    "--unixsocket",
                    self.socket,
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                    "--dir",
                    self.folder,
                    "--maxmemory",
                    "256mb",
                    "--maxmemory-policy",
                    "allkeys-lru",
                    *self.options,
                ],
                stdout=log,
                stderr=log,
            )
        wait_until("redis-server answers", self.answers)

    def answers(self):
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def command(self, *words):
        """Sends one command and returns the reply as it is, up to 1 MB of it."""
        parts = [w.encode() if isinstance(w, str) else w for w in words]
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as s:
            s.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            reply = s.recv(1 << 20)
            if reply[:1] == b"$":  # a string, to its end
                head, length = reply.split(b"\r\n", 1)[0], int(reply.split(b"\r\n", 1)[0][1:])
                while length >= 0 and len(reply) < len(head) + 2 + length + 2:
                    reply += s.recv(1 << 20)
            return reply

    def names(self, pattern="*"):
        """The names of all keys that match. For a handful."""
        return [w for w in self.command("KEYS", pattern).split(b"\r\n") if w and w[:1] not in b"*$"]

    def value(self, key):
        return self.command("GET", key).split(b"\r\n", 1)[1][:-2]

    def pause(self):
        """Silent until resume(): connections stay open and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
