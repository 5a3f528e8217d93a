# SPDX-License-Identifier: Apache-2.0
"""check-hf: a prompt of 2,000 tokens that another process has computed, in Hugging Face Transformers.

The first token comes at least 10 times sooner than without the store (median of 3, through a private Redis), and the
logits are to the bit those of the process that computed. Before that, python/test/test_hf.py: batches with padding,
toys like GPT-2, Llama and Gemma in float32 and bfloat16, corrupt, missing and foreign blocks.
TOKENS (2000), RATIO (10), TESTS (1; 0 = without the tests). Needs KVF_ENGINES and KVF_HF_MODEL (make setup-engines)."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
TOKENS, RATIO = int(os.environ.get("TOKENS", "2000")), float(os.environ.get("RATIO", "10"))
BLOCK, ANSWER, REPEATS = 128, 8, 3


def say(text):
    print(text, flush=True)


# ---- one process with the model


def load_model():
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # several would wait for one another beside other programs
    folder = os.environ["KVF_HF_MODEL"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (ROOT / "checks/document.txt").read_text()
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :TOKENS]
    assert ids.shape[1] == TOKENS, f"the document has only {ids.shape[1]} tokens"
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class FirstToken:
    """A streamer that notes when the first token is there."""

    def __init__(self):
        self.start, self.seconds, self.calls = time.monotonic(), None, 0

    def put(self, value):
        self.calls += 1
        if self.calls == 2:  # the first has the prompt
            self.seconds = time.monotonic() - self.start

    def end(self):
        pass


def ask(generate, batch):
    """Seconds to the first token, and the logits of the answer."""
    import torch

    streamer = FirstToken()
    answer = generate(**batch, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, streamer=streamer,
                      output_logits=True, return_dict_in_generate=True)  # fmt: skip
    return streamer.seconds, torch.stack(answer.logits)


def process(role, url, folder):
    """cold: asks the model alone, and then with an empty store. warm: asks with what the other has stored."""
    import torch

    import kvferry
    from kvferry.hf import PrefixCache

    model, batch = load_model()
    ask(
        model.generate, {name: tensor[:, :100] for name, tensor in batch.items()}
    )  # the first request of a process is slow
    result = {}
    if role == "cold":
        result["plain"], plain = ask(model.generate, batch)
        torch.save(plain, f"{folder}/plain")
    with kvferry.Store(url) as store:
        start = time.monotonic()
        prefix = PrefixCache(model, store, block_tokens=BLOCK)
        result["named"] = time.monotonic() - start
        answers = [ask(prefix.generate, batch) for _ in range(1 if role == "cold" else REPEATS)]
        assert store.flush(60) == (True, 0)
        result |= {"seconds": median(answer[0] for answer in answers), "why": prefix.why, **vars(prefix.counters)}
    assert all(torch.equal(answer[1], answers[0][1]) for answer in answers)
    torch.save(answers[0][1], f"{folder}/{role}")
    Path(f"{folder}/{role}.json").write_text(json.dumps(result))


# ---- the check


def run(role, url, folder):
    subprocess.run([sys.executable, __file__, role, url, folder], check=True)
    return json.loads(Path(f"{folder}/{role}.json").read_text())


def compare(folder):
    import torch

    plain, cold, warm = (torch.load(f"{folder}/{name}") for name in ("plain", "cold", "warm"))
    assert torch.equal(cold, warm), f"logits differ by up to {(cold - warm).abs().max().item()}"
    assert torch.equal(plain.argmax(-1), cold.argmax(-1)), "the tokens are not those of the model alone"
    return (plain[0] - cold[0]).abs().max().item()


def test():
    say("the tests")
    rc = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "python/test/test_hf.py"], cwd=ROOT, check=False
    ).returncode
    if rc != 0:
        sys.exit(f"check-hf: python/test/test_hf.py failed (exit status {rc})")


def check():
    sys.path.insert(0, str(ROOT / "python/test"))
    from conftest import RedisServer

    if os.environ.get("TESTS", "1") != "0":
        test()
    with tempfile.TemporaryDirectory(prefix="kvf-hf-") as folder:
        server = RedisServer(Path(folder))
        try:
            say(f"{TOKENS} tokens, computed twice")
            cold = run("cold", server.unix_url, folder)
            say(f"  first token after {cold['plain']:.2f} s alone, {cold['seconds']:.2f} s with an empty store")
            say(f"{TOKENS} tokens, from the store, in another process")
            warm = run("warm", server.unix_url, folder)
            say(f"  first token after {warm['seconds']:.3f} s; the model named in {warm['named']:.2f} s")
        finally:
            server.stop()
        blocks = (TOKENS - 1) // BLOCK * BLOCK
        assert (cold["computed_tokens"], cold["why"]) == (blocks, None), cold
        assert (warm["loaded_tokens"], warm["computed_tokens"]) == (REPEATS * blocks, 0), warm
        say(f"logits are equal to the bit, and within {compare(folder):.1e} to those of the model alone, in one piece")
    ratio = min(cold["plain"], cold["seconds"]) / warm["seconds"]
    say(
        f"check-hf: the first token of {TOKENS} comes {ratio:.1f} times sooner in a second process (at least {RATIO:g})"
    )
    return 0 if ratio >= RATIO else 1


if len(sys.argv) > 1:
    process(*sys.argv[1:])
else:
    missing = [name for name in ("KVF_ENGINES", "KVF_HF_MODEL") if not os.path.exists(os.environ.get(name, ""))]
    if missing:
        sys.exit(f"check-hf: {' and '.join(missing)} is not there: make setup-engines")
    sys.exit(check())
