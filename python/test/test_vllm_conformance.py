# SPDX-License-Identifier: Apache-2.0
"""The conformance set (conformance.py) for the connector, in real engines: few starts of vLLM serve all cases, with the
store and its faults changed under them. Every answer is compared with that of an engine without kvferry."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")

import torch
import vllm_lab
from conftest import RedisServer, until
from safetensors.torch import save_file
from slow_proxy import SlowProxy

import kvferry

if vllm_lab.missing() is not None:
    pytest.skip(vllm_lab.missing() or "", allow_module_level=True)

BLOCK, BLOCKS, ANSWER = 32, 4, 6
PROMPT = BLOCKS * BLOCK + 12
# Few pages, so that requests are preempted, and steps smaller than all prompts together.
ENGINE = {"num_gpu_blocks_override": 48, "max_model_len": 512, "max_num_batched_tokens": 256, "enable_lora": True,
          "max_lora_rank": 8, "disable_log_stats": False}  # fmt: skip
SHORT = bool(os.environ.get("SHORT"))
OPTIONS = {"lookup_timeout": 10, "load_timeout": 4, "save_timeout": 2, "patience": 30}


@pytest.fixture(scope="module")
def texts():
    """A long text's tokens. Each case takes its prompts from another place."""
    return vllm_lab.tokens()


class Lab:
    """An engine with kvferry, its store, the proxy between them, and an engine without kvferry. Unless the run is to be
    short, also other engines on the same store. They start at once: each waits for its children most of the time."""

    def __init__(self, server, trace):
        self.server, self.trace = server, trace
        self.proxy = SlowProxy(server.port, None)
        server.stop()  # the case store_down_at_start
        near = {"store": [server.tcp_url], **OPTIONS}
        wanted = {"ours": ({**near, "store": [self.proxy.url], "trace": str(trace)}, {}), "plain": (None, {})}
        if not SHORT:
            wanted |= {"second": (near, {}), "blocks of 64": (near, {"block_size": 64})}
            wanted |= {"bfloat16": (near, {"dtype": "bfloat16"})}
        with ThreadPoolExecutor(len(wanted)) as pool:
            started = pool.map(lambda one: vllm_lab.EngineProcess(one[0], **{**ENGINE, **one[1]}), wanted.values())
            self.engines = dict(zip(wanted, started, strict=True))
        self.engine, self.plain = self.engines["ours"], self.engines["plain"]

    def close(self):
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(lambda engine: engine.__exit__(None, None, None), self.engines.values()))
        self.proxy.close()

    def begin(self):
        """Nothing is stored, and nothing is wrong."""
        self.proxy.rate = None
        self.server.resume() if self.server.runs() else self.server.start()
        self.server.command("FLUSHALL")
        self.forget()

    def forget(self):
        """Drops vLLM's own prefix cache, so that the next request asks the store."""
        until(lambda: self.engine.do(do="reset"), "all pages are free")

    def run(self, *prompts, **more):
        return self.engine.run(*prompts, num=ANSWER, **more)

    def store(self, prompt, **more):
        """Computes a prompt, saves its blocks and forgets them."""
        answer = self.run(prompt, **more)
        until(lambda: len(self.blocks()) >= len(prompt) // BLOCK, "the blocks are saved")
        self.forget()
        return answer

    def blocks(self):
        """What is stored, in the order of the prompt."""
        with kvferry.Store(self.server.unix_url) as store:
            found = [entry for entry in store.walk() if entry.kind == "block"]
        return sorted(found, key=lambda entry: entry.first_token)

    def loads(self):
        return vllm_lab.events(self.trace, "load")


@pytest.fixture(scope="module")
def lab(redis_program, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-conformance")
    server = RedisServer(folder)
    lab = Lab(server, folder / "trace")
    yield lab
    lab.close()
    server.stop()


@pytest.fixture(scope="module")
def plain(lab):
    """The engine without kvferry."""
    return lab.plain


@pytest.fixture
def ask(lab, plain):
    """Asks the engine of the lab, and compares with the one without kvferry. Returns the answer."""
    lab.begin()

    def ask(prompt, **more):
        answer = lab.run(prompt, **more)
        same(answer, plain.run(prompt, num=ANSWER, **more))
        return answer

    return ask


def same(answer, reference):
    assert answer["finish"] == "length"
    assert vllm_lab.differs(answer, reference) is None


def prompt_at(texts, place):
    prompt = texts[place * 150 : place * 150 + PROMPT]
    assert len(prompt) == PROMPT
    return prompt


# ---- hits and misses


def test_conformance_store_down_at_start(lab, plain, texts):
    """The engine of the lab was started without a server."""
    prompt = prompt_at(texts, 0)
    same(lab.run(prompt), plain.run(prompt, num=ANSWER))
    lab.server.start()

    def is_used():
        lab.forget()
        same(lab.run(prompt), plain.run(prompt, num=ANSWER))
        return any(load["ok"] == BLOCKS for load in lab.loads())

    until(is_used, "the store is used when it is there")


def test_conformance_full_prompt_hit(lab, ask, texts):
    prompt = prompt_at(texts, 1)
    lab.store(prompt)
    assert ask(prompt)["cached"] == BLOCKS * BLOCK


def test_conformance_one_block_hit(lab, ask, texts):
    prompt = prompt_at(texts, 2)
    lab.store(prompt[: BLOCK + 5])
    assert ask(prompt)["cached"] == BLOCK


@pytest.mark.parametrize("num, loaded", [(-1, BLOCKS - 1), (0, BLOCKS - 1), (1, BLOCKS)])
def test_conformance_exactly_n_blocks_and_one_more_or_less(lab, ask, texts, num, loaded):
    prompt = prompt_at(texts, 3)
    lab.store(prompt)
    assert ask(prompt[: BLOCKS * BLOCK + num])["cached"] == loaded * BLOCK, "a token is left to compute"


def test_conformance_miss_in_the_middle(lab, ask, texts):
    prompt = prompt_at(texts, 4)
    lab.store(prompt)
    gone = lab.blocks()[2]
    with kvferry.Store(lab.server.unix_url) as store:
        assert store.remove(gone.space, gone.key)
    assert ask(prompt)["cached"] == 2 * BLOCK
    until(lambda: len(lab.blocks()) == BLOCKS, "it is saved anew")


def test_conformance_salt_apart(lab, ask, texts):
    prompt = prompt_at(texts, 5)
    lab.store(prompt, salt="alice")
    assert ask(prompt, salt="bob")["cached"] == 0
    assert ask(prompt)["cached"] == 0
    lab.forget()
    assert ask(prompt, salt="alice")["cached"] == BLOCKS * BLOCK


# ---- bad records


def is_mended(lab, ask, prompt, why):
    """The third block was bad: the two before it are used, the answer is right, and the block is stored anew."""
    lab.forget()
    ask(prompt)
    assert (lab.loads()[-1]["ok"], lab.loads()[-1]["why"]) == (2, why)
    until(lambda: all(block.damage is None for block in lab.blocks()), "it is saved anew")
    lab.forget()
    ask(prompt)
    assert lab.loads()[-1]["ok"] == BLOCKS


def test_conformance_corrupt_record(lab, ask, texts):
    prompt = prompt_at(texts, 6)
    lab.store(prompt)
    lab.server.command("SETRANGE", lab.blocks()[2].name, "5000", "damaged")
    is_mended(lab, ask, prompt, "checksum")


def test_conformance_record_of_another_space(lab, ask, texts):
    """A whole record, of the same size and the same tokens."""
    prompt = prompt_at(texts, 7)
    lab.store(prompt)
    right = lab.blocks()[2]
    with kvferry.Store(lab.server.unix_url) as store, kvferry.Queue(store) as queue:
        space = kvferry.Space(store, {"engine": "another", "model": "0" * 64, "kv": "other"}, block_tokens=BLOCK)
        tokens = prompt[right.first_token : right.first_token + BLOCK]
        key = space.chain(tokens)[: kvferry.KEY_BYTES]
        payload = bytes(right.payload_bytes)
        queue.submit_save(space, key, [payload], tokens=tokens, first_token=right.first_token)
        assert queue.wait(30) and queue.reap()[0].num_ok == 1
        wrong = next(entry for entry in store.walk(space=space.digest) if entry.kind == "block")
    assert wrong.stored_bytes == right.stored_bytes
    assert lab.server.command("COPY", wrong.name, right.name, "REPLACE") == b":1\r\n"
    lab.forget()
    ask(prompt)
    assert not lab.loads() or lab.loads()[-1]["ok"] <= 2
    lab.forget()
    ask(prompt)
    assert lab.loads()[-1]["ok"] == BLOCKS, "it is saved anew"


# ---- a store that fails


def fails_at_load(lab, ask, prompt, fault):
    """A fault between the lookup and the load."""
    lab.store(prompt)
    lab.proxy.at_next("GET", fault)
    ask(prompt)
    assert not lab.proxy.is_armed(), "it has asked for a record"
    assert lab.loads()[-1]["ok"] < BLOCKS


def is_used_again(lab, ask, prompt):
    def loads():
        lab.forget()
        ask(prompt)
        return lab.loads()[-1]["ok"] == BLOCKS

    until(loads, "the store is used again", 120)


def test_conformance_eviction_between_lookup_and_load(lab, ask, texts):
    prompt = prompt_at(texts, 8)
    fails_at_load(lab, ask, prompt, lambda: lab.server.command("FLUSHALL"))
    is_used_again(lab, ask, prompt)


def test_conformance_store_down_in_the_middle(lab, ask, texts):
    prompt = prompt_at(texts, 9)
    fails_at_load(lab, ask, prompt, lab.server.stop)
    lab.server.start()
    is_used_again(lab, ask, prompt)


def test_conformance_store_hangs_while_loading(lab, ask, texts):
    prompt = prompt_at(texts, 10)
    fails_at_load(lab, ask, prompt, lab.server.pause)
    lab.server.resume()
    is_used_again(lab, ask, prompt)


def test_conformance_store_slow_past_the_deadline(lab, ask, texts):
    prompt = prompt_at(texts, 11)

    def slow():
        lab.proxy.rate = 50_000

    fails_at_load(lab, ask, prompt, slow)
    lab.proxy.rate = None
    is_used_again(lab, ask, prompt)


def test_conformance_store_hangs_while_saving(lab, ask, texts):
    """The pages are used for another prompt meanwhile; what is stored in the end is right or absent."""
    prompts = [prompt_at(texts, 12 + i) for i in range(3)]
    lab.proxy.at_next("SET", lab.server.pause)
    ask(prompts[0])
    until(lambda: not lab.proxy.is_armed(), "a save is under way")
    lab.forget()
    for prompt in prompts[1:]:
        ask(prompt)
    lab.server.resume()
    for prompt in prompts:
        is_used_again(lab, ask, prompt)


# ---- requests that end, wait or meet


def test_conformance_abort_while_loading(lab, ask, texts):
    prompt = prompt_at(texts, 15)
    lab.store(prompt)
    before = len(lab.loads())

    def slow():
        lab.proxy.rate = 100_000

    lab.proxy.at_next("GET", slow)
    lab.engine.do(do="begin", prompt=prompt)
    until(lambda: not lab.proxy.is_armed(), "it loads")
    lab.engine.do(do="abort")
    lab.proxy.rate = None
    ask(prompt_at(texts, 16))
    lab.forget()  # no page is kept
    assert len(lab.loads()) > before
    assert ask(prompt)["cached"] == BLOCKS * BLOCK


def preempted(lab):
    return lab.engine.do(do="metrics")["vllm:num_preemptions"]


def test_conformance_preemption_while_storing(lab, plain, ask, texts):
    """More requests than pages, while the server hangs with saves in flight."""
    prompts = [texts[10 + i : 165 + i] for i in range(9)]  # five pages each, and a sixth soon: more than there are
    before = preempted(lab)
    lab.proxy.at_next("SET", lab.server.pause)
    answers = lab.engine.run(*prompts, num=24)
    assert not lab.proxy.is_armed() and preempted(lab) > before
    lab.server.resume()
    for answer, reference in zip(answers, plain.run(*prompts, num=24), strict=True):
        same(answer, reference)
    for prompt in prompts:
        lab.forget()
        ask(prompt)
    lab.forget()
    assert ask(prompts[0])["cached"] > 0


def test_conformance_sixteen_requests_over_two_rounds(lab, plain, ask, texts):
    prompts = [texts[20 + i % 4 : 120 + i % 4] + texts[1000 + i * 20 : 1020 + i * 20] for i in range(16)]
    references = plain.run(*prompts, num=ANSWER)
    before = sum(load["ok"] for load in lab.loads())
    for _ in range(2):
        for answer, reference in zip(lab.run(*prompts), references, strict=True):
            same(answer, reference)
        until(lambda: len(lab.blocks()) >= 12, "the beginnings are saved")
        lab.forget()
    assert sum(load["ok"] for load in lab.loads()) - before >= 12, "the second round loads"


def test_conformance_lora_on_and_off(lab, ask, texts, tmp_path):
    adapter = make_adapter(tmp_path / "adapter")
    prompt = prompt_at(texts, 17)
    without = lab.store(prompt)
    with_adapter = ask(prompt, lora=adapter)
    assert with_adapter["cached"] == 0
    assert with_adapter["logprobs"] != without["logprobs"]
    until(lambda: len(lab.blocks()) == 2 * BLOCKS, "both are saved")
    for lora in (adapter, None):
        lab.forget()
        assert ask(prompt, lora=lora)["cached"] == BLOCKS * BLOCK


def make_adapter(folder):
    """An adapter of the weights of all queries, of rank 4."""
    config = json.loads(Path(os.environ["KVF_HF_MODEL"], "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(3)
    folder.mkdir()
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights[f"{name}A.weight"] = torch.randn(4, width, generator=generator) * 0.1
        weights[f"{name}B.weight"] = torch.randn(width, 4, generator=generator) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
         "bias": "none"}))  # fmt: skip
    return str(folder)


# ---- other engines

more_starts = pytest.mark.skipif(SHORT, reason="SHORT: it takes another engine")


@more_starts
def test_conformance_two_processes_on_one_store(lab, plain, ask, texts):
    prompt = prompt_at(texts, 18)
    lab.store(prompt)
    answer = lab.engines["second"].run(prompt, num=ANSWER)
    assert answer["cached"] == BLOCKS * BLOCK
    same(answer, plain.run(prompt, num=ANSWER))


@more_starts
def test_conformance_two_writers_of_one_key(lab, plain, ask, texts):
    prompt = prompt_at(texts, 19)
    reference = plain.run(prompt, num=ANSWER)
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda engine: engine.run(prompt, num=ANSWER), (lab.engine, lab.engines["second"]))
        for answer in answers:
            assert answer["cached"] == 0
            same(answer, reference)
    until(lambda: len(lab.blocks()) == BLOCKS, "the blocks are saved, once")
    lab.forget()
    assert ask(prompt)["cached"] == BLOCKS * BLOCK


def finds_nothing(lab, engine, prompt):
    """Another engine on the same store computes, and its own blocks are its own."""
    lab.store(prompt)
    first = engine.run(prompt, num=ANSWER)
    assert first["cached"] == 0
    whole = PROMPT // engine.block
    until(lambda: len(lab.blocks()) == BLOCKS + whole, "they are saved beside those of the first")
    engine.reset()
    second = engine.run(prompt, num=ANSWER)
    assert second["cached"] == whole * engine.block
    same(second, first)
    return first


@more_starts
def test_conformance_restart_with_another_block_size(lab, plain, ask, texts):
    prompt = prompt_at(texts, 20)
    same(finds_nothing(lab, lab.engines["blocks of 64"], prompt), plain.run(prompt, num=ANSWER))


@more_starts
def test_conformance_restart_with_another_dtype(lab, ask, texts):
    finds_nothing(lab, lab.engines["bfloat16"], prompt_at(texts, 21))
