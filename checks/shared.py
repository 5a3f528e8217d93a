# SPDX-License-Identifier: Apache-2.0
"""check-shared: 8 parallel clients of one llama-server with one 3,000-token system prompt.

Its prefill must be computed once, counted in tokens, and not again by a second server with the same store. CLIENTS (8),
TOKENS (3000)."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/server"))
import lab

CLIENTS, TOKENS, BLOCK = int(os.environ.get("CLIENTS", "8")), int(os.environ.get("TOKENS", "3000")), 64


def ask_all(server, system, questions):
    answers = lab.parallel([lambda q=q: server.ask(system + q, 8) for q in questions])
    return [a["content"] for a in answers], sum(len(q) for q in questions)


lab.need_all()
with lab.folder() as folder:
    store, computed, answers, own = f"file:{folder}/store", [], [], 0
    args = ["-np", str(CLIENTS), "--kv-unified", "-c", str((CLIENTS + 1) * (TOKENS + 128))]
    for i in range(2):
        with lab.Server(folder, store, args) as server:
            system = lab.prompt_of(server, TOKENS)
            questions = [
                server.post("/tokenize", {"content": f"\n\nQuestion {k}: what does part {k} of it say? Answer:"})[1][
                    "tokens"
                ]
                for k in range(CLIENTS)
            ]
            texts, own = ask_all(server, system, questions)
            answers.append(texts)
            server.stop()
            stats = server.stats()
            computed.append(stats["computed_tokens"])
            print(
                f"server {i + 1}: prompts of {stats['prompt_tokens']} tokens: {stats['loaded_tokens']} loaded, "
                f"{stats['copied_tokens']} copied from other slots, {stats['resident_tokens']} resident, "
                f"{stats['computed_tokens']} computed",
                flush=True,
            )
    # Each client computes its own question, and the part of the system prompt behind its last whole block.
    rest = own + CLIENTS * (BLOCK - 1)
    good = computed[0] + BLOCK >= TOKENS and computed[0] <= TOKENS + rest and computed[1] <= rest
    print(
        f"check-shared: {'ok' if good else 'FAILED'}: {CLIENTS} clients, a system prompt of {TOKENS} tokens: "
        f"{computed[0]} tokens computed by the first server (<= {TOKENS} + {rest} of the questions and the ends of "
        f"blocks), {computed[1]} by the second (<= {rest})"
    )
    sys.exit(0 if good else 1)
