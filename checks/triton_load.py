#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Triton's backend under load, beside llama.cpp alone, on this machine now.

usage: checks/triton_load.py [--check] [--rounds N] [--tokens N]

1. Eight clients stream at once; tokens a second of all, beside llama.cpp alone with as many sequences
   (check_triton_bench), interleaved, the best round of each. None of the eight may be starved.
2. Three clients stream; the longest time between two tokens of one of them: undisturbed, while a prompt of 3,000 tokens
   is loaded from the store, and while another one is computed.

With --check the exit status is 0 only if the speed is at least 0.95 of llama.cpp's, each client got at least half of
what the fastest got, and the longest gap while a prompt is loaded is at most twice the one undisturbed."""

import argparse
import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "test/triton"))
import lab
import served

CLIENTS, CONTEXT, PROMPT, ANSWER = 8, 512, 32, 96


def stream(triton, model, ids, num, times):
    """Adds the time of each token."""
    for event in served.Stream(triton, model, input_ids=ids, max_tokens=num, temperature=1.0, top_k=0, seed=1):
        assert "error" not in event, event
        many = len(event["output_ids"]) if isinstance(event["output_ids"], list) else 1
        times += [time.monotonic()] * many


def together(triton):
    """(tokens a second of all clients while all stream, tokens of the slowest by those of the fastest)."""
    times = [[] for _ in range(CLIENTS)]
    served.in_parallel(
        [lambda i=i: stream(triton, "eight", served.tokens(i, PROMPT), ANSWER, times[i]) for i in range(CLIENTS)]
    )
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    inside = [sum(begin < x <= end for x in t) for t in times]
    return sum(inside) / (end - begin), min(inside) / max(inside)


def alone():
    command = [
        f"{served.BUILD}/checks/check_triton_bench",
        served.MODEL,
        CLIENTS,
        CONTEXT,
        PROMPT,
        ANSWER,
        len(os.sched_getaffinity(0)),
    ]
    return float(
        subprocess.run(
            [str(c) for c in command],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "GOMP_SPINCOUNT": "100"},
        ).stdout
    )


def speed(folder, rounds):
    with tempfile.TemporaryDirectory() as repository:
        served.add_model(repository, "eight", slots=CLIENTS, context_size=CONTEXT)
        with served.start(folder, repository) as triton:
            ours, fair, theirs = [], 1, []
            for _ in range(rounds):
                rate, share = together(triton)
                ours, fair, theirs = ours + [rate], min(fair, share), theirs + [alone()]
            triton.stop()
    print(
        f"8 clients: {max(ours):.1f} tokens a second, llama.cpp alone {max(theirs):.1f}; the slowest client got "
        f"{fair:.2f} of the fastest",
        flush=True,
    )
    return max(ours) / max(theirs), fair


def longest_gap(times, begin, end):
    return max((b - a for t in times for a, b in itertools.pairwise(t) if b >= begin and a <= end), default=0)


def gaps(folder, long):
    with lab.Redis(folder, "--maxmemory", "1gb") as redis, tempfile.TemporaryDirectory() as repository:
        served.add_model(repository, "m", store=redis.url, slots=4, context_size=4096)
        with served.start(folder, repository) as triton:
            served.answer(triton, "m", input_ids=served.tokens(100, long), max_tokens=1)
            triton.stop()
        with served.start(folder, repository) as triton:
            times, found = [[] for _ in range(3)], {}

            def client(i):
                with contextlib.suppress(OSError):  # the server has ended
                    stream(triton, "m", served.tokens(200 + i, PROMPT), 3900, times[i])

            threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(3)]
            for t in threads:
                t.start()
            lab.wait_until("all stream", lambda: all(len(t) > 20 for t in times))
            before = len(times[0])
            begin = time.monotonic()
            lab.wait_until("undisturbed", lambda: len(times[0]) > before + 60, 600)
            found["undisturbed"] = longest_gap(times, begin, time.monotonic())
            for name, seed in (("loaded", 100), ("computed", 300)):
                begin = time.monotonic()
                got = served.answer(triton, "m", input_ids=served.tokens(seed, long), max_tokens=1)
                found[name] = longest_gap(times, begin, time.monotonic())
                found[name + " in"] = time.monotonic() - begin
                assert (got["loaded_tokens"] > 0.9 * long) == (name == "loaded"), got
            triton.stop()
    print("longest gap: " + ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in found.items()), flush=True)
    return found["loaded"] / found["undisturbed"], found["computed"] / found["undisturbed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=3000, help="of the long prompt")
    args = parser.parse_args()
    served.need_all()
    with lab.folder("load") as folder:
        ratio, fair = speed(folder, args.rounds)
        loaded, computed = gaps(folder, args.tokens)
    holds = ratio >= 0.95 and fair >= 0.5 and loaded <= 2
    print(
        f"check-triton-load: {ratio:.2f} of llama.cpp's speed (at least 0.95), longest gap {loaded:.1f} times while a "
        f"prompt is loaded (at most 2), {computed:.1f} times while it is computed"
    )
    sys.exit(0 if holds or not args.check else 1)


if __name__ == "__main__":
    main()
