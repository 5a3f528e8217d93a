# SPDX-License-Identifier: Apache-2.0
"""The article's recipe as a contender of check_wire: redis-py and numpy, a HASH with the raw bytes of K and V.

Reads jobs from standard input, "op transport where bytes passes serial", answers
each with "warm", waits for "go", and then answers "seconds cpu_seconds".
"""

import resource
import sys
import time

import numpy as np
import redis

NUM = 16


class KVCacheManager:
    """As the article has it."""

    def __init__(self, client):
        self.redis = client

    def save_kv_cache(self, session_id, key_tensor, value_tensor):
        pipe = self.redis.pipeline()
        pipe.hset(session_id, mapping={"keys": key_tensor.tobytes(), "values": value_tensor.tobytes()})
        pipe.expire(session_id, 3600)
        pipe.execute()

    def load_kv_cache(self, session_id):
        data = self.redis.hgetall(session_id)
        if not data:
            return None, None
        return np.frombuffer(data[b"keys"], dtype=np.float16), np.frombuffer(data[b"values"], dtype=np.float16)


def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(op, transport, where, size, passes, serial):
    if transport == "unix":
        client = redis.Redis(unix_socket_path=where)
    else:
        client = redis.Redis(host="127.0.0.1", port=int(where))
    manager = KVCacheManager(client)
    rng = np.random.default_rng(1)
    half = size // 4  # float16 elements of each of the two
    tensors = [
        (
            rng.integers(0, 65535, half, dtype=np.uint16).view(np.float16),
            rng.integers(0, 65535, half, dtype=np.uint16).view(np.float16),
        )
        for _ in range(NUM)
    ]

    def save(s):
        for i, (k, v) in enumerate(tensors):
            manager.save_kv_cache(f"session:{s}:{i}", k, v)

    def load(s):
        for i in range(NUM):
            k, _ = manager.load_kv_cache(f"session:{s}:{i}")
            assert k is not None and len(k) == half

    save(serial)
    if op == "get":
        load(serial)
    print("warm", flush=True)
    sys.stdin.readline()
    spent = seconds = 0.0
    for _ in range(passes):
        before, begin = cpu(), time.monotonic()
        if op == "get":
            load(serial)
        else:
            save(serial)
        seconds += time.monotonic() - begin
        spent += cpu() - before
    print(f"{seconds:.6f} {spent:.6f}", flush=True)
    client.close()


for line in iter(sys.stdin.readline, ""):
    op, transport, where, size, passes, serial = line.split()
    run(op, transport, where, int(size), int(passes), int(serial))
