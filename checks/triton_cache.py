#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check-triton-cache: Triton's response cache in a kvferry store, in the real server.

Hits and misses, two servers on one Redis, other models, an age limit, damaged records, and a Redis that is down, killed
or silent. An answer is right, to the byte, or it is computed. Then the time of a hit beside that of Triton's local
cache, in turns. ROUNDS (15) of 200 hits, of large answers 40. An argument of the program names one part."""

import array
import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/triton"))
import lab

ROUNDS = int(os.environ.get("ROUNDS", "15"))
BACKENDS, CACHES = f"{lab.BUILD}/test/triton/backends", f"{lab.BUILD}/triton/caches"
CONFIG = """
backend: "kvftoy"
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "COUNT" data_type: TYPE_INT64 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 2 }} ]
response_cache {{ enable: true }}
parameters {{ key: "bias" value: {{ string_value: "{bias}" }} }}
parameters {{ key: "copies" value: {{ string_value: "{copies}" }} }}
"""


def repository(folder, bias=0, copies=1):
    path = f"{folder}/models-{bias}-{copies}"
    if not os.path.exists(path):
        os.makedirs(f"{path}/toy/1")
        configure(path, bias, copies)
    return path


def configure(path, bias, copies=1):
    with open(f"{path}/toy/config.pbtxt", "w") as f:
        f.write(CONFIG.format(bias=bias, copies=copies))


def start(folder, options, bias=0, repo=None, more=(), **kwargs):
    """options: those of --cache-config. The deadline is for what hangs, not for a busy machine."""
    cache = [f"--cache-config=kvferry,{name}={value}" for name, value in {"deadline": 5000, **options}.items()]
    where = [f"--backend-directory={BACKENDS}", f"--cache-directory={CACHES}"]
    return lab.Triton(folder, repo or repository(folder, bias), [*where, *cache, *more], **kwargs)


def refuses(folder, options, *words, **kwargs):
    """A Triton that must not start; its log has the words."""
    with start(folder, options, ready=False, **kwargs) as triton:
        code, log = triton.process.wait(120), triton.log()
    check(
        f"refused: {' '.join(f'{k}={v}' for k, v in options.items())}",
        code != 0 and all(w in log for w in words),
        log[-1500:],
    )


def ask(triton, values, connection=None):
    """(OUT, COUNT): the answer, and the number of the computation that it comes from."""
    data = array.array("f", values).tobytes()
    binary = {"binary_data": True}
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "datatype": "FP32",
                    "shape": [len(values)],
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "outputs": [{"name": "OUT", "parameters": binary}, {"name": "COUNT", "parameters": binary}],
        }
    ).encode()
    c = connection or triton.connect()
    c.request(
        "POST",
        "/v2/models/toy/infer",
        head + data,
        {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"},
    )
    r = c.getresponse()
    body = r.read()
    if connection is None:
        c.close()
    if r.status != 200:
        raise RuntimeError(f"{r.status}: {body[:300]}")
    body = body[int(r.headers["Inference-Header-Content-Length"]) :]
    return array.array("f", body[:-8]).tolist(), struct.unpack("<q", body[-8:])[0]


def right(values, bias=0, copies=1):
    return [2 * v + bias for v in values] * copies


def check(what, condition, detail=""):
    print(f"  {'ok  ' if condition else 'FAIL'} {what}" + ("" if condition else f": {detail}"), flush=True)
    if not condition:
        raise AssertionError(what)


def computed(triton, values, bias=0, copies=1):
    """Asks, and returns the COUNT; the answer must be right."""
    out, count = ask(triton, values)
    if out != right(values, bias, copies):
        raise AssertionError(f"{values[:3]}...: {out[:3]} is not {right(values, bias)[:3]}")
    return count


def until_hit(triton, values, bias=0, copies=1):
    """Asks until two answers in a row come from the same computation: a writer stores an answer a moment after it."""

    def twice():
        return computed(triton, values, bias, copies) == computed(triton, values, bias, copies)

    lab.wait_until("an answer is stored", twice)
    return computed(triton, values, bias, copies)


def answers(redis):
    """The keys of stored answers; the card of the space is one more record."""
    return [key for key in redis.names("kvf1:*") if b"kvfresp1" in redis.value(key)]


# --- hits and misses


def test_hit_and_miss(folder):
    with lab.Redis(folder) as redis, start(folder, {"store": redis.url}) as triton:
        first = until_hit(triton, [1, 2, 3])
        check("a hit is the same answer, not computed again", computed(triton, [1, 2, 3]) == first)
        check("another input is a miss", computed(triton, [1, 2, 4]) > first)
        large = [float(i % 1000) for i in range(20000)]
        count = until_hit(triton, large)
        check("an answer of 80 KB is a hit to the byte", computed(triton, large) == count)
        hits, misses = (triton.metric(f"nv_cache_num_{kind}_per_model") for kind in ("hits", "misses"))
        check(f"Triton counts them: {hits:.0f} hits, {misses:.0f} misses", hits >= 4 and misses >= 3)
        for _ in range(3):
            status, body = triton.post(
                "/v2/models/toy/infer", {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [-1]}]}
            )
            check("an answer that is an error stays one", status == 400 and "negative" in body["error"], (status, body))
        check("Triton ends well", triton.stop() == 0)
        check("and the log has the counts", "lookups were answered" in triton.log())


def test_two_servers(folder):
    with lab.Redis(folder) as redis:
        one = {"store": redis.url}
        with start(folder, one) as a:
            first = [until_hit(a, [i, 7]) for i in range(20)]
            with start(folder, one) as b:
                second = [computed(b, [i, 7]) for i in range(20)]
                check("what one server computed, the other answers", second == first, (first, second))
                check("... without computing", b.metric("nv_inference_exec_count") == 0)
            shutil.copytree(repository(folder), f"{folder}/copy")
            with start(folder, one, repo=f"{folder}/copy") as b:
                check("so does one with a copy of the models", [computed(b, [i, 7]) for i in range(20)] == first)
            with start(folder, one, bias=5) as b:
                check(
                    "one with another configuration computes",
                    [computed(b, [i, 7], 5) for i in range(20)] == list(range(1, 21)),
                )
            with start(folder, {**one, "namespace": "other"}) as b:
                check(
                    "so does one with another namespace", [computed(b, [i, 7]) for i in range(20)] == list(range(1, 21))
                )
            named = {**one, "models": "none", "namespace": "v1"}
            with start(folder, named) as b, start(folder, named) as c:
                count = until_hit(b, [3, 3])
                check("models=none: the namespace alone names the models", computed(c, [3, 3]) == count)


def test_models_that_change(folder):
    path = repository(folder, 1)
    with lab.Redis(folder) as redis:
        with start(
            folder, {"store": redis.url}, repo=path, more=["--model-control-mode=explicit", "--load-model=toy"]
        ) as triton:
            until_hit(triton, [1, 1], 1)
            configure(path, 3)
            check("a model is loaded again", triton.post("/v2/repository/models/toy/load", {})[0] == 200)
            counts = [computed(triton, [1, 1], 3) for _ in range(3)]
            check("its answers are its own, and computed", len(set(counts)) == 3, counts)
            check("and the log says why", "a file of the models changed" in triton.log())
        with start(folder, {"store": redis.url}, repo=path) as triton:
            until_hit(triton, [1, 1], 3)


def test_ttl(folder):
    with lab.Redis(folder) as redis, start(folder, {"host": "127.0.0.1", "port": redis.port, "ttl": 2}) as triton:
        count = until_hit(triton, [5])
        lab.wait_until("an answer ends with its ttl", lambda: computed(triton, [5]) != count)
        print("  ok   an answer ends with its ttl", flush=True)
        until_hit(triton, [5])


def test_damaged(folder):
    def flip(value, at):
        return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]

    ways = {
        "a byte of the answer": lambda v: flip(v, len(v) // 2),
        "a byte of the header": lambda v: flip(v, 9),
        "the checksum": lambda v: flip(v, len(v) - 1),
        "half of it": lambda v: v[: len(v) // 2],
        "nothing": lambda v: b"",
        "something else": lambda v: b"x" * len(v),
        "more": lambda v: v + b"more",
    }
    with lab.Redis(folder) as redis, start(folder, {"store": redis.url}) as triton:
        for i, (what, way) in enumerate(ways.items()):
            redis.command("FLUSHALL")
            values = [float(i), 1.0]
            lab.wait_until("an answer is stored", lambda v=values: computed(triton, v) and answers(redis))
            count = computed(triton, values)
            (key,) = answers(redis)
            check(f"damaged ({what})", redis.command("SET", key, way(redis.value(key))) == b"+OK\r\n")
            check("... it is computed", computed(triton, values) > count)
            until_hit(triton, values)
        redis.command("FLUSHALL")
        until_hit(triton, [99.0])
        (key,) = answers(redis)
        redis.command("DEL", key), redis.command("HSET", key, "a", "b")
        for _ in range(3):
            computed(triton, [99.0])
        print("  ok   a key of another type is a miss", flush=True)


# --- a Redis that fails


def test_down_at_start(folder):
    with lab.Redis(folder) as redis:
        redis.kill()
        with start(folder, {"host": "127.0.0.1", "port": redis.port}) as triton:
            counts = [computed(triton, [1]) for _ in range(20)]
            check("Redis is down when Triton starts: all is computed", len(set(counts)) == 20)
            redis.start()
            until_hit(triton, [1])
            print("  ok   and it is used once it is there", flush=True)


def test_killed_under_load(folder):
    with lab.Redis(folder) as redis, start(folder, {"store": redis.url, "deadline": 1000}) as triton:
        stop, answered, failed = threading.Event(), [0], []

        def client(seed):
            connection, i = triton.connect(), seed
            while not stop.is_set():
                i = (i * 1103515245 + 12345) % 50
                out, _ = ask(triton, [i, 2 * i], connection)
                if out != right([i, 2 * i]):
                    failed.append((i, out))
                answered[0] += 1

        def guarded(seed):
            try:
                client(seed)
            except Exception as e:  # reported below
                failed.append(e)

        threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
        for t in threads:
            t.start()
        for _ in range(5):
            redis.kill()
            seen = answered[0]
            lab.wait_until("answers without Redis", lambda s=seen: answered[0] > s + 50 or failed)
            redis.start()
            hits = triton.metric("nv_cache_num_hits_per_model")
            lab.wait_until("hits again", lambda h=hits: triton.metric("nv_cache_num_hits_per_model") > h + 50 or failed)
        stop.set()
        for t in threads:
            t.join()
        check(f"Redis is killed five times under load: {answered[0]} answers, all right", not failed, failed[:3])


def test_silent(folder):
    deadline_ms = 400
    with lab.Redis(folder) as redis, start(folder, {"store": redis.url, "deadline": deadline_ms}) as triton:
        until_hit(triton, [1])
        connection = triton.connect()
        redis.pause()
        took = []
        for _ in range(100):
            begin = time.monotonic()
            out, _ = ask(triton, [1], connection)
            took.append((time.monotonic() - begin) * 1000)
            assert out == right([1])
        redis.resume()
        slow = [t for t in took if t > deadline_ms / 2]
        print(
            f"  a silent Redis, deadline {deadline_ms} ms: the slowest of 100 requests took {max(took):.0f} ms, "
            f"the median {statistics.median(took):.1f} ms; {len(slow)} waited for more than half of the deadline",
            flush=True,
        )
        check("after the first the breaker answers", len(slow) <= 10, took)
        until_hit(triton, [1])
        print("  ok   and it is used once it answers", flush=True)


# --- settings


def test_settings(folder):
    with lab.Redis(folder, "--requirepass", "secret") as redis:
        address = {"host": "127.0.0.1", "port": redis.port}
        refuses(folder, {"store": redis.url, "ttll": 5}, "no option 'ttll'", "There are: host, port")
        refuses(folder, {"namespace": "x"}, "no store is named")
        refuses(folder, address, "password")
        refuses(folder, {**address, "password": "wrong"}, "password")
        refuses(folder, {"store": "mem:", "models": "none"}, "needs a namespace=")
        refuses(folder, {"store": "redis://127.0.0.1/0?conss=1"}, "conss")
        with start(
            folder,
            {
                **address,
                "user": "default",
                "password": "secret",
                "db": 0,
                "pool_size": 2,
                "connect_timeout": 500,
                "socket_timeout": 300,
                "wait_timeout": 100,
            },
        ) as triton:
            until_hit(triton, [1])
            print("  ok   all options of the redis cache", flush=True)
        with start(folder, address, env={"TRITONCACHE_REDIS_PASSWORD": "secret"}) as triton:
            until_hit(triton, [2])
            print("  ok   the password from the environment", flush=True)
    with start(folder, {"store": f"mem:?max=64M file:{folder}/answers"}) as triton:
        count = until_hit(triton, [3])
    with start(folder, {"store": f"file:{folder}/answers"}) as triton:
        check("a folder outlives the server", computed(triton, [3]) == count)
    with open(f"{folder}/secret", "w") as f:
        f.write("0123456789abcdef")
    os.chmod(f"{folder}/secret", 0o600)
    with lab.Redis(folder) as redis, start(folder, {"store": redis.url, "secret": f"{folder}/secret"}) as triton:
        until_hit(triton, [4.0] * 100)
        plain = array.array("f", [8.0] * 4).tobytes()
        check(
            "sealed: nothing of the answer is in the clear",
            not any(plain in redis.value(key) for key in redis.names("kvf1:*")),
        )


def test_cluster_sentinel_tls(folder):
    with lab.Redis(folder, "--cluster-enabled", "yes", "--cluster-config-file", f"{folder}/nodes.conf") as redis:
        redis.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        lab.wait_until("the Cluster is up", lambda: b"cluster_state:ok" in redis.command("CLUSTER", "INFO"))
        with start(folder, {"store": f"redis+cluster://127.0.0.1:{redis.port}"}) as triton:
            until_hit(triton, [1])
            print("  ok   a Cluster", flush=True)
    with lab.Redis(folder) as master:
        (port,) = lab.free_ports(1)
        with open(f"{folder}/sentinel.conf", "w") as f:
            f.write(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor cache 127.0.0.1 {master.port} 1\n")
        with open(f"{folder}/sentinel.log", "w") as log:
            sentinel = subprocess.Popen(
                ["redis-server", f"{folder}/sentinel.conf", "--sentinel"], stdout=log, stderr=log
            )
        try:
            with start(folder, {"store": f"redis+sentinel://127.0.0.1:{port}/cache"}) as triton:
                until_hit(triton, [1])
                print("  ok   a master behind a sentinel", flush=True)
        finally:
            sentinel.kill()
            sentinel.wait()
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            f"{folder}/key.pem",
            "-out",
            f"{folder}/cert.pem",
        ],
        check=True,
        capture_output=True,
    )
    (port,) = lab.free_ports(1)
    tls = [
        "--tls-port",
        str(port),
        "--tls-cert-file",
        f"{folder}/cert.pem",
        "--tls-key-file",
        f"{folder}/key.pem",
        "--tls-ca-cert-file",
        f"{folder}/cert.pem",
    ]
    with lab.Redis(folder, *tls):
        address = {
            "host": "127.0.0.1",
            "port": port,
            "tls_enabled": "true",
            "cert": f"{folder}/cert.pem",
            "key": f"{folder}/key.pem",
        }
        with start(folder, {**address, "cacert": f"{folder}/cert.pem"}) as triton:
            until_hit(triton, [1])
            print("  ok   TLS, both sides with certificates", flush=True)
        refuses(folder, address, "certificate")


# --- beside Triton's local cache


def median_hit_us(triton, values, connection, num):
    times = []
    for _ in range(num):
        begin = time.perf_counter()
        ask(triton, values, connection)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def test_beside_local(folder):
    os.makedirs(f"{folder}/caches")
    os.symlink(f"{CACHES}/kvferry", f"{folder}/caches/kvferry")
    os.symlink(f"{lab.TRITON}/caches/local", f"{folder}/caches/local")
    return [
        line
        for copies, text, num in ((8, "4 KB", 200), (2048, "1 MB", 40))
        for line in beside(folder, copies, text, num)
    ]


def beside(folder, copies, text, num):
    """In turns: the time of a request that hits, for the client, and of the lookup alone, as Triton counts it."""
    where = [f"--backend-directory={BACKENDS}", f"--cache-directory={folder}/caches"]
    with lab.Redis(folder) as redis, contextlib.ExitStack() as stack:
        configs = {
            "Triton's local cache": ["local,size=268435456"],
            "mem: and Redis": [f"kvferry,store=mem:?max=256M {redis.url}"],
            "Redis, unix socket": [f"kvferry,store={redis.url}"],
            "Redis, TCP": ["kvferry,host=127.0.0.1", f"kvferry,port={redis.port}"],
        }
        servers = {
            name: stack.enter_context(
                lab.Triton(folder, repository(folder, 0, copies), [*where, *(f"--cache-config={o}" for o in options)])
            )
            for name, options in configs.items()
        }
        values, times, lines = [float(i) for i in range(128)], {name: [] for name in servers}, []
        connections = {name: triton.connect() for name, triton in servers.items()}
        counts = {name: until_hit(triton, values, 0, copies) for name, triton in servers.items()}
        before = {name: in_lookup(triton) for name, triton in servers.items()}
        for _ in range(ROUNDS):
            for name, triton in servers.items():
                times[name].append(median_hit_us(triton, values, connections[name], num))
        base = times["Triton's local cache"]
        for name, triton in servers.items():
            inside = [now - then for now, then in zip(in_lookup(triton), before[name], strict=True)]
            misses = ROUNDS * num - inside[0]
            check(
                f"{text}, {name}: hits, with the same answer",
                computed(triton, values, 0, copies) == counts[name] or misses,
            )
            ratio = statistics.median(t / b for t, b in zip(times[name], base, strict=True))
            lines.append((text, name, statistics.median(times[name]), ratio))
            print(
                f"  {text}  {name:20}  a request {statistics.median(times[name]):6.0f} us, {ratio:5.2f} of local; "
                f"in the lookup {inside[1] / inside[0]:5.0f} us; {misses:.0f} of {ROUNDS * num} missed",
                flush=True,
            )
        return lines


def in_lookup(triton):
    """(hits, microseconds in lookups that hit)"""
    return triton.metric("nv_cache_num_hits_per_model"), triton.metric("nv_cache_hit_duration_per_model")


def main():
    lab.need_all()
    tests = {
        n: f
        for n, f in globals().items()
        if n.startswith("test_") and (not sys.argv[1:] or any(w in n for w in sys.argv[1:]))
    }
    failed, lines = [], []
    for name, test in tests.items():
        print(f"{name[5:]}:", flush=True)
        with lab.folder("triton-cache") as folder:
            try:
                lines = test(folder) or lines
            except Exception as e:  # reported at the end
                print(f"  FAIL {type(e).__name__}: {e}", flush=True)
                failed.append(name[5:])
    figure = "; ".join(f"{text} {name} {us:.0f} us ({ratio:.2f})" for text, name, us, ratio in lines)
    print(
        f"check-triton-cache: {'FAILED: ' + ', '.join(failed) if failed else 'ok'}: {len(tests)} parts; "
        f"a request that hits: {figure}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
