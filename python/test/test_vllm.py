# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM, both halves, on real stores: what vLLM calls, in its order, without the minutes that it takes
to start (test_vllm_engine.py has those)."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from array import array
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")
pytest.importorskip("torch")

import msgspec
import torch
import vllm_lab
from conftest import until
from slow_proxy import SlowProxy
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_engine import BLOCK, FIELDS, Engine, configs

import kvferry
from kvferry._weights import folder_digest
from kvferry.vllm import identity, plan, scheduler, worker
from kvferry.vllm.connector import HOOKS, KvferryConnector
from kvferry.vllm.messages import Step
from kvferry.vllm.settings import Settings

IDS = list(range(100, 142))  # 10 whole blocks of 4, and 2 tokens


@pytest.fixture
def engine(monkeypatch):
    engines = []

    def start(url, **more):
        engines.append(Engine(monkeypatch, url, **more))
        return engines[-1]

    yield start
    for one in engines:
        one.close()


# ---- hits and misses


@pytest.mark.parametrize("kind", ["unix_url", "tcp_url"])
def test_a_second_engine_loads_what_the_first_has_computed(engine, redis, kind):
    url = getattr(redis, kind)
    assert engine(url).run(IDS) == 0
    assert engine(url).run(IDS) == 40


def test_a_folder_serves_as_a_store(engine, folder_url):
    assert engine(folder_url).run(IDS) == 0
    assert engine(folder_url).run(IDS) == 40


@pytest.mark.parametrize("num, loaded", [(3, 0), (4, 0), (5, 4), (39, 36), (40, 36), (41, 40)])
def test_one_token_is_always_computed(engine, redis, num, loaded):
    engine(redis.unix_url).run(IDS)
    assert engine(redis.unix_url).run(IDS[:num]) == loaded


def test_a_prompt_that_goes_on_differently_loads_the_common_blocks(engine, redis):
    engine(redis.unix_url).run(IDS)
    assert engine(redis.unix_url).run(IDS[:22] + [7] * 20) == 20


def test_blocks_of_a_prefill_in_chunks_and_of_generated_tokens_are_saved(engine, redis):
    first = engine(redis.unix_url)
    request = first.request(IDS[:18])
    first.prefill(request, chunk=7)
    for token in IDS[18:30]:  # as if generated: each step computes the token before
        request.append_output_token_ids(token)
        first.allocate(request, request.num_tokens, 0)
        first.step({request: (request.num_tokens - 1, 1)})
    first.settle()
    assert engine(redis.unix_url).run(IDS) == 28


def test_what_the_engine_has_is_not_loaded(engine, redis):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    assert second.ask(request, computed=24) == 16
    assert second.ask(second.request(IDS), computed=40) == 0


@pytest.mark.parametrize("role, loads, saves", [("kv_producer", False, True), ("kv_consumer", True, False)])
def test_a_role_is_one_half_of_the_work(engine, redis, role, loads, saves):
    assert engine(redis.unix_url, role=role).run(IDS) == 0
    assert (engine(redis.unix_url).run(IDS) == 40) == saves
    assert (engine(redis.unix_url, role=role).run(IDS) == 40) == loads


def test_lookups_of_a_request_are_bounded(engine, redis, tmp_path):
    """Each reset forgets the answer. A request that lives through many asks no more."""
    trace = tmp_path / "trace"
    one = engine(redis.unix_url, trace=str(trace))
    request = one.request(IDS)
    for _ in range(10):
        assert one.ask(request) == 0
        one.scheduler.reset_cache()
    lookups = [line for line in trace.read_text().splitlines() if '"lookup"' in line]
    assert len(lookups) == scheduler.MAX_LOOKUPS


def test_salts_are_apart(engine, redis):
    one = engine(redis.unix_url)
    one.run(IDS, salt="alice")
    assert one.run(IDS, salt="bob") == 0
    assert one.run(IDS) == 0
    assert engine(redis.unix_url).run(IDS, salt="alice") == 40


def test_the_last_hash_in_a_block_names_it(engine, redis):
    """vLLM may hash units smaller than a block (trap 11): the first unit of a block does not know the second."""
    first = engine(redis.unix_url, hash_tokens=2)
    first.run(IDS)
    other = IDS[:18] + [7, 7] + IDS[20:]  # the first half of block 4 is the same, the second is not
    assert engine(redis.unix_url, hash_tokens=2).run(other) == 16
    assert engine(redis.unix_url, hash_tokens=2).run(IDS) == 40


def test_another_identity_finds_nothing(engine, redis):
    engine(redis.unix_url).run(IDS)
    assert engine(redis.unix_url, fields={**FIELDS, "kv": "bf16"}).run(IDS) == 0


def test_all_ranks_must_have_a_block(engine, redis):
    engine(redis.unix_url, tp=2).run(IDS)
    second = engine(redis.unix_url, tp=2)
    request = second.request(IDS)
    space = second.scheduler._scheduler._space
    hashes = [bytes(h) for h in request.block_hashes]
    rank_1 = space.keys_of(hashes, (1).to_bytes(4, "little") + bytes(4))
    with kvferry.Store(redis.unix_url) as store:
        assert store.remove(space.digest, rank_1[5 * 32 : 6 * 32])
    assert second.ask(request) == 20
    assert second.load(request) == 20
    second.check(request, range(5))


def test_two_requests_with_one_prefix_load_it_once(engine, redis):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    a, b = second.request(IDS), second.request(IDS)
    external = second.ask(a)
    second.allocate(a, external, external)
    assert second.scheduler.get_num_new_matched_tokens(b, 0) == (None, False), "the first has it in a moment"
    until(lambda: a.request_id in second.step({}).finished_recving, "the first load ends")
    assert second.ask(b) == 40, "without a prefix cache hit it loads after all"


def test_a_lookup_is_one_question_however_often_it_is_asked(engine, redis):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    assert [second.ask(request) for _ in range(30)] == [40] * 30
    assert second.scheduler._scheduler._requests[request.request_id].lookups == 1


def test_a_call_has_no_more_blocks_than_it_may(engine, redis, monkeypatch):
    monkeypatch.setattr(kvferry, "MAX_BLOCKS", 7)
    first = engine(redis.unix_url)
    first.run(IDS)
    first.run(IDS)
    assert engine(redis.unix_url).run(IDS) == 28


def test_requests_that_can_not_be_named_are_left_alone(engine, redis):
    one = engine(redis.unix_url)
    adapters = identity.Adapters()
    request = SimpleNamespace(pooling_params=None, resumable=False, mm_features=[], lora_request=None)
    assert adapters.suffix(request) == b""
    assert adapters.suffix(SimpleNamespace(**{**vars(request), "pooling_params": object()})) is None
    assert adapters.suffix(SimpleNamespace(**{**vars(request), "resumable": True})) is None
    skips = one.request(IDS)
    skips.skip_reading_prefix_cache = True
    assert one.ask(skips) == 0


def image(identifier, pixels, offset=10, length=4):
    data = None if pixels is None else MultiModalKwargsItem({"pixels": MultiModalFieldElem(pixels, None)})
    return MultiModalFeatureSpec(data, "image", identifier, PlaceholderRange(offset, length))


@pytest.mark.parametrize("identifier", ["my-image", "0" * 64], ids=["a UUID", "a UUID hashed with options"])
def test_an_image_is_its_content_not_its_name(engine, redis, identifier):
    """Two clients of one store give other images one name. The identifier is the same, and so are vLLM's hashes."""
    mine, other = (torch.full((3, 2), value, dtype=torch.bfloat16) for value in (1, 2))
    assert engine(redis.unix_url).run(IDS, images=[image(identifier, mine)]) == 0
    assert engine(redis.unix_url).run(IDS, images=[image(identifier, other)]) == 8, "what is before the image"
    assert engine(redis.unix_url).run(IDS, images=[image(identifier, mine)]) == 40
    assert engine(redis.unix_url).run(IDS, images=[image(identifier, mine.reshape(2, 3))]) == 8
    more = [image(identifier, mine), image("1" * 64, other, offset=24)]
    assert engine(redis.unix_url).run(IDS, images=more) == 24, "what is before the second image"


@pytest.mark.parametrize("data", [None, [], object()], ids=["elsewhere", "nothing", "unknown"])
def test_an_image_whose_content_is_not_here_is_left_alone(engine, redis, data):
    assert [engine(redis.unix_url).run(IDS, images=[image("0" * 64, data)]) for _ in range(2)] == [0, 0]


def test_an_adapter_is_its_files_not_its_name(engine, redis, tmp_path):
    def lora(folder, content):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(content)
        return LoRARequest("mine", 1, str(tmp_path / folder))

    one = lora("a", b"one")
    engine(redis.unix_url).run(IDS, lora=one)
    assert engine(redis.unix_url).run(IDS) == 0, "without the adapter"
    assert engine(redis.unix_url).run(IDS, lora=one) == 40
    assert engine(redis.unix_url).run(IDS, lora=lora("a", b"two")) == 0, "other files under the same name and path"
    third = engine(redis.unix_url)
    assert third.run(IDS, lora=lora("a", b"one")) == 40
    again = lora("a", b"two")
    again.load_inplace = True
    assert third.run([1, *IDS], lora=again) == 0
    assert third.scheduler._scheduler._adapters.suffix(SimpleNamespace(
        pooling_params=None, mm_features=[], lora_request=again
    )).hex() == folder_digest(again.lora_path, identity.log)  # fmt: skip


def test_an_adapter_whose_files_change_while_a_request_waits_is_left_alone(engine, redis, tmp_path):
    """The engine reads them when it schedules the request, and the name is from its arrival."""
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"one")
    lora = LoRARequest("mine", 1, str(tmp_path))
    one = engine(redis.unix_url)
    request = one.request(IDS, lora=lora)
    file.write_bytes(b"two")
    one.prefill(request)
    one.settle()
    one.end(request)
    file.write_bytes(b"one")
    assert engine(redis.unix_url).run(IDS, lora=lora) == 0


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"other"), lambda file: file.unlink()])
def test_an_adapter_whose_files_change_while_it_is_loaded_is_left_alone(tmp_path, change):
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"one")
    adapters, lora = identity.Adapters(), LoRARequest("mine", 1, str(tmp_path))
    request = SimpleNamespace(pooling_params=None, resumable=False, mm_features=[], lora_request=lora)
    assert adapters.suffix(request) == adapters.suffix(request) != b""
    change(file)
    assert adapters.suffix(request) is None
    file.write_bytes(b"one")
    assert adapters.suffix(request) is None, "nobody knows which files vLLM has read"


# ---- faults: the same answer, and no request fails


def damage_every_value(redis, how):
    """Changes each stored record that is large enough to hold a payload."""
    script = (
        "local n=0 for _,k in ipairs(redis.call('KEYS','*')) do if redis.call('TYPE',k).ok=='string' and "
        f"redis.call('STRLEN',k)>=384 then {how} n=n+1 end end return n"
    )
    reply = redis.command("EVAL", script, "0")
    assert reply.startswith(b":") and int(reply[1:]) > 0, reply


def test_a_corrupt_block_is_computed_and_stored_anew(engine, redis):
    engine(redis.unix_url).run(IDS)
    damage_every_value(redis, "redis.call('SETRANGE',k,redis.call('STRLEN',k)-9,'damaged')")
    second = engine(redis.unix_url)
    assert second.run(IDS) == 0
    assert engine(redis.unix_url).run(IDS) == 40


def test_after_a_failed_load_a_request_asks_no_more(engine, redis):
    engine(redis.unix_url).run(IDS)
    damage_every_value(redis, "redis.call('SETRANGE',k,redis.call('STRLEN',k)-9,'damaged')")
    second = engine(redis.unix_url)
    request = second.request(IDS)
    assert second.load(request) == 0
    assert second.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_missing_block_ends_the_hit(engine, redis):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    space = second.scheduler._scheduler._space
    keys = space.keys_of([bytes(h) for h in request.block_hashes], bytes(8))
    with kvferry.Store(redis.unix_url) as store:
        assert store.remove(space.digest, keys[6 * 32 : 7 * 32])
    assert second.load(request) == 24
    second.check(request, range(6))


def test_eviction_between_lookup_and_load_is_a_miss(engine, redis):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    assert second.ask(request) == 40
    redis.command("FLUSHALL")
    assert second.load(request) == 0
    second.prefill(request)
    second.check(request, range(10))
    second.settle()
    assert engine(redis.unix_url).run(IDS) == 40, "what was evicted is stored anew"


def test_what_the_store_has_lost_meanwhile_is_stored_anew(engine, redis):
    """The scheduler's lookup finds it gone. The worker, which has saved it, is told."""
    one = engine(redis.unix_url)
    one.run(IDS)
    redis.command("FLUSHALL")
    assert one.run(IDS) == 0
    assert engine(redis.unix_url).run(IDS) == 40


def test_what_has_another_record_in_its_place_is_stored_anew(engine, redis):
    """The third block's record is that of another key, which the lookup sees."""
    one = engine(redis.unix_url)
    one.run(IDS)
    with kvferry.Store(redis.unix_url) as store:
        blocks = sorted((e for e in store.walk() if e.kind == "block"), key=lambda e: e.first_token)
    assert redis.command("COPY", blocks[5].name, blocks[2].name, "REPLACE") == b":1\r\n"
    assert one.run(IDS) == 8
    assert engine(redis.unix_url).run(IDS) == 40


def test_what_many_requests_have_not_found_is_written_once(engine, redis):
    one = engine(redis.unix_url)
    requests = [one.request(IDS) for _ in range(3)]
    assert [one.ask(request) for request in requests] == [0, 0, 0]
    redis.command("CONFIG", "RESETSTAT")
    for request in requests:
        one.prefill(request)
        one.settle()
    stats = redis.command("INFO", "commandstats").decode()
    assert "cmdstat_set:calls=11," in stats, "ten blocks and the card of their space"
    assert one.scheduler._scheduler._lacking == set()


def test_a_store_that_is_down_at_the_start_is_a_miss(engine, own_redis):
    own_redis.stop()
    one = engine(own_redis.tcp_url)
    assert one.run(IDS) == 0
    own_redis.start()

    def is_used():
        one.run(IDS)
        return engine(own_redis.tcp_url).run(IDS) == 40

    until(is_used, "the store is used when it is back")


def test_connections_that_break_between_lookup_and_load_cost_nothing(engine, redis):
    engine(redis.tcp_url).run(IDS)
    second = engine(redis.tcp_url)
    request = second.request(IDS)
    assert second.ask(request) == 40
    redis.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert second.load(request) == 40
    second.check(request, range(10))


def test_a_store_that_dies_while_loading_is_a_miss(engine, own_redis):
    engine(own_redis.tcp_url).run(IDS)
    second = engine(own_redis.tcp_url)
    request = second.request(IDS)
    assert second.ask(request) == 40
    own_redis.stop()
    assert second.load(request) == 0
    second.prefill(request)
    second.check(request, range(10))


def test_a_silent_store_does_not_answer_for_ever(engine, own_redis):
    engine(own_redis.tcp_url).run(IDS)
    second = engine(own_redis.tcp_url, lookup_timeout=0.3, load_timeout=1.0, save_timeout=1.0)
    request = second.request(IDS)
    assert second.ask(request) == 40
    own_redis.pause()
    assert second.load(request, steps=100000) == 0, "the load of a lookup that was answered"
    assert second.ask(second.request([1, *IDS]), steps=100000) == 0, "a new lookup"
    second.prefill(request)
    second.check(request, range(10))
    second.settle()


def test_pages_are_not_written_while_a_save_reads_them(engine, own_redis):
    """The server hangs with saves under way, and the engine wants the pages: what is stored is right or absent."""
    first = engine(own_redis.tcp_url, save_timeout=2.0)
    request = first.request(IDS)
    first.ask(request)
    own_redis.pause()
    first.prefill(request)
    first.end(request)
    other = first.request([9] * 42)
    first.free.sort()  # the same pages again
    first.prefill(other)
    first.check(other, range(10))
    own_redis.resume()
    first.settle()
    assert engine(own_redis.tcp_url).run([9] * 42) in range(41)  # checks each page that it loads
    engine(own_redis.tcp_url).run(IDS)


def test_a_step_begins_when_nobody_reads_its_pages(engine, own_redis):
    one = engine(own_redis.tcp_url, save_timeout=1.0)
    request = one.request(IDS)
    one.ask(request)
    own_redis.pause()
    one.prefill(request)
    worker, pages = one.workers[0]._worker, array("q", one.slots[request.request_id])
    until(lambda: worker._pages.fence(pages, 0) is False, "a save reads its pages")
    worker.before_step(Step(fence=pages))
    assert worker._pages.fence(pages, 0) is True
    own_redis.resume()


def test_every_page_that_a_step_writes_is_fenced(engine, redis):
    """New pages of a prefill, and those that a load fills; not pages that it only reads."""
    engine(redis.unix_url).run(IDS[:22])
    one = engine(redis.unix_url)
    fences = []
    before_step = one.workers[0]._worker.before_step
    one.workers[0]._worker.before_step = lambda step: fences.append(list(step.fence)) or before_step(step)
    request = one.request(IDS)
    assert one.load(request) == 20
    own = one.slots[request.request_id]
    assert next(f for f in fences if f) == own[:5]
    fences.clear()
    one.prefill(request, 20)
    assert [f for f in fences if f] == [own[5:]]
    fences.clear()
    for token in range(6):  # as if generated: 48 tokens fill the pages that it has, and then two more
        request.append_output_token_ids(token)
        one.allocate(request, request.num_tokens + 3, 0)
        one.step({request: (request.num_tokens - 1, 1)})
    assert [page for fence in fences for page in fence] == one.slots[request.request_id][11:] != []


def test_an_aborted_request_still_ends_its_load(engine, redis):
    """vLLM keeps the pages of an aborted request until the load is reported."""
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    external = second.ask(request)
    second.allocate(request, external, external)
    second.step({})
    second.end(request, free=False)
    ended = []

    def is_reported():
        ended.extend(second.step({}).finished_recving if not ended else [])
        return ended == [request.request_id]

    # The first step above may have reported it already, when the store was quick.
    request_ids = second.scheduler._scheduler._loading
    until(lambda: request.request_id not in request_ids or is_reported(), "the load is reported")
    assert request.request_id not in request_ids
    assert second.run(IDS) == 40


def test_a_resumed_request_begins_anew(engine, redis):
    """Preempted: it lost its pages, and its list of pages is replaced (trap 7)."""
    one = engine(redis.unix_url)
    request = one.request(IDS)
    assert one.load(request) == 0
    one.prefill(request)
    one.settle()
    one.free += one.slots.pop(request.request_id)
    request.num_preemptions += 1
    assert one.load(request) == 40, "what it has computed is stored by now"
    one.prefill(request, 40)
    one.check(request, range(10))


def test_a_resumed_request_repairs_what_was_damaged_meanwhile(engine, redis):
    one = engine(redis.unix_url)
    request = one.request(IDS)
    one.prefill(request)
    one.settle()
    damage_every_value(redis, "redis.call('SETRANGE',k,redis.call('STRLEN',k)-9,'damaged')")
    one.free += one.slots.pop(request.request_id)
    request.num_preemptions += 1
    assert one.load(request) == 0
    one.prefill(request)
    one.settle()
    assert engine(redis.unix_url).run(IDS) == 40


def test_many_requests_in_two_rounds(engine, redis):
    prompts = [IDS[:20] + [1000 + i] * (3 + i) for i in range(8)]
    for round_ in range(2):
        one = engine(redis.unix_url)
        loaded = [one.run(ids) for ids in prompts]
        if round_ == 1:
            assert loaded == [(len(ids) - 1) // BLOCK * BLOCK for ids in prompts]


def test_a_change_of_the_weights_forgets_what_was_stored(engine, redis):
    one = engine(redis.unix_url)
    one.run(IDS)
    assert one.scheduler.reset_cache() is True
    assert one.run(IDS) == 0
    assert one.run(IDS) == 40
    assert engine(redis.unix_url).run(IDS) == 40


def test_what_the_old_weights_have_computed_is_not_saved_after_a_change(engine, redis):
    one = engine(redis.unix_url)
    running = one.request(IDS)
    one.allocate(running, running.num_tokens, 0)
    one.step({running: (0, 18)}, [running])
    running.num_computed_tokens = 18  # as vLLM's scheduler notes it
    assert one.scheduler.reset_cache() is True
    one.step({running: (18, 24)})
    one.settle()
    assert one.run(IDS) == 0


def test_a_request_that_is_computed_anew_after_a_change_of_the_weights_is_saved(engine, redis):
    one = engine(redis.unix_url)
    running = one.request(IDS)
    one.allocate(running, running.num_tokens, 0)
    one.step({running: (0, 18)}, [running])
    running.num_computed_tokens = 18
    assert one.scheduler.reset_cache() is True
    running.num_computed_tokens, running.num_preemptions = 0, 1
    one.step({running: (0, 42)})
    one.settle()
    assert one.run(IDS) == 40


# ---- events


def events_of(one):
    until(lambda: one.step({}) and not any(c._worker._flights for c in one.workers), "the saves end")
    one.step({})
    return list(one.scheduler.take_events())


@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_that_are_stored_are_announced(engine, redis, tp):
    """With their tokens, and under the hashes that vLLM publishes for its own cache."""
    one = engine(redis.unix_url, tp=tp)
    request = one.request(IDS)
    one.prefill(request, chunk=20)
    stored = events_of(one)
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    assert [h for event in stored for h in event.block_hashes] == hashes[:10]
    assert [t for event in stored for t in event.token_ids] == IDS[:40]
    assert [event.parent_block_hash for event in stored] == [None, hashes[4], hashes[9]][: len(stored)]
    assert {(event.medium, event.block_size, event.group_idx) for event in stored} == {("STORAGE", BLOCK, 0)}
    assert events_of(one) == []


def test_events_go_over_the_wire(engine, redis):
    one = engine(redis.unix_url)
    one.run(IDS)
    batch = KVEventBatch(ts=1.0, events=events_of(one))
    again = msgspec.msgpack.Decoder(KVEventBatch).decode(msgspec.msgpack.Encoder().encode(batch))
    assert again.events and again.events[0].token_ids == IDS[:40]


def test_a_block_that_a_load_does_not_find_is_taken_back(engine, redis):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    assert second.ask(request) == 40
    redis.command("FLUSHALL")
    assert second.load(request) == 0
    first = maybe_convert_block_hash(request.block_hashes[0])
    assert [(type(e).__name__, e.block_hashes, e.medium) for e in second.scheduler.take_events()] == [
        ("BlockRemoved", [first], "STORAGE")
    ]


def test_blocks_that_are_not_stored_are_not_announced(engine, own_redis):
    one = engine(own_redis.tcp_url, save_timeout=0.5)
    own_redis.stop()
    one.run(IDS)
    assert events_of(one) == []
    assert one.scheduler._scheduler.announcer._savings == {}


def test_without_events_nothing_is_kept(engine, redis):
    one = engine(redis.unix_url, events=False)
    one.run(IDS)
    assert events_of(one) == []
    assert one.workers[0]._worker._outcomes == []


# ---- a store that is slower than computing


def test_a_slow_store_gets_no_more_saves(engine, own_redis, monkeypatch, tmp_path):
    """A save that is under way for long stops all others, until it has ended: they would take the engine's cores."""
    monkeypatch.setattr(worker, "SLOW_SAVE", 0.01)
    trace = tmp_path / "trace"
    one = engine(own_redis.tcp_url, save_timeout=60.0, trace=str(trace))
    own_redis.pause()
    first, second = one.request(IDS), one.request([9] * 42)
    one.prefill(first)
    flights = one.workers[0]._worker._flights
    until(lambda: one.workers[0]._worker._is_saving_slowly(), "the save is slow")
    one.prefill(second)
    assert len(flights) == 1
    assert [e["request"] for e in vllm_lab.events(trace, "shed")] == [second.request_id]
    own_redis.resume()
    one.settle()
    third = one.request([9] * 42)
    one.prefill(third)
    one.settle()
    assert engine(own_redis.tcp_url).run([9] * 42) == 40, "saved by the next request"


@pytest.mark.parametrize("seconds_per_token, loads_all", [(1e-6, False), (60.0, True)])
def test_a_load_goes_on_as_long_as_it_is_worth_it(engine, redis, tmp_path, seconds_per_token, loads_all):
    """Ten blocks of about 600 bytes at 3 kB a second, for an engine that computes faster, or slower."""
    engine(redis.tcp_url).run(IDS)
    trace = tmp_path / "trace"
    proxy = SlowProxy(redis.port, 3000)
    try:
        second = engine(proxy.url, patience=None, load_timeout=300, lookup_timeout=60, trace=str(trace))
        request = second.request(IDS)
        assert second.ask(request, steps=100000) == 40
        planner = second.scheduler._scheduler._planner
        planner.pace = paced(seconds_per_token)
        loaded = second.load(request, steps=100000)
        second.check(request, range(loaded // BLOCK))
        assert loaded == 40 or not loads_all  # blocks as small as these still arrive after they were given up
        given_up = [e["given_up"] for e in map(json.loads, trace.read_text().splitlines()) if e["event"] == "load"]
        assert given_up == [not loads_all]
    finally:
        proxy.close()


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(plan.time, "monotonic", lambda: now[0])
    return now


def is_empty(account, clock, at, arrived):
    clock[0] = at
    return account.is_empty(arrived)


def test_an_account_pays_for_what_arrives(clock):
    account = plan.Account(0.3, 0.1)
    steps = [(0.2, 0, False), (0.4, 2, False), (0.6, 2, True)]  # 0.1, 0.06, -0.14 seconds are left
    assert [is_empty(account, clock, at, arrived) for at, arrived, _ in steps] == [end for _, _, end in steps]
    clock[0] = 0.0
    account = plan.Account(1.0, None)
    steps = [(0.9, 0, False), (1.8, 1, False), (2.7, 2, False), (3.8, 2, True)]
    assert [is_empty(account, clock, at, arrived) for at, arrived, _ in steps] == [end for _, _, end in steps]


@pytest.mark.parametrize("block, last", [(0.075, 100), (0.101, 15), (0.2, 3)])
def test_a_load_that_does_not_win_by_a_margin_ends_soon(clock, block, last):
    """100 blocks, of which each takes 0.1 s to compute: 3 % is 0.3 s. Loading in 75 % of that is worth it;
    loading as fast as computing ends after 15 of them. At any rate it takes at most 0.3 s more than what it saves."""
    account = plan.Account(0.3, 0.1)
    num = next((i for i in range(1, 101) if is_empty(account, clock, i * block, i)), 100)
    assert num == last
    assert clock[0] - num * 0.1 <= 0.3001


def paced(seconds_per_token):
    pace = kvferry.Pace()
    pace.note(1024, 1024 * seconds_per_token)
    return pace


def planner_with():
    return plan.Planner(block_tokens=10, block_bytes=1000, batch_tokens=2048)


def seconds(planner, num_tokens):
    return planner.pace.seconds(num_tokens, 2048)


def test_the_pace_is_that_of_the_fastest_of_the_last_steps():
    planner = planner_with()
    assert (planner.patience(planner.plan(10, 0)), planner.lookup_time(1000, 0.25)) == (plan.GUESS, 0.25)
    planner.note_step(10, 0.001)  # too small
    assert seconds(planner, 10) == 0
    planner.note_step(100, 50.0)  # the first step
    assert seconds(planner, 100) == pytest.approx(50.0)
    planner.note_step(100, 20.0)
    planner.note_step(100, 30.0)
    assert seconds(planner, 100) == pytest.approx(20.0)
    planner.note_step(1024, 102.4)  # larger steps are faster by the token, and say nothing about smaller ones
    assert seconds(planner, 100) == pytest.approx(20.0)
    assert seconds(planner, 1024) == pytest.approx(102.4)
    assert planner.lookup_time(1000, 0.25) == 0.25
    assert planner.lookup_time(10, 0.25) == pytest.approx(0.06)
    assert planner.lookup_time(1, 0.25) == plan.LEAST_LOOKUP
    for _ in range(plan.STEPS):
        planner.note_step(100, 30.0)  # the engine has become slower
    assert seconds(planner, 100) == pytest.approx(30.0)


def test_the_patience_is_a_small_part_of_the_compute_time():
    planner = planner_with()
    planner.note_step(1000, 100.0)
    assert planner.patience(planner.plan(100, 0)) == pytest.approx(3.0)
    assert planner.patience(planner.plan(1, 0)) == plan.LEAST_LOAD


def test_what_does_not_win_by_a_margin_is_computed(clock):
    """100 blocks of 1,000 bytes, which take a second to compute: 100 kB/s are as fast, and 125 kB/s win by a margin."""
    planner = planner_with()
    planner.note_step(1000, 1.0)
    assert planner.plan(100, 0).kind == "try", "nothing is known of the store"
    for rate, kind in ((100e3, "compute"), (120e3, "compute"), (130e3, "load")):
        planner.note_links([kvferry.Link((rate, 0.0, False))])
        assert planner.plan(100, 0).kind == kind
        assert planner.plan(100, 1).kind == "try", "another tier"


def test_a_store_that_was_too_slow_is_left_alone_for_a_while(clock):
    planner = planner_with()
    planner.note_step(1000, 1.0)
    planner.note_links([kvferry.Link((0.0, 0.0, True))])
    assert planner.plan(100, 0).kind == "compute", "it is silent"
    clock[0] = plan.MEMORY
    assert planner.plan(100, 0).kind == "try"


def test_the_slowest_rank_counts():
    fast, slow, silent, unknown = (
        kvferry.Link((1e9, 0.001, False)), kvferry.Link((1e6, 0.001, False)), kvferry.Link((0.0, 0.0, True)),
        kvferry.Link((0.0, 0.0, False)),
    )  # fmt: skip
    assert plan.slowest([fast, unknown], [slow, slow]) == [slow, slow]
    assert plan.slowest([silent], [slow]) == plan.slowest([slow], [silent]) == [silent]
    assert plan.slowest([], [slow]) == plan.slowest([slow], []) == [slow]


def test_a_link_goes_from_one_process_to_another():
    link = kvferry.Link((1e6, 0.001, True))
    assert pickle.loads(pickle.dumps(link)) == link
    assert type(pickle.loads(pickle.dumps(link))) is kvferry.Link


def test_the_engine_measures_its_steps_and_requests_share_what_is_known_of_the_store(
    engine, redis, tmp_path, monkeypatch
):
    """The first request gives up a load, the second does not begin one, and later one is tried again."""
    monkeypatch.setattr(plan, "LEAST_LOOKUP", 60.0)
    monkeypatch.setattr(plan, "MEMORY", 1000.0)
    ids = list(range(100, 164))
    engine(redis.tcp_url).run(ids)
    trace = tmp_path / "trace"
    proxy = SlowProxy(redis.port, None)
    try:
        second = engine(proxy.url, patience=None, lookup_timeout=60, trace=str(trace))
        scheduler = second.scheduler._scheduler
        second.run(list(range(500, 564)))
        assert scheduler._planner.pace.seconds(64, 2048) > 0
        scheduler._planner.pace = paced(1e-6)
        proxy.rate = 3000
        requests = [second.request(ids) for _ in range(3)]
        assert second.load(requests[0], steps=100000) < 64
        assert second.ask(requests[1], steps=100000) == 0
        scheduler._planner._noted -= plan.MEMORY
        assert second.ask(requests[2], steps=100000) == 60
        left = [e["request"] for e in map(json.loads, trace.read_text().splitlines()) if e["event"] == "left"]
        assert left == [requests[1].request_id]
    finally:
        proxy.close()


# ---- faults of our own


def test_a_fault_in_the_scheduler_turns_kvferry_off(engine, redis, monkeypatch):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    monkeypatch.setattr(second.scheduler._scheduler, "_move", lambda *a: 1 / 0)
    assert second.load(request) == 0, "the engine is not left waiting for a load that nobody begins"
    second.prefill(request)
    second.check(request, range(10))
    assert second.ask(second.request(IDS)) == 0


def test_an_engine_whose_files_have_changed_is_left_alone(engine, redis, monkeypatch):
    engine(redis.unix_url).run(IDS)
    monkeypatch.setattr(identity, "changed_files", lambda config: "a file has changed")
    assert engine(redis.unix_url).run(IDS) == 0


def test_after_a_fault_in_the_scheduler_no_save_reads_pages_that_are_written_anew(engine, own_redis, monkeypatch):
    """The fence comes with each step of the scheduler's half, which is off."""
    one = engine(own_redis.tcp_url, save_timeout=2.0)
    request = one.request(IDS)
    one.ask(request)
    own_redis.pause()
    one.prefill(request)
    worker, pages = one.workers[0]._worker, array("q", one.slots[request.request_id])
    until(lambda: worker._pages.fence(pages, 0) is False, "a save reads its pages")
    monkeypatch.setattr(one.scheduler._scheduler, "step", lambda *a: 1 / 0)
    one.step({})
    assert worker._pages.fence(pages, 0) is True
    own_redis.resume()


def test_a_fault_in_a_worker_turns_kvferry_off(engine, redis, monkeypatch):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = second.request(IDS)
    monkeypatch.setattr(second.workers[0]._worker, "_submit_load", lambda *a, **k: 1 / 0)
    assert second.load(request) == 0
    another = second.request([1, *IDS])
    second.end(request)
    second.prefill(another)
    second.check(another, range(10))
    second.prefill(second.request([2, *IDS]))
    assert second.scheduler._scheduler.announcer._savings == {}, "nobody waits for outcomes that never come"
    assert second.scheduler.get_num_new_matched_tokens(second.request(IDS), 0) == (0, False)
    assert second.workers[0]._worker._queue.closed, "nothing of ours touches the pages any more"


def test_without_word_of_the_workers_nothing_is_named(engine, redis, caplog):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    second.scheduler._scheduler._opened = None
    assert second.run(IDS) == 0
    assert caplog.text.count("vLLM has not passed on") == 1


def test_ranks_that_compute_with_other_things_are_another_engine(engine, redis):
    """What a worker says of its machine is in the name of its blocks."""
    engine(redis.unix_url, machine=lambda rank: {"threads": "2"}).run(IDS)
    assert engine(redis.unix_url, machine=lambda rank: {"threads": "4"}).run(IDS) == 0
    assert engine(redis.unix_url, machine=lambda rank: {"threads": "2"}).run(IDS) == 40
    engine(redis.unix_url, tp=2, machine=lambda rank: {"threads": str(rank)}).run(IDS)
    assert engine(redis.unix_url, tp=2, machine=lambda rank: {"threads": str(1 - rank)}).run(IDS) == 0


# ---- start


def test_options_are_checked():
    assert Settings.of({"store": "mem:"}).store == ("mem:",)
    assert Settings.of({"store": ["mem:", "file:/x"], "load_timeout": 3}).load_timeout == 3.0
    for options, words in [
        ({}, "store"), ({"store": 7}, "store"), ({"store": "mem:", "stroe": 1}, "no option 'stroe'"),
        ({"store": "mem:", "load_timeout": 0}, "load_timeout"),
        ({"store": "mem:", "save_timeout": "1"}, "save_timeout"), ({"store": "mem:", "trace": 1}, "trace"),
        ({"store": "mem:", "secret_files": ["a"]}, "secret_files"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            Settings.of(options)


def start(monkeypatch, change, options=None):
    monkeypatch.setattr(identity, "fields_of", lambda *a: FIELDS)
    config, kv_config = configs(options or {"store": "mem:"})
    change(config, kv_config)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KvferryConnector(config, KVConnectorRole.SCHEDULER, kv_config)


def put(path, value):
    def change(config, kv_config):
        *way, last = path.split(".")
        target = kv_config if way[0] == "kv" else config
        for name in way[1:] if way[0] == "kv" else way:
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        setattr(target, last, value)

    return change


def remote_code(config, code_revision=None, auto_map=None):
    config.model_config.trust_remote_code, config.model_config.code_revision = True, code_revision
    config.model_config.hf_config = SimpleNamespace(auto_map=auto_map)


def test_a_models_own_code_is_fine(monkeypatch):
    def change(config, kv_config):
        config.model_config.model = "own/repo"
        remote_code(config, auto_map={"AutoModel": "own/repo--modeling.Model", "AutoConfig": "configuration.Config"})

    start(monkeypatch, change).shutdown()


def sliding(group):
    return SimpleNamespace(
        kv_cache_spec=dataclasses.replace(group.kv_cache_spec, sliding_window=128), layer_names=group.layer_names
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (put("kv.kv_cache_layout", "LBNHC"), "layout LBNHC"),
        (put("parallel_config.pipeline_parallel_size", 2), "pipeline"),
        (put("load_config.load_format", "dummy"), "load format dummy"),
        (lambda c, k: setattr(c, "speculative_config", SimpleNamespace(method="eagle")), "speculative"),
        (lambda c, k: k.kv_cache_groups.append(k.kv_cache_groups[0]), "FullAttentionSpec, FullAttentionSpec"),
        (lambda c, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", object()), "kinds object"),
        (lambda c, k: k.kv_cache_groups.__setitem__(0, sliding(k.kv_cache_groups[0])), "sliding window"),
        (put("cache_config.calculate_kv_scales", True), "KV scales"),
        (put("cache_config.kv_sharing_fast_prefill", True), "kv_sharing_fast_prefill"),
        (put("parallel_config.prefill_context_parallel_size", 2), "context parallelism"),
        (put("parallel_config.decode_context_parallel_size", 2), "context parallelism"),
        (put("model_config.model_weights", "s3://bucket"), "not in the model's folder"),
        (put("kv_transfer_config.kv_role", None), "without kv_role"),
        (lambda c, k: remote_code(c, code_revision="other"), "code of a model"),
        (lambda c, k: remote_code(c, auto_map={"AutoModel": "another/repo--modeling.Model"}), "code of a model"),
        (
            lambda c, k: remote_code(c, auto_map={"AutoModel": [None, "another/repo--modeling.Model"]}),
            "code of a model",
        ),
        (lambda c, k: os.environ.update(VLLM_TEST_FORCE_LOAD_FORMAT="dummy"), "VLLM_TEST_FORCE_LOAD_FORMAT"),
        (lambda c, k: os.environ.update(VLLM_USE_MODELSCOPE="True"), "VLLM_USE_MODELSCOPE"),
    ],
)
def test_what_is_not_proven_is_refused_at_the_start(monkeypatch, change, words):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ValueError, match=words):
        start(monkeypatch, change)


@pytest.mark.parametrize("change", [
    put("cache_config.prefix_caching_hash_algo", "xxhash"), put("model_config.runner_type", "pooling"),
])  # fmt: skip
def test_what_can_not_be_kept_is_left_alone(monkeypatch, change):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    connector = start(monkeypatch, change)
    assert connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)
    assert isinstance(connector.build_connector_meta(None), Step)


def test_a_load_that_fails_is_never_a_failed_request(monkeypatch):
    connector = start(monkeypatch, lambda c, k: None)
    assert connector._vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert connector.requires_kv_delivery is False
    connector.shutdown()


@pytest.mark.parametrize("version, warns", [(identity.TESTED[-1], 0), (identity.TESTED[0] + "+cpu", 0), ("0.99.0", 1)])
def test_an_unknown_version_is_tried_with_a_warning(monkeypatch, version, warns):
    warnings = []
    monkeypatch.setattr(identity.log, "warning", lambda *words: warnings.append(words[0] % words[1:]))
    monkeypatch.setattr(identity.vllm, "__version__", version)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there is a warning of its own otherwise
    start(monkeypatch, lambda c, k: None).shutdown()
    assert len(warnings) == warns and all("tested with vLLM 0.32.0" in text and version in text for text in warnings)


def test_a_version_whose_configuration_does_not_say_the_unit_of_hashes(monkeypatch):
    """vLLM 0.31 hashes whole blocks."""
    connector = start(monkeypatch, lambda c, k: delattr(k, "hash_block_size"))
    assert connector._scheduler._hash_tokens() == BLOCK
    connector.shutdown()


def test_vllm_has_the_hooks(monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert all(hasattr(KVConnectorBase_V1, name) for name in HOOKS)
    monkeypatch.setattr("kvferry.vllm.connector.HOOKS", (*HOOKS, "no_such_hook"))
    with pytest.raises(RuntimeError, match="no_such_hook"):
        start(monkeypatch, lambda c, k: None)


def test_the_short_name_is_registered_once_or_twice():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.vllm.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KvferryConnector") is KvferryConnector


def test_vllm_finds_the_plugin_of_an_installed_package(tmp_path):
    code = (
        "from vllm.plugins import load_general_plugins as load; load();"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
        "print(F.get_connector_class_by_name('KvferryConnector').__module__)"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(vllm_lab.plugin_folder(tmp_path)), *sys.path]),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "kvferry.vllm.connector"


def test_the_trace_tells_what_was_done(engine, redis, tmp_path):
    trace = tmp_path / "trace"
    engine(redis.unix_url, trace=str(trace)).run(IDS)
    engine(redis.unix_url, trace=str(trace)).run(IDS)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [(e["stored"], e["of"]) for e in lines if e["event"] == "lookup"] == [(0, 10), (10, 10)]
    assert [(e["ok"], e["why"]) for e in lines if e["event"] == "load"] == [(10, None)]
    assert sum(e["ok"] for e in lines if e["event"] == "save") == 20, "known blocks count as saved"


def test_pages_that_are_not_as_expected_are_refused(engine, redis):
    worker = engine(redis.unix_url).workers[0]._worker
    layers = worker._layers
    pages = {name: torch.zeros(8, 1, BLOCK, 8) for name in layers}
    for wrong in (
        {name: pages[name] for name in layers[1:]},
        {**pages, layers[1]: torch.zeros(9, 1, BLOCK, 8)},
        {**pages, layers[1]: torch.zeros(8, 1, 8, BLOCK).transpose(2, 3)},
        {**pages, layers[1]: torch.zeros(8, 1, BLOCK, 8, device="meta")},
    ):
        with pytest.raises(ValueError, match="kvferry: the"):
            worker.register(wrong)
    worker.register(pages)
