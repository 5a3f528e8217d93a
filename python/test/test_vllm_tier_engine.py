# SPDX-License-Identifier: Apache-2.0
"""The secondary tier in real engines: two starts of vLLM, and one of vLLM without kvferry to compare with. Its worker
between the GPU and the CPU refuses the CPU platform, so vllm_memcpy.py stands in for that one part."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")

import psutil
import vllm_lab
from conftest import RedisServer

if vllm_lab.missing() is not None:
    pytest.skip(vllm_lab.missing() or "", allow_module_level=True)

BLOCK, TOKENS = 32, 300
WHOLE = (TOKENS - 1) // BLOCK * BLOCK
SMALL = {"max_model_len": 1024, "max_num_batched_tokens": 256}


def tiered(*tiers):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "MemcpyTieringSpec",
            "spec_module_path": "vllm_memcpy",
            "cpu_bytes_to_use": 1 << 28,
            "secondary_tiers": list(tiers),
        },
    }


def ours(url, trace):
    return tiered({"type": "KvferryTier", "module_path": "kvferry.vllm", "store": [url], "lookup_timeout": 30,
                   "patience": 30, "trace": str(trace)})  # fmt: skip


def regions_of(pid):
    """The names of the primary tier's memory in the processes of an engine."""
    processes = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    lines = "".join(Path(f"/proc/{one}/maps").read_text() for one in processes).splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "vllm_offload_" in line}


@pytest.fixture(scope="module")
def server(redis_program, tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("vllm-redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def prompt():
    return vllm_lab.tokens()[:TOKENS]


@pytest.fixture(scope="module")
def plain(prompt):
    """Without kvferry: computed, and from vLLM's own prefix cache."""
    with vllm_lab.EngineProcess(None, **SMALL) as engine:
        return [engine.run(prompt, num=4) for _ in range(2)]


@pytest.fixture(scope="module")
def first(server, prompt, tmp_path_factory):
    trace = tmp_path_factory.mktemp("tier") / "trace"
    with vllm_lab.EngineProcess(None, kv_transfer_config=ours(server.unix_url, trace), **SMALL) as engine:
        answer = engine.run(prompt, num=4)
        regions = regions_of(engine.process.pid)
        engine.run(prompt[::-1], num=1)  # until the saves have ended
    return answer, trace, regions


@pytest.fixture(scope="module")
def second(server, first, prompt, tmp_path_factory):
    """A fresh process: loads; and then the server dies."""
    trace = tmp_path_factory.mktemp("tier") / "trace"
    with vllm_lab.EngineProcess(None, kv_transfer_config=ours(server.unix_url, trace), **SMALL) as engine:
        loaded = engine.run(prompt, num=4)
        server.stop()
        engine.reset()
        other = engine.run(prompt[1:], num=4)
    return loaded, other, trace


def test_what_the_first_engine_computes_is_saved(first, plain):
    answer, trace, _ = first
    assert answer["ids"] == plain[0]["ids"]
    assert sum(event["ok"] for event in vllm_lab.events(trace, "save")) >= WHOLE // BLOCK


def test_a_fresh_process_loads_it_and_answers_as_from_vllms_own_cache(second, plain):
    loaded, _, trace = second
    assert sum(event["ok"] for event in vllm_lab.events(trace, "load")) == WHOLE // BLOCK
    assert loaded["cached"] == WHOLE
    assert loaded["ids"] == plain[0]["ids"]
    assert loaded["logprobs"] == plain[1]["logprobs"], "to the bit those of a hit in vLLM's own cache"


def test_a_server_that_dies_stops_nothing(second):
    assert second[1]["finish"] == "length"


def test_the_memory_of_the_primary_tier_has_no_name(first):
    """Already while the engine runs, so that nothing is left however it ends."""
    (name,) = first[2]
    assert name.endswith(".mmap (deleted)")
