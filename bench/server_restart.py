# SPDX-License-Identifier: Apache-2.0
"""llama-server, restarted between two requests with the same 4,000-token prompt: the second time to first token must be at least 100
times shorter, and the answer the same. For each kind of memory: plain attention, a real sliding window (the server's default, swa_full off), a toy
hybrid and a toy recurrent model. RATIO (100), TOKENS (4000) and KINDS (a number: only so many of the models) change that for CI."""
import os, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/server"))
import lab

RATIO, TOKENS = float(os.environ.get("RATIO", "100")), int(os.environ.get("TOKENS", "4000"))


def restart(name, model, args=()):
    """(line, good)"""
    with lab.folder() as folder:
        results = []
        store = f"file:{folder}/store"
        args = ["-c", str(TOKENS + 1024), *args]
        for _ in range(2):
            with lab.Server(folder, store, args, model) as server:
                prompt = lab.prompt_of(server, TOKENS)
                server.ask([prompt[-1], *prompt[1:20]], 4)  # the first request of a process is slower in either case
                results.append(server.stream(prompt, 32, return_tokens=True))
                server.stop()
                stats = server.stats()
                print("\n".join(server.said()[-2:]))
        (cold, text, _), (warm, again, _) = results
        good = text == again and cold / warm >= RATIO and stats["loaded_tokens"] >= 0.9 * TOKENS
        print(f"{name}: first token after {cold:.3f} s, after the restart {warm:.4f} s: {cold / warm:.0f} times; "
              f"same answer: {text == again}; loaded {stats['loaded_tokens']} of {TOKENS} tokens", flush=True)
        return cold / warm, good


def toy(folder, kind):
    path = os.path.join(folder, f"{kind}.gguf")
    subprocess.run([os.path.join(os.environ["KVF_BUILD"], "test/kvf_toy_peer"), kind, path], check=True, stdout=subprocess.DEVNULL)
    return path


lab.need_all()
with lab.folder() as toys:
    kinds = [("SmolLM2-135M", None)]
    if os.path.exists(os.environ.get("KVF_GEMMA", "")):
        kinds.append(("Gemma 3 270M, sliding window", os.environ["KVF_GEMMA"]))
    kinds += [("toy jamba, hybrid", toy(toys, "jamba")), ("toy mamba, recurrent", toy(toys, "mamba"))]
    kinds = kinds[:int(os.environ.get("KINDS", "4"))]
    ratios = [(name, *restart(name, model)) for name, model in kinds]
good = all(r[2] for r in ratios)
print(f"check-server-restart: {'ok' if good else 'FAILED'}: " + ", ".join(f"{n} {r:.0f}" for n, r, _ in ratios) +
      f" times (>= {RATIO:.0f}), same answers")
sys.exit(0 if good else 1)
