# SPDX-License-Identifier: Apache-2.0
"""Models of the backend kvferry in a real Triton, for tests and checks: repositories, questions, streams."""

import json
import os
import sys
import threading
import traceback

import lab

BUILD = os.environ.get("KVF_BUILD", "")
MODEL = os.environ.get("KVF_MODEL", "")
PATIENCE_S = 900  # for what never comes, not for a slow machine
BACKENDS = f"--backend-directory={BUILD}/triton/backends"


def need_all():
    lab.need_all()
    if not os.path.exists(MODEL):
        print("there is no model: make setup", file=sys.stderr)
        sys.exit(77)


def add_model(repository, name, more="", version=1, **parameters):
    """Writes a model folder. parameters: of the backend; more: other lines of config.pbtxt."""
    folder = os.path.join(repository, name)
    os.makedirs(os.path.join(folder, str(version)), exist_ok=True)
    lines = ['backend: "kvferry"', more]
    for key, value in {"model": MODEL, "context_size": 2048, **parameters}.items():
        if value is not None:
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    with open(os.path.join(folder, "config.pbtxt"), "w") as f:
        f.write("\n".join(lines) + "\n")
    return repository


def has_metrics(triton):
    try:
        return triton.get("/metrics", triton.metrics)[0] == 200
    except OSError:
        return False


def start(folder, repository, *options, **more):
    triton = lab.Triton(folder, repository, [BACKENDS, *options], env={"GOMP_SPINCOUNT": "100"}, **more)
    lab.wait_until("the metrics answer", lambda: has_metrics(triton))  # their port opens after the server is ready
    return triton


def ask(triton, model, **inputs):
    """(status, answer) of /generate."""
    connection = triton.connect(PATIENCE_S)
    try:
        return triton.post(f"/v2/models/{model}/generate", inputs, connection)
    finally:
        connection.close()


def answer(triton, model, **inputs):
    status, body = ask(triton, model, **inputs)
    assert status == 200, (status, body)
    return body


class Stream:
    """/generate_stream: an iterator of its events."""

    def __init__(self, triton, model, **inputs):
        self.connection = triton.connect(PATIENCE_S)
        self.connection.request(
            "POST",
            f"/v2/models/{model}/generate_stream",
            json.dumps({"stream": True, **inputs}),
            {"Content-Type": "application/json"},
        )
        self.response = None

    def __iter__(self):
        self.response = self.response or self.connection.getresponse()  # comes with the first token
        for line in self.response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
            elif line.strip():
                yield json.loads(line)

    def close(self):
        """As a client that goes away."""
        if self.response is not None:
            self.response.close()
        self.connection.close()


def in_parallel(works):
    """Runs all at once; returns their results, or raises the first failure."""
    results, failures = [None] * len(works), []

    def run(i):
        try:
            results[i] = works[i]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]
    return results


def tokens(seed, num):
    """A prompt that no other seed begins with."""
    return [1] + [(i * 7919 + seed * 104729 + 13) % 40000 + 20 for i in range(num - 1)]


def wait_idle(triton, model):
    lab.wait_until(
        f"{model} has no request",
        lambda: (
            triton.metric("kvferry_busy_slots", f'model="{model}"') == 0
            and triton.metric("kvferry_queued_requests", f'model="{model}"') == 0
        ),
    )


def main(tests, names=()):
    """Runs the tests, or those that are named."""
    need_all()
    failed = 0
    for test in tests:
        if names and test.__name__ not in names:
            continue
        try:
            test()
            print("ok", test.__name__, flush=True)
        except Exception:
            traceback.print_exc()
            print("FAILED", test.__name__, flush=True)
            failed += 1
    sys.exit(1 if failed else 0)
