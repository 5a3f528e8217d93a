# SPDX-License-Identifier: Apache-2.0
"""check-vllm: a fresh vLLM on the CPU and a prompt of 2,048 tokens that another process has computed.

All whole blocks are loaded, the tokens are those of vLLM without kvferry, the log-probabilities are to the bit those
of a hit in vLLM's own prefix cache, and the first token comes at least 10 times sooner (median of 3 prompts).
TOKENS (2048), RATIO (10), PROMPTS (3), SCRATCH. Needs KVF_ENGINES and KVF_HF_MODEL (make setup-engines)."""

import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
import vllm_lab
from conftest import RedisServer

TOKENS, RATIO = int(os.environ.get("TOKENS", "2048")), float(os.environ.get("RATIO", "10"))
PROMPTS, BLOCK, ANSWER = int(os.environ.get("PROMPTS", "3")), 32, 8
WHOLE = (TOKENS - 1) // BLOCK * BLOCK


def say(text):
    print(text, flush=True)


def prompts():
    """Prompts without a common block: each begins with another token, and goes on in the same text."""
    tokens = vllm_lab.tokens()
    assert len(tokens) >= TOKENS, f"the document has only {len(tokens)} tokens"
    return [tokens[i : i + 1] + tokens[: TOKENS - 1] for i in range(500, 500 + PROMPTS)]


def warm_up(engine, tokens):
    """The first request of a process is slow, and so is the first that asks for log-probabilities."""
    for _ in range(2):
        engine.run(tokens[-100:], num=2)
        engine.reset()


def ask(engine, prompt):
    """The time to the first token, and then an answer."""
    first = engine.run(prompt)
    answer = engine.run(prompt, num=ANSWER)
    return first["seconds"], first["cached"], answer


def without(prompts_):
    """Computed cold, and from vLLM's own prefix cache."""
    with vllm_lab.EngineProcess(None) as engine:
        say(f"an engine without kvferry: started in {engine.seconds:.0f} s")
        warm_up(engine, prompts_[0])
        results = [ask(engine, prompt) for prompt in prompts_]
    for seconds, cached, _ in results:
        say(f"  first token after {seconds:.2f} s, {cached} tokens cached")
    return results


def save(url, prompts_):
    with vllm_lab.EngineProcess({"store": [url], "lookup_timeout": 10}) as engine:
        say(f"an engine that saves: started in {engine.seconds:.0f} s")
        warm_up(engine, prompts_[0])
        for prompt in prompts_:
            say(f"  first token after {engine.run(prompt)['seconds']:.2f} s")


def load(url, prompts_, trace):
    with vllm_lab.EngineProcess({"store": [url], "lookup_timeout": 10, "trace": str(trace)}) as engine:
        say(f"a fresh engine that loads: started in {engine.seconds:.0f} s")
        warm_up(engine, prompts_[0])
        results = [ask(engine, prompt) for prompt in prompts_]
    moved = [e for e in vllm_lab.events(trace, "load") if e["ok"] == WHOLE // BLOCK]
    for (seconds, cached, _), e in zip(results, moved, strict=True):
        moving = f"{e['bytes'] / 1e6:.0f} MB loaded in {e['seconds']:.3f} s"
        say(f"  first token after {seconds:.2f} s, {cached} tokens cached; {moving}")
    return results


def main():
    missing = vllm_lab.missing()
    if missing is not None:
        say(f"check-vllm: skipped: {missing}")
        return 77
    with tempfile.TemporaryDirectory(prefix="check-vllm-") as folder:
        server = RedisServer(Path(folder))
        try:
            texts = prompts()
            cold = without(texts)
            save(server.unix_url, texts)
            warm = load(server.unix_url, texts, Path(folder) / "trace")
        finally:
            server.stop()
    ratio = statistics.median(c[0] for c in cold) / statistics.median(w[0] for w in warm)
    faults = [
        what
        for c, w in zip(cold, warm, strict=True)
        for wrong, what in (
            (w[1] != WHOLE, f"{w[1]} of {WHOLE} tokens were loaded"),
            (w[2]["ids"] != c[2]["ids"], "other tokens"),
            (w[2]["logprobs"] != c[2]["logprobs"], "other log-probabilities than those of vLLM's own prefix cache"),
        )
        if wrong
    ] + ([f"only {ratio:.1f} times sooner"] if ratio < RATIO else [])
    verdict = "FAILED: " + "; ".join(faults) if faults else "ok: tokens and log-probabilities as from vLLM's own cache"
    say(
        f"check-vllm: {verdict}: {TOKENS} tokens in a fresh process, {WHOLE} of them loaded: first token "
        f"{ratio:.1f} times sooner (>= {RATIO:g})"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
