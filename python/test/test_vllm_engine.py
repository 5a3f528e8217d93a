# SPDX-License-Identifier: Apache-2.0
"""The connector in real engines: two starts of vLLM for all cases, since each takes a minute."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")

import vllm_lab
from conftest import RedisServer
from test_vllm import damage_every_value

if vllm_lab.missing() is not None:
    pytest.skip(vllm_lab.missing() or "", allow_module_level=True)

BLOCK, TOKENS = 32, 300
WHOLE = (TOKENS - 1) // BLOCK * BLOCK
# Few pages, so that requests are preempted, and steps smaller than a prompt.
SMALL = {"num_gpu_blocks_override": 65, "max_model_len": 1024, "max_num_batched_tokens": 256}


@pytest.fixture
def own_server(redis_program, tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server(redis_program, tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("vllm-redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def prompt():
    return vllm_lab.tokens()[:TOKENS]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm-trace") / "trace"


@pytest.fixture(scope="module")
def first(server, prompt, trace):
    """What the first engine says: computed, from its own prefix cache, and what faults make of it."""
    options = {"store": [server.unix_url], "trace": str(trace), "lookup_timeout": 10, "patience": 30}
    answers = {}
    with vllm_lab.EngineProcess(options, **SMALL, disable_log_stats=False) as engine:
        answers["computed"] = engine.run(prompt, num=4)
        answers["own cache"] = engine.run(prompt, num=4)
        engine.reset()
        answers["loaded"] = engine.run(prompt, num=4)
        answers["salted"] = engine.run(prompt, num=4, salt="apart")
        engine.reset()
        answers["both"] = engine.run(prompt, prompt, num=4)
        # Damage all that is stored: everything is computed, and stored anew.
        damage_every_value(server, "redis.call('SETRANGE',k,redis.call('STRLEN',k)-40,string.rep('x',16))")
        engine.reset()
        answers["damaged"] = engine.run(prompt, num=4)
        engine.reset()
        answers["repaired"] = engine.run(prompt, num=4)
        # Preemption: more requests than pages for them.
        many = [prompt[i : i + 250] for i in range(8)]
        answers["prompts"], answers["many"] = many, engine.run(*many, num=12)
        answers["metrics"] = engine.do(do="metrics")
        # A silent server, and a dead one.
        engine.reset()
        server.pause()
        answers["silent"] = engine.run(prompt, num=4)
        server.resume()
        answers["log"] = engine.text()
    return answers


def test_what_is_loaded_computes_what_vllms_own_cache_computes(first):
    assert first["computed"]["cached"] == 0
    assert first["own cache"]["cached"] == first["loaded"]["cached"] == WHOLE
    assert first["loaded"]["logprobs"] == first["own cache"]["logprobs"], "to the bit"
    assert first["loaded"]["ids"] == first["computed"]["ids"]


@pytest.mark.parametrize("case", ["salted", "damaged", "repaired", "silent"])
def test_faults_change_no_answer(first, case):
    assert first[case]["ids"] == first["computed"]["ids"]
    assert first[case]["finish"] == "length"


def test_requests_side_by_side(first):
    for answer in first["both"]:
        assert answer["ids"] == first["computed"]["ids"]
    assert first["metrics"]["vllm:num_preemptions"] > 0
    assert all(answer["finish"] == "length" for answer in first["many"])


def test_what_was_damaged_is_stored_anew(first, trace):
    loads = vllm_lab.events(trace, "load")
    damaged = [e for e in loads if e["why"] == "checksum"]
    assert damaged and damaged[0]["ok"] == 0
    after = loads[loads.index(damaged[-1]) + 1]
    assert (after["ok"], after["why"]) == (WHOLE // BLOCK, None)


def test_vllm_shows_the_counters(first):
    assert first["metrics"]["vllm:kvferry_loaded_blocks"] >= 2 * WHOLE // BLOCK
    assert "kvferry is on" in first["log"]


def test_a_new_process_loads_it(first, server, prompt, tmp_path):
    trace = tmp_path / "trace"
    options = {"store": [server.unix_url], "trace": str(trace), "lookup_timeout": 10, "patience": 30}
    with vllm_lab.EngineProcess(options, **SMALL) as engine:
        answer = engine.run(prompt, num=4)
        assert answer["cached"] == WHOLE
        assert answer["ids"] == first["computed"]["ids"]
        assert answer["logprobs"] == first["own cache"]["logprobs"], "to the bit"
        for ids, before in zip(first["prompts"], first["many"], strict=True):
            after = engine.run(ids)
            assert after["cached"] >= 6 * BLOCK, "saved by requests that were preempted, and right:"
            assert abs(after["logprobs"][0] - before["logprobs"][0]) < 1e-3
        server.stop()
        engine.reset()
        assert engine.run(prompt, num=4)["ids"] == first["computed"]["ids"], "without the store"
    assert vllm_lab.events(trace, "load")[0]["ok"] == WHOLE // BLOCK


def test_blocks_of_an_answer_and_events(own_server, tmp_path):
    """Generated tokens are in blocks too, to the bit as in vLLM's own cache. And what is stored is published."""
    prompt = vllm_lab.tokens()[:288]
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
    options = {"store": [own_server.unix_url], "lookup_timeout": 10, "patience": 30}
    with (
        vllm_lab.Events(endpoint) as published,
        vllm_lab.EngineProcess(options, kv_events_config=events) as engine,
    ):
        answer = engine.run(prompt, num=70)
        longer = prompt + answer["ids"]
        own = engine.run(longer, num=4)
        stored = published.until(lambda seen: len(seen.get("STORAGE", [])) >= len(longer) // BLOCK - 1)
        engine.reset()
        loaded = engine.run(longer, num=4)
        assert loaded["cached"] == own["cached"] >= len(longer) // BLOCK * BLOCK - BLOCK
        assert loaded["logprobs"] == own["logprobs"], "to the bit"
        assert loaded["ids"] == own["ids"]
    assert set(stored["STORAGE"]) <= set(stored["CPU"] if "CPU" in stored else stored["GPU"]), "vLLM's own hashes"
