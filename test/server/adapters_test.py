# SPDX-License-Identifier: Apache-2.0
"""Adapters that change while slots hold KV: a LoRA by request, a control vector. Every answer is that of a server without the shim."""
import math, sys, time
import lab, lora

ARGS = ["-np", "4", "--kv-unified", "-c", "2048", "--cache-ram", "0"]
LAYERS, WIDTH = 30, 576  # of the model


def check(what, condition, detail=""):
    print(f"{'ok  ' if condition else 'FAIL'} {what} {detail}", flush=True)
    if not condition:
        raise AssertionError(what)


def first(answer):
    """The first token's five most likely ones, with their logarithms."""
    return {p["id"]: p["logprob"] for p in answer["completion_probabilities"][0]["top_logprobs"]}


def distance(a, b):
    """0: the same. In other cells sums round differently: some 0.01; of another context it is far more."""
    return max(abs(a[t] - b[t]) for t in set(a) & set(b)) if len(set(a) & set(b)) >= 3 else math.inf


def ask(server, tokens, slot, scale=None, **more):
    by = {} if scale is None else {"lora": [{"id": 0, "scale": scale}]}
    return server.ask(tokens, 4, id_slot=slot, n_probs=5, **by, **more)


def state(server, slot, folder):
    """All that llama.cpp holds of the slot: its tokens, positions, rows."""
    status, answer = server.post(f"/slots/{slot}?action=save", {"filename": "slot"})
    with open(f"{folder}/slot", "rb") as f:
        return f.read() if status == 200 else f"{status} {answer}"


def test_slots_that_share_cells_over_a_change(folder):
    """Slots 0 and 1 share cells, slot 2 has another adapter, then slot 0 moves positions: not those of slot 1."""
    lora.write(f"{folder}/lora.gguf", LAYERS, WIDTH)
    with lab.Server(folder, f"file:{folder}/share", [*ARGS, "--cache-reuse", "32", "--lora", f"{folder}/lora.gguf",
                                                     "--slot-save-path", folder]) as s:
        t = lab.prompt_of(s, 1000)
        ask(s, t[:192] + t[400:420], 1, 0)
        ask(s, t[:192] + t[300:320], 0, 0)
        ask(s, t[600:640], 2, 1)
        before = state(s, 1, folder)
        moved = ask(s, t[:20] + t[60:192] + t[900:905], 0, 0)["timings"]["cache_n"]
        after = state(s, 1, folder)
        last = ask(s, t[:192] + t[400:420] + t[500:510], 1, 0)
        s.stop()
    stats = s.stats()
    check("two slots shared cells, and one of them moved its positions", stats["copied_tokens"] >= 128 and moved >= 132,
          str((stats["copied_tokens"], moved)))
    check("the other slot's KV is what it was", len(before) > 100000 and before == after, str((len(before), len(after))))
    check("and goes on from there", last["timings"]["cache_n"] >= 210, str(last["timings"]["cache_n"]))


lab.need_all()
with lab.folder() as top:
    wanted = sys.argv[1:]
    tests = [(n, f) for n, f in list(globals().items()) if n.startswith("test_") and (not wanted or any(w in n for w in wanted))]
    failed = []
    for name, test in tests:
        begin = time.monotonic()
        try:
            test(top)
        except Exception as e:
            failed.append(name)
            print(f"FAIL {name}: {type(e).__name__}: {e}")
        print(f"     {name}: {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{len(tests) - len(failed)} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)
