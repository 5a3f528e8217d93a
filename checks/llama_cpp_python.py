# SPDX-License-Identifier: Apache-2.0
"""check-llama-cpp-python: a prompt of 2,000 tokens in llama-cpp-python, in a process that has not seen it.

The time to the first token with a KvferryCache must be at least 50 times shorter than without a cache, and shorter than
with llama-cpp-python's own LlamaDiskCache, with the same tokens. Each run is a process of its own, on the real model
with the settings that Llama has by default. Warm runs of both caches alternate, ROUNDS (5) times; medians count. TOKENS
(2000) and RATIO (50) change that for CI."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "5"))
TOKENS = int(os.environ.get("TOKENS", "2000"))
RATIO = float(os.environ.get("RATIO", "50"))
ANSWER = 24


def child(kind: str, folder: str) -> None:
    """One completion in this process: prints its time to the first token, and its tokens."""
    import time

    from llama_cpp import Llama, LlamaDiskCache

    import kvferry.llama_cpp

    threads = os.cpu_count() or 1
    llm = Llama(os.environ["KVF_MODEL"], n_ctx=TOKENS + 256, n_threads=threads, n_threads_batch=threads, verbose=False)
    llm.set_cache(None)
    llm.create_completion("Once upon a time", max_tokens=4)  # the first one of a process is slower in any case
    llm.reset()
    if kind == "kvferry":
        llm.set_cache(kvferry.llama_cpp.KvferryCache(f"file:{folder}/kvferry"))
    elif kind == "disk":
        llm.set_cache(LlamaDiskCache(f"{folder}/disk"))
    text = (Path(__file__).parent.parent / "docs" / "llama.md").read_bytes()
    prompt = llm.tokenize(text)[:TOKENS]
    begin, first = time.perf_counter(), None
    for _ in llm.create_completion(prompt, max_tokens=ANSWER, temperature=0.0, stream=True):
        first = first or time.perf_counter() - begin
    end = time.perf_counter() - begin
    said = {"first": first, "all": end, "tokens": llm.input_ids[len(prompt) : llm.n_tokens].tolist(), "report": {}}
    if isinstance(llm.cache, kvferry.llama_cpp.KvferryCache):
        assert llm.cache.flush(60)
        said["report"] = llm.cache.report
    print(json.dumps(said))


def run(kind: str, folder: str) -> dict:
    env = os.environ | {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "100")}
    command = [sys.executable, __file__, "--child", kind, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        sys.exit(f"check-llama-cpp-python: a run failed:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    print(f"  {kind}: first token after {said['first']:.3f} s, {ANSWER} tokens after {said['all']:.3f} s", flush=True)
    return said


def size_mb(folder: str) -> float:
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()) / 1e6


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        print(f"cold runs of {TOKENS} tokens: without a cache, and with each cache empty", flush=True)
        cold = {kind: run(kind, folder) for kind in ("none", "kvferry", "disk")}
        kept, theirs_kept = size_mb(f"{folder}/kvferry"), size_mb(f"{folder}/disk")
        print(f"stored: kvferry {kept:.0f} MB, LlamaDiskCache {theirs_kept:.0f} MB")
        print("warm runs, each in a new process", flush=True)
        warm: dict[str, list[dict]] = {"kvferry": [], "disk": []}
        for _ in range(ROUNDS):
            for kind, runs in warm.items():
                runs.append(run(kind, folder))
    ours, theirs = [statistics.median(r["first"] for r in warm[kind]) for kind in ("kvferry", "disk")]
    sooner = min(cold["none"]["first"], cold["kvferry"]["first"]) / ours
    same = all(r["tokens"] == cold["none"]["tokens"] for r in [*cold.values(), *warm["kvferry"], *warm["disk"]])
    found = min(r["report"]["stored_tokens"] for r in warm["kvferry"])
    good = sooner >= RATIO and ours < theirs and same and found == TOKENS - 1
    print(
        f"first token: cold {cold['none']['first']:.2f} s, kvferry {ours * 1e3:.0f} ms, LlamaDiskCache "
        f"{theirs * 1e3:.0f} ms; found {found} of {TOKENS} tokens; the answer's tokens are the same: {same}"
    )
    print(
        f"check-llama-cpp-python: {'ok' if good else 'FAILED'}: {sooner:.0f} times sooner than cold (>= {RATIO:.0f}), "
        f"{theirs / ours:.1f} times sooner than LlamaDiskCache, same tokens"
    )
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main())
