# SPDX-License-Identifier: Apache-2.0
"""check-article: the few lines of redis-py and numpy that sessions are compatible with, against the C API, both ways.

    article.py TOOL SERVER_PORT URL FOLDER

TOOL is test/shell/session_tool.c, a program of the public C API; URL names the same server. checks/article.sh runs it.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import redis


class KVCacheManager:
    def __init__(self, host="localhost", port=6379, db=0):
        self.r = redis.Redis(host=host, port=port, db=db)

    def save_kv_cache(self, session_id, key_tensor, value_tensor):
        with self.r.pipeline() as p:
            p.hset(session_id, mapping={"keys": key_tensor.tobytes(), "values": value_tensor.tobytes()})
            p.expire(session_id, 3600).execute()

    def load_kv_cache(self, session_id):
        k, v = self.r.hmget(session_id, "keys", "values")
        return (k, v) if k is not None and v is not None else (None, None)


def read_spread(r, session_id, name):
    """What a plain reader adds for arrays above the server's bulk limit: docs/session-format.md."""
    meta = json.loads(r.hget(session_id, "meta"))
    num = -(-meta[name]["bytes"] // meta["part_bytes"])
    return b"".join(r.hmget(session_id, name, *(f"{name}.{i}" for i in range(1, num))))


def same(a, b, what):
    if hashlib.sha256(a).digest() != hashlib.sha256(b).digest():
        sys.exit(f"{what}: {len(a)} bytes became {len(b)}, or others")


def main():
    tool, port, url, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
    rng = np.random.default_rng(1)
    manager = KVCacheManager("127.0.0.1", port)
    files = [str(folder / "k"), str(folder / "v")]
    checked = {"sessions": 0, "bytes": 0}

    def c(*args):
        done = subprocess.run([tool, *args], stdout=subprocess.PIPE, text=True, timeout=120)
        if done.returncode != 0:
            sys.exit(f"session_tool {' '.join(args)}: exit status {done.returncode}: {done.stdout}")
        return done.stdout.split()

    def c_save(name, k, v, how="save"):
        for path, array in zip(files, (k, v), strict=True):
            pathlib.Path(path).write_bytes(array.tobytes())
        c(how, url, name, *files, str(k.dtype), *map(str, k.shape))

    def c_load(name, how="load"):
        said = c(how, url, name, *files)
        return said, *(pathlib.Path(path).read_bytes() for path in files)

    def both_ways(k, v):
        name = f"session:{checked['sessions']}"
        manager.save_kv_cache(name, k, v)  # Python writes, C reads: raw bytes
        said, ck, cv = c_load(name)
        same(k.tobytes(), ck, "keys, Python to C")
        same(v.tobytes(), cv, "values, Python to C")
        assert said == ["raw"], said
        c_save(name, k, v)  # C writes (over it), Python reads: arrays again
        pk, pv = manager.load_kv_cache(name)
        same(k.tobytes(), pk, "keys, C to Python")
        same(v.tobytes(), pv, "values, C to Python")
        assert np.array_equal(np.frombuffer(pk, k.dtype).reshape(k.shape), k)
        assert 3000 < manager.r.ttl(name) <= 3600, manager.r.ttl(name)
        said, ck, cv = c_load(name)  # C reads what C wrote: with dtype and shape
        same(k.tobytes(), ck, "keys, C to C")
        same(v.tobytes(), cv, "values, C to C")
        assert said == ["meta", str(k.dtype), *map(str, k.shape)], said
        if k.nbytes < 1 << 20:
            c_save(name, v, k, "save-pieces")  # in pieces on the C side
            said, ck, cv = c_load(name, "load-into")
            same(v.tobytes(), ck, "keys in pieces")
            same(k.tobytes(), cv, "values in pieces")
            pk, pv = manager.load_kv_cache(name)
            same(v.tobytes(), pk, "keys in pieces, C to Python")
            same(k.tobytes(), pv, "values in pieces, C to Python")
            c_save(name, k, v)
        manager.save_kv_cache(name, v, k)  # a plain writer over a session with meta: the meta is not about these bytes
        done = subprocess.run([tool, "load", url, name, *files], stdout=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == (0 if k.tobytes() == v.tobytes() else 3), done
        said, ck, cv = c_load(name, "load-raw")
        same(v.tobytes(), ck, "keys, Python over C to C")
        same(k.tobytes(), cv, "values, Python over C to C")
        assert said[0] == ("meta" if k.tobytes() == v.tobytes() else "raw"), said
        manager.save_kv_cache(name, k[:1], v)  # of another length
        done = subprocess.run([tool, "load", url, name, *files], stdout=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 3 and "KVF_SESSION_RAW" in done.stdout, done
        c("load-raw", url, name, *files)
        same(k[:1].tobytes(), pathlib.Path(files[0]).read_bytes(), "shorter keys, Python over C to C")
        manager.r.delete(name)
        checked["sessions"] += 1
        checked["bytes"] += k.nbytes + v.nbytes

    small = rng.standard_normal((2, 3, 4)).astype(np.float32)
    both_ways(small, small + 1)
    both_ways(np.arange(7, dtype=np.uint8), np.arange(7, 0, -1, dtype=np.uint8))
    both_ways(np.frombuffer(bytes(range(256)) + b"\r\n\0$-1\r\n\r", np.uint8), np.zeros(265, np.uint8))
    real = rng.standard_normal((32, 8, 1024, 128), dtype=np.float32).astype(
        np.float16
    )  # 64 MiB: layers, heads, tokens, width
    began = time.monotonic()
    both_ways(real, real[::-1].copy())
    print("two arrays of 64 MiB there and back in %.1f s, with all programs started" % (time.monotonic() - began))

    # No such session, on both sides.
    assert manager.load_kv_cache("nobody") == (None, None)
    assert subprocess.run([tool, "load", url, "nobody", *files], stdout=subprocess.DEVNULL).returncode == 3

    # Above the server's limit for one value, the arrays are spread, and meta says how. 1 MiB is the lowest limit.
    limit = manager.r.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
    manager.r.config_set("proto-max-bulk-len", 1 << 20)
    spread = rng.integers(0, 256, 5 * (1 << 19) + 3, dtype=np.uint8)
    c_save("spread", spread, spread[::-1].copy(), "save-pieces")
    same(spread.tobytes(), read_spread(manager.r, "spread", "keys"), "spread keys")
    same(spread[::-1].tobytes(), read_spread(manager.r, "spread", "values"), "spread values")
    for how in "load", "load-into":
        said, ck, cv = c_load("spread", how)
        same(spread.tobytes(), ck, "spread keys, C to C")
        same(spread[::-1].tobytes(), cv, "spread values, C to C")
    manager.r.config_set("proto-max-bulk-len", limit)
    checked["sessions"] += 1
    checked["bytes"] += 2 * spread.nbytes
    print(
        f"{checked['sessions']} sessions, {checked['bytes']} bytes: the same byte for byte from C to redis-py and back"
    )


main()
