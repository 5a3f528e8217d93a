# SPDX-License-Identifier: Apache-2.0
"""Adapters that change while slots hold KV: a LoRA by request (llama_set_adapters_lora), a control vector
(llama_set_adapter_cvec). Every answer is that of a server without the shim."""
import json, os, struct, subprocess
import lab, lora
from lab import check

ARGS = ["-np", "4", "--kv-unified", "-c", "2048", "--cache-ram", "0"]
LAYERS, WIDTH = 30, 576  # of the model


def ask(server, tokens, slot, scale=None, **more):
    by = {} if scale is None else {"lora": [{"id": 0, "scale": scale}]}
    return server.ask(tokens, 4, id_slot=slot, **by, **more)


def state(server, slot, folder):
    """All that llama.cpp holds of the slot: its tokens, positions, rows."""
    status, answer = server.post(f"/slots/{slot}?action=save", {"filename": "slot"})
    with open(f"{folder}/slot", "rb") as f:
        return f.read() if status == 200 else f"{status} {answer}"


def test_a_slot_that_moves_positions_moves_only_its_own(folder):
    """Slot 0 copies from slot 1, slot 2 has another adapter, then slot 0 moves positions: not those of slot 1."""
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
    check("a slot has copied from another one, and moved its positions", stats["copied_tokens"] >= 128 and moved >= 132,
          str((stats["copied_tokens"], moved)))
    check("the other slot's KV is what it was", len(before) > 100000 and before == after, str((len(before), len(after))))
    check("and goes on from there", last["timings"]["cache_n"] >= 210, str(last["timings"]["cache_n"]))


def test_a_state_is_of_the_adapters_that_computed_it(folder):
    """A slot that one adapter computed is saved, and restored into another slot while another adapter computes."""
    lora.write(f"{folder}/lora.gguf", LAYERS, WIDTH)
    texts = []
    for first in (700, 0): # another text, and the one that is asked for then
        with lab.Server(folder, f"file:{folder}/state{first}", [*ARGS, "--lora", f"{folder}/lora.gguf", "--slot-save-path", folder]) as s:
            t = lab.prompt_of(s, 1000)
            ask(s, t[first:first + 300], 1, 0)
            check("a slot is saved", len(state(s, 1, folder)) > 100000)
            ask(s, t[600:640], 2, 1)
            s.post("/slots/1?action=erase", {})
            check("and restored into another", s.post("/slots/3?action=restore", {"filename": "slot"})[1]["n_restored"] >= 300)
            texts.append(ask(s, t[:300], 0, 1)["content"])
            s.stop()
    stats = s.stats()
    check("what it holds is not copied to a slot of the other adapter", stats["copied_tokens"] == 0 and stats["loaded_tokens"] == 0,
          str((stats["copied_tokens"], stats["loaded_tokens"])))
    check("which answers as it does alone", texts[0] == texts[1], str(texts))


def test_a_control_vector_of_the_server(folder):
    """What is stored without one is not loaded with one, whoever sets adapters in between; each has blocks of its own."""
    control, texts, loaded = f"{folder}/control.gguf", [], []
    lora.write_control(control, LAYERS, WIDTH)
    for more in ([], ["--control-vector", control], [], ["--control-vector", control]):
        with lab.Server(folder, f"file:{folder}/control", [*ARGS, *more], options=["--portable"]) as s:
            texts.append(ask(s, lab.prompt_of(s, 200), 0)["content"])
            s.stop()
        loaded.append(s.stats()["loaded_tokens"])
    check("a control vector changes the answer", texts[0] != texts[1], repr(texts[:2]))
    check("with it and without it blocks are loaded apart", texts[:2] == texts[2:] and loaded == [0, 0, 199, 199], str((texts, loaded)))


PEERS = os.path.join(os.path.dirname(lab.KVFERRY), "test")
STEPS = "pcnpxpdpxplcpzxphdpnpcdpxlpnpfpnp"  # see test/llama/adapters_peer.c


def logits_after(folder, steps, options=None):
    """Of each prompt, one of 16; and the numbers of the run, with options of `kvferry exec`."""
    command = [f"{PEERS}/kvf_adapters_peer", f"{folder}/toy.gguf", f"{folder}/toy-lora.gguf", f"{folder}/logits", steps]
    if options is not None:
        command = [lab.KVFERRY, "exec", "--stats", f"{folder}/stats.json", *options, "--", *command]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if run.returncode != 0:
        raise RuntimeError(run.stderr[-2000:])
    with open(f"{folder}/logits", "rb") as f:
        data = f.read()
    size = len(data) // steps.count("p")
    stats = None
    if options is not None:
        with open(f"{folder}/stats.json") as f:
            stats = json.load(f)
    return [struct.unpack(f"<{size // 4}f", data[i:i + size])[::16] for i in range(0, len(data), size)], stats


def nmse(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a)


def test_a_program_that_changes_its_adapters(folder):
    """LoRAs and control vectors in every order: each prompt as without the shim, and each set's blocks found again."""
    subprocess.run([f"{PEERS}/kvf_toy_peer", "llama", f"{folder}/toy.gguf", "4"], check=True)
    lora.write(f"{folder}/toy-lora.gguf", 4, 512)
    plain = logits_after(folder, STEPS)[0]
    check("each set of adapters gives other logits", min(nmse(plain[0], plain[i]) for i in (1, 3, 5)) > 0.01)
    for mode in ([], ["--portable"]):
        options = ["--store", f"file:{folder}/program{len(mode)}", *mode]
        for turn in ("cold", "warm"):
            seen, stats = logits_after(folder, STEPS, options)
            worst = max(nmse(a, b) for a, b in zip(plain, seen))
            check(f"a program that changes its adapters computes as it does alone ({turn}, {' '.join(mode) or 'default'})", worst < 1e-3, f"{worst:.1e}")
        told = (stats["loaded_tokens"], stats["computed_tokens"], stats["aside_tokens"]["foreign"])
        check("and all is loaded, but under an adapter of no known file", told == (149 * (STEPS.count("p") - 1), STEPS.count("p") - 1, 150), str(told))


def records(store):
    """Keys and what is under them, but for the times and the checksum."""
    found = {}
    for top, _, names in os.walk(store):
        for name in names:
            with open(f"{top}/{name}", "rb") as f:
                data = f.read()
            if data[:4] == b"KVF2" and data[6] & 1 == 0:
                found[os.path.relpath(f"{top}/{name}", store)] = data[:100] + data[128:]
    return found


def test_a_program_that_moves_positions(folder):
    """What it leaves in a store is what a cold run leaves there, whoever shared the cells that were moved."""
    subprocess.run([f"{PEERS}/kvf_toy_peer", "llama", f"{folder}/moved.gguf", "4"], check=True)
    found = {}
    for what in ("cold", "shared", "down", "warm"):
        run = subprocess.run([lab.KVFERRY, "exec", "--store", f"file:{folder}/moves-{what}", "--", f"{PEERS}/kvf_moves_peer",
                              f"{folder}/moved.gguf", what], capture_output=True, text=True, timeout=600)
        check(f"a program that moves positions ends well ({what})", run.returncode == 0, run.stderr[-300:])
        found[what] = records(f"{folder}/moves-{what}")
        same = found[what].keys() & found["cold"].keys()
        other = sum(found[what][k] != found["cold"][k] for k in same)
        check("and all that it stored is what a cold run stores", len(same) > 0 and other == 0, str((len(found[what]), len(same), other)))


lab.main(globals())
