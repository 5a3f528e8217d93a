# SPDX-License-Identifier: Apache-2.0
"""check-server-restart: llama-server, restarted between two requests with the same 4,000-token prompt.

The second time to first token must be at least 100 times shorter, with the same answer. For each kind of memory: plain
attention, a real sliding window (the server's default, swa_full off), a toy hybrid and a toy recurrent model. Restarted
RESTARTS (3) times; the median counts. RATIO (100), TOKENS (4000) and KINDS (how many of the models) change that for CI.

The toys have 16 layers, because in a smaller model the output layer, which a prefill computes only once, takes most of
the time of its single token."""

import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/server"))
import lab

RATIO, TOKENS = float(os.environ.get("RATIO", "100")), int(os.environ.get("TOKENS", "4000"))
RESTARTS = int(os.environ.get("RESTARTS", "3"))
LAYERS = "16"


def first_token(folder, store, args, model):
    """(seconds, the answer, the server's counters) of a new process"""
    with lab.Server(folder, store, args, model) as server:
        prompt = lab.prompt_of(server, TOKENS)
        server.ask([prompt[-1], *prompt[1:20]], 4)  # the first request of a process is slower in either case
        seconds, text, _ = server.stream(prompt, 32, return_tokens=True)
        server.stop()
        print("\n".join(server.said()[-2:]))
        return seconds, text, server.stats()


def restart(name, model, args=()):
    """(how many times sooner, good)"""
    with lab.folder() as folder:
        run = folder, f"file:{folder}/store", ["-c", str(TOKENS + 1024), *args], model
        cold, text, _ = first_token(*run)
        warm = [first_token(*run) for _ in range(RESTARTS)]
    sooner, loaded = cold / statistics.median(w[0] for w in warm), min(w[2]["loaded_tokens"] for w in warm)
    same = all(w[1] == text for w in warm)
    print(
        f"{name}: first token after {cold:.3f} s, after a restart {', '.join(f'{w[0]:.4f}' for w in warm)} s: "
        f"{sooner:.0f} times; "
        f"same answer: {same}; loaded {loaded} of {TOKENS} tokens",
        flush=True,
    )
    return sooner, same and sooner >= RATIO and loaded >= 0.9 * TOKENS


def toy(folder, kind):
    path = os.path.join(folder, f"{kind}.gguf")
    subprocess.run(
        [os.path.join(os.environ["KVF_BUILD"], "test/kvf_toy_peer"), kind, path, LAYERS],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return path


lab.need_all()
with lab.folder() as toys:
    kinds = [("SmolLM2-135M", None)]
    if os.path.exists(os.environ.get("KVF_GEMMA", "")):
        kinds.append(("Gemma 3 270M, sliding window", os.environ["KVF_GEMMA"]))
    kinds += [("toy jamba, hybrid", toy(toys, "jamba")), ("toy mamba, recurrent", toy(toys, "mamba"))]
    kinds = kinds[: int(os.environ.get("KINDS", "4"))]
    ratios = [(name, *restart(name, model)) for name, model in kinds]
good = all(r[2] for r in ratios)
print(
    f"check-server-restart: {'ok' if good else 'FAILED'}: "
    + ", ".join(f"{n} {r:.0f}" for n, r, _ in ratios)
    + f" times (>= {RATIO:.0f}), same answers"
)
sys.exit(0 if good else 1)
