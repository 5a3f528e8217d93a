# SPDX-License-Identifier: Apache-2.0
"""The secondary tier on real stores, in vLLM's own offloading: its connector, managers and primary tier, with a worker
that copies on the CPU (vllm_tier_engine.py). The conformance set (conformance.py) is here too."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")

import torch
from conftest import until
from slow_proxy import SlowProxy
from test_vllm import damage_every_value
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.request import RequestStatus
from vllm_engine import BLOCK
from vllm_tier_engine import TierEngine, configs, name_without_files, offload_of

import kvferry
from kvferry.vllm import KvferryTier, identity, tier
from kvferry.vllm.answers import Answers
from kvferry.vllm.region import unlink_region

IDS = list(range(100, 142))  # 10 whole blocks of 4, and 2 tokens


@pytest.fixture
def engine(monkeypatch):
    engines = []

    def start(url, **more):
        engines.append(TierEngine(monkeypatch, url, **more))
        return engines[-1]

    yield start
    for one in engines:
        one.close()


@pytest.fixture
def without(engine):
    """The KV that the engine has without the tier."""
    return lambda ids: engine(None).answer(ids)[1]


def assert_answer(got, loaded, pages):
    """A request of an engine with the tier: so many tokens were loaded, and its KV is that of the engine without."""
    assert got[0] == loaded
    assert torch.equal(got[1], pages)


def keys_of(one, ids):
    hashes = one.request(ids).block_hashes
    return one.tier._space.keys_of([make_offload_key(h, 0) for h in hashes])


def remove(url, one, ids, block):
    with kvferry.Store(url) as store:
        assert store.remove(one.tier._space.digest, keys_of(one, ids)[32 * block : 32 * block + 32])


# ---- the conformance set


def test_conformance_full_prompt_hit(engine, redis, without):
    engine(redis.unix_url).run(IDS[:40])
    assert_answer(engine(redis.unix_url).answer(IDS[:40]), 39, without(IDS[:40]))


def test_conformance_one_block_hit(engine, redis, without):
    engine(redis.unix_url).run(IDS[:4])
    assert_answer(engine(redis.unix_url).answer(IDS), 4, without(IDS))


@pytest.mark.parametrize("kind", ["redis", "folder"])
def test_conformance_miss_in_the_middle(engine, redis, folder_url, without, kind):
    url = redis.unix_url if kind == "redis" else folder_url
    engine(url).run(IDS)
    second = engine(url)
    remove(url, second, IDS, 6)
    assert_answer(second.answer(IDS), 24, without(IDS))
    assert engine(url).run(IDS) == 40, "what was missing is stored anew"


def test_conformance_corrupt_record(engine, redis, without):
    engine(redis.unix_url).run(IDS)
    damage_every_value(redis, "redis.call('SETRANGE',k,redis.call('STRLEN',k)-9,'damaged')")
    assert_answer(engine(redis.unix_url).answer(IDS), 0, without(IDS))
    assert engine(redis.unix_url).run(IDS) == 40, "what was damaged is stored anew"


def test_conformance_record_of_another_space(engine, redis, without):
    """A whole record of another space is put under the address of each of ours."""
    first, other = engine(redis.unix_url), engine(redis.unix_url, model="1" * 64)
    first.run(IDS)
    other.run(IDS)
    for ours, theirs in zip(names_of(first, IDS), names_of(other, IDS), strict=True):
        assert redis.command("COPY", theirs, ours, "REPLACE") == b":1\r\n"
    assert_answer(engine(redis.unix_url).answer(IDS), 0, without(IDS))


def names_of(one, ids):
    """Of the records in Redis (docs/stores-redis.md)."""
    keys = keys_of(one, ids)
    space = one.tier._space.digest.hex()[:16]
    return [f"kvf1:{space}:{{{keys[i : i + 32].hex()}}}" for i in range(0, len(keys), 32)]


def test_conformance_store_down_at_start(engine, own_redis, without):
    own_redis.stop()
    one = engine(own_redis.tcp_url)
    assert_answer(one.answer(IDS), 0, without(IDS))
    own_redis.start()
    fresh = [list(range(i, i + 42)) for i in range(1000, 3000, 50)]

    def is_used():
        ids = fresh.pop()
        one.run(ids)
        return engine(own_redis.tcp_url).run(ids) == 40

    until(is_used, "the store is used when it is back")


def begin_load(one, ids, before=lambda: None):
    """A request whose load is under way. before: what happens between its lookup and that."""
    request = one.request(ids)
    assert one.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    last = make_offload_key(request.block_hashes[len(ids) // BLOCK - 1], 0)
    until(lambda: one.step({}) and one.tier._answers.of(last, request.request_id) is LookupResult.HIT, "it is found")
    before()
    assert one.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    one.step({})
    return request


def finish(one, request):
    loaded = one.load(request)
    one.prefill(request, loaded)
    return loaded, one.pages_of(request)


def is_loading(one):
    return any(flight.op == "load" for flight in one.tier._flights.values())


def is_saving(one):
    return any(flight.op == "save" for flight in one.tier._flights.values())


@pytest.fixture
def proxy(own_redis):
    proxy = SlowProxy(own_redis.port, None)
    yield proxy
    proxy.close()


def test_conformance_store_down_in_the_middle(engine, own_redis, without):
    engine(own_redis.tcp_url).run(IDS)
    second = engine(own_redis.tcp_url)
    request = begin_load(second, IDS, own_redis.pause)
    assert is_loading(second)
    own_redis.process.kill()  # it must not go on before
    loaded, pages = finish(second, request)
    assert loaded == 0
    assert torch.equal(pages, without(IDS))


def test_conformance_store_slow_past_the_deadline(engine, own_redis, proxy, without):
    engine(own_redis.tcp_url).run(IDS)
    second = engine(proxy.url, load_timeout=0.5)
    request = begin_load(second, IDS, lambda: setattr(proxy, "rate", 1000))
    loaded, pages = finish(second, request)
    assert loaded < 40, "ten rows of 4096 bytes take 40 seconds"
    assert torch.equal(pages, without(IDS))


def test_conformance_store_hangs_while_loading(engine, own_redis, without):
    engine(own_redis.tcp_url).run(IDS)
    second = engine(own_redis.tcp_url, patience=0.5, load_timeout=5.0, lookup_timeout=0.5, save_timeout=2.0)
    assert second.ask(second.request([7] * 42)) == 0, "it is connected"
    second.tier._settings = dataclasses.replace(second.tier._settings, lookup_timeout=30.0)
    request = begin_load(second, IDS, own_redis.pause)
    loaded, pages = finish(second, request)
    assert loaded == 0
    assert torch.equal(pages, without(IDS))
    second.tier._settings = dataclasses.replace(second.tier._settings, lookup_timeout=0.5)
    assert second.ask(second.request([8] * 42)) == 0, "a new lookup ends too"
    second.settle()


def test_conformance_store_hangs_while_saving(engine, own_redis, without):
    """The rows of the primary tier that the saves read are not given to others meanwhile."""
    one = engine(own_redis.tcp_url, save_timeout=2.0, lookup_timeout=0.5, chunks=20)
    assert one.ask(one.request([7] * 42)) == 0, "it is connected"
    request = one.request(IDS)
    own_redis.pause()
    one.prefill(request)
    until(lambda: one.step({}) and is_saving(one), "the saves are under way")
    others = [list(range(i, i + 42)) for i in (500, 600, 700)]
    for ids in others:  # more than what is left of the primary tier
        other = one.request(ids)
        one.prefill(other)
        assert torch.equal(one.pages_of(other), without(ids))
        one.end(other)
    assert torch.equal(one.pages_of(request), without(IDS))
    own_redis.resume()
    one.settle()
    for ids in (IDS, *others):
        loaded, pages = engine(own_redis.tcp_url).answer(ids)
        assert torch.equal(pages, without(ids)), f"what was stored of {loaded} tokens is right"


@pytest.mark.parametrize("when", ["looking up", "loading"])
def test_conformance_abort_while_loading(engine, own_redis, proxy, without, when):
    engine(own_redis.tcp_url).run(IDS)
    second = engine(proxy.url)
    if when == "loading":
        request = begin_load(second, IDS, lambda: setattr(proxy, "rate", 100000))
    else:
        request = second.request(IDS)
        assert second.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    second.end(request, status=RequestStatus.FINISHED_ABORTED)
    proxy.rate = None
    second.settle()
    assert second.tier._answers._asked == {}
    assert_answer(second.answer(IDS), 40, without(IDS))


def test_conformance_preemption_while_storing(engine, own_redis, without):
    """The request loses its pages while its rows are saved, and others get them."""
    one = engine(own_redis.tcp_url, save_timeout=5.0)
    assert one.ask(one.request([7] * 42)) == 0, "it is connected"
    request = one.request(IDS)
    own_redis.pause()
    one.prefill(request)
    until(lambda: one.step({}) and is_saving(one), "the saves are under way")
    one.free = one.slots.pop(request.request_id) + one.free
    request.num_preemptions += 1
    other = one.request([9] * 42)
    one.prefill(other)
    own_redis.resume()
    one.settle()
    assert torch.equal(one.pages_of(other), without([9] * 42))
    loaded = one.load(request)
    one.prefill(request, loaded)
    assert torch.equal(one.pages_of(request), without(IDS))
    one.settle()
    assert_answer(engine(own_redis.tcp_url).answer(IDS), 40, without(IDS))


def test_conformance_eviction_between_lookup_and_load(engine, redis, without):
    engine(redis.unix_url).run(IDS)
    second = engine(redis.unix_url)
    request = begin_load(second, IDS, lambda: redis.command("FLUSHALL"))
    loaded, pages = finish(second, request)
    assert loaded == 0
    assert torch.equal(pages, without(IDS))
    second.settle()
    assert engine(redis.unix_url).run(IDS) == 40, "what was evicted is stored anew"


def test_conformance_restart_with_another_dtype(engine, redis, without):
    engine(redis.unix_url).run(IDS)
    other = engine(redis.unix_url, dtype=torch.bfloat16)
    assert other.ask(other.request(IDS)) == 0
    assert_answer(engine(redis.unix_url).answer(IDS), 40, without(IDS))


def test_conformance_restart_with_another_block_size(engine, redis, without):
    engine(redis.unix_url).run(IDS)
    other = engine(redis.unix_url, block=2 * BLOCK)
    assert other.ask(other.request(IDS)) == 0
    assert_answer(engine(redis.unix_url).answer(IDS), 40, without(IDS))


def test_conformance_two_writers_of_one_key(engine, redis, without):
    first, second = engine(redis.tcp_url), engine(redis.tcp_url)
    requests = [(one, one.request(IDS)) for one in (first, second)]
    for one, request in requests:
        assert one.load(request) == 0
    for one, request in requests:
        one.prefill(request)
    for one in (first, second):
        one.settle()
    assert_answer(engine(redis.tcp_url).answer(IDS), 40, without(IDS))


def test_conformance_two_processes_on_one_store(engine, redis, without):
    script = (
        "import pytest, sys\nfrom vllm_tier_engine import TierEngine\n"
        "one = TierEngine(pytest.MonkeyPatch(), sys.argv[1])\nassert one.run(list(range(100, 142))) == 0\none.close()\n"
    )
    run_script(script, redis.unix_url)
    assert_answer(engine(redis.unix_url).answer(IDS), 40, without(IDS))


def run_script(script, *args):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run([sys.executable, "-c", script, *args], env=env, check=True, capture_output=True, text=True)


def test_conformance_sixteen_requests_over_two_rounds(engine, redis, without):
    prompts = [IDS[:20] + [1000 + i] * (3 + i % 5) for i in range(16)]
    for round_ in range(2):
        one = engine(redis.unix_url, chunks=128, slots=200)
        requests = [one.request(ids) for ids in prompts]
        loaded = [one.load(request) for request in requests]
        for request, num in zip(requests, loaded, strict=True):
            one.prefill(request, num)
        for ids, request in zip(prompts, requests, strict=True):
            assert torch.equal(one.pages_of(request), without(ids))
        one.settle()
        if round_ == 1:
            assert loaded == [len(ids) // BLOCK * BLOCK - (len(ids) % BLOCK == 0) for ids in prompts]


def test_conformance_lora_on_and_off(monkeypatch):
    """Refused: the tier is given the hashes of blocks, which have the name of an adapter and not its files."""
    config, _ = configs({})
    config.lora_config = object()
    assert "LoRA" in identity.tier_refusal(config)


def test_conformance_salt_apart(engine, redis, without):
    one = engine(redis.unix_url)
    one.run(IDS, salt="alice")
    assert engine(redis.unix_url).run(IDS, salt="bob") == 0
    assert_answer(engine(redis.unix_url).answer(IDS), 0, without(IDS))
    assert engine(redis.unix_url).run(IDS, salt="alice") == 40


@pytest.mark.parametrize("num, loaded", [(3, 0), (4, 3), (5, 4), (39, 36), (40, 39), (41, 40)])
def test_conformance_exactly_n_blocks_and_one_more_or_less(engine, redis, without, num, loaded):
    engine(redis.unix_url).run(IDS)
    assert_answer(engine(redis.unix_url).answer(IDS[:num]), loaded, without(IDS[:num]))


# ---- what the tier adds to that


@pytest.mark.parametrize("kind", ["unix", "tcp", "folder", "two tiers"])
def test_a_second_engine_loads_what_the_first_has_computed(engine, redis, folder_url, kind):
    url = {"unix": redis.unix_url, "tcp": redis.tcp_url, "folder": folder_url,
           "two tiers": ["mem:?max=1M", redis.unix_url]}[kind]  # fmt: skip
    assert engine(url).run(IDS) == 0
    assert engine(url).run(IDS) == 40


def test_a_row_has_the_pages_of_all_ranks(engine, redis):
    assert engine(redis.unix_url, tp=2).run(IDS) == 0
    assert engine(redis.unix_url, tp=2).run(IDS) == 40
    assert engine(redis.unix_url).run(IDS) == 0, "another number of ranks is another row"


def test_sealed_rows_are_loaded_with_their_secret_only(engine, redis, tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).write_bytes(name.encode() * 8)
        (tmp_path / name).chmod(0o600)
    engine(redis.unix_url, secret_files=str(tmp_path / "ours")).run(IDS)
    assert engine(redis.unix_url).run(IDS) == 0
    assert engine(redis.unix_url, secret_files=str(tmp_path / "theirs")).run(IDS) == 0
    assert engine(redis.unix_url, secret_files=str(tmp_path / "ours")).run(IDS) == 40


def events(trace, kind):
    return [event for event in map(json.loads, trace.read_text().splitlines()) if event["event"] == kind]


def test_all_keys_of_a_step_are_one_question(engine, redis, tmp_path):
    engine(redis.unix_url).run(IDS)
    trace = tmp_path / "trace"
    one = engine(redis.unix_url, trace=str(trace))
    requests = [one.request(ids) for ids in (IDS, IDS[:20] + [7] * 20)]
    for request in requests:
        assert one.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert [one.load(request) for request in requests] == [40, 20]
    assert [(e["of"], e["ok"]) for e in events(trace, "lookup")] == [(15, 10)]
    assert sum(e["ok"] for e in events(trace, "load")) == 10


def test_what_the_primary_tier_has_is_not_asked_for(engine, redis, tmp_path):
    trace = tmp_path / "trace"
    one = engine(redis.unix_url, trace=str(trace))
    one.run(IDS)
    asked = len(events(trace, "lookup"))
    assert one.run(IDS) == 40
    assert len(events(trace, "lookup")) == asked
    assert events(trace, "load") == []


def test_a_primary_tier_that_is_too_small_goes_on(engine, redis, without, tmp_path):
    """vLLM asks again for what it has evicted meanwhile: without a limit it would load the same chunks for ever."""
    engine(redis.unix_url).run(IDS)
    trace = tmp_path / "trace"
    small = engine(redis.unix_url, chunks=4, trace=str(trace))
    loaded, pages = small.answer(IDS)
    assert loaded <= 16
    assert sum(e["ok"] for e in events(trace, "load")) <= 2 * 10, "each of the ten chunks is loaded at most twice"
    assert torch.equal(pages, without(IDS))


@pytest.mark.parametrize("how", ["evicted", "another record in its place"])
def test_what_the_store_has_lost_meanwhile_is_stored_anew(engine, redis, how):
    one = engine(redis.unix_url, chunks=12)
    one.run(IDS)
    names = names_of(one, IDS)
    if how == "evicted":
        redis.command("FLUSHALL")
    else:
        assert redis.command("COPY", names[5], names[2], "REPLACE") == b":1\r\n"
    one.run([7] * 50)  # in the place of the others in the primary tier
    assert one.run(IDS) == (0 if how == "evicted" else 8)
    assert engine(redis.unix_url).run(IDS) == 40


def test_connections_that_break_between_lookup_and_load_cost_nothing(engine, redis):
    engine(redis.tcp_url).run(IDS)
    second = engine(redis.tcp_url)
    request = begin_load(second, IDS, lambda: redis.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    assert finish(second, request)[0] == 40


def test_a_load_that_failed_is_not_tried_again_and_again(engine, redis, tmp_path):
    engine(redis.unix_url).run(IDS)
    damage_every_value(redis, "redis.call('SETRANGE',k,redis.call('STRLEN',k)-9,'damaged')")
    trace = tmp_path / "trace"
    second = engine(redis.unix_url, trace=str(trace))
    assert second.load(second.request(IDS)) == 0
    assert len(events(trace, "load")) == 1


def test_saves_do_not_keep_the_primary_tier_from_vllm(engine, own_redis):
    """With a silent store at most half of its rows wait for saves. The rest goes on."""
    one = engine(own_redis.tcp_url, save_timeout=30.0, lookup_timeout=0.1, chunks=40)
    assert one.ask(one.request([7] * 42)) == 0, "it is connected"
    own_redis.pause()
    for first in (300, 400, 500, 600):
        request = one.request(list(range(first, first + 42)))
        one.prefill(request)
        one.end(request)
    until(lambda: one.step({}) and is_saving(one), "the saves are under way")
    assert one.tier._saving == 20
    last = one.request(list(range(600, 642)))
    assert one.ask(last) == 40, "the primary tier has it"
    own_redis.resume()
    one.settle()
    assert one.tier._saving == 0


def test_one_save_may_need_more_than_that(engine, redis):
    engine(redis.unix_url, chunks=12).run(IDS)
    assert engine(redis.unix_url).run(IDS) == 40


def test_a_job_of_too_many_chunks_is_not_taken(engine, redis, monkeypatch, without):
    engine(redis.unix_url).run(IDS)
    monkeypatch.setattr(kvferry, "MAX_BLOCKS", 7)
    one = engine(redis.unix_url)
    loaded, pages = one.answer(IDS)
    assert loaded in (0, 28), "a question has at most as many keys too"
    assert torch.equal(pages, without(IDS))
    assert one.tier._is_on is True


def test_groups_of_layers_are_apart(engine, redis):
    """The same hash in two groups names two rows. Windows are looked up from their end."""
    hashes = [bytes([i]) * 32 for i in range(3)]
    keys = [make_offload_key(hash_, group) for group in (0, 1) for hash_ in hashes]
    first, second = engine(redis.unix_url), engine(redis.unix_url)
    context = ReqContext("first")
    first.manager.on_new_request(context)
    slots = first.manager.prepare_store(keys, context).store_spec.chunk_ids
    rows = memory_of(first)
    for i, slot in enumerate(slots):
        rows[slot] = i + 1
    first.manager.complete_store(keys, context)
    first.settle()
    asking = ReqContext("second")
    second.manager.on_new_request(asking)

    def has_all():
        answers = [second.manager.lookup(key, asking) for key in reversed(keys)]
        second.step({})
        return set(answers) == {LookupResult.HIT}

    until(has_all, "all are loaded")
    slots = second.manager.prepare_load(keys, asking).chunk_ids
    assert [set(memory_of(second)[slot].tolist()) for slot in slots] == [{i + 1} for i in range(6)]


def memory_of(one):
    return np.asarray(one.manager.primary_tier.get_kv_memoryview())


def test_a_step_without_work_waits_for_what_is_under_way_and_not_for_long(engine, own_redis, monkeypatch):
    one = engine(own_redis.tcp_url)
    assert one.ask(one.request([7] * 42)) == 0, "it is connected"
    own_redis.pause()
    waits = []
    wait = one.tier._queue.wait
    monkeypatch.setattr(tier, "IDLE_STEP", 1000.0)
    monkeypatch.setattr(kvferry.Queue, "wait", lambda self, timeout: waits.append(timeout) or wait(timeout))
    request = one.request(IDS)
    for _ in range(100):
        assert one.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        one.step({})
    assert 1 <= len(waits) <= 11
    assert max(waits) <= tier.IDLE_WAIT
    monkeypatch.setattr(tier, "IDLE_STEP", 0.0)
    one.tier._wait_left, num = 1.0, len(waits)
    one.step({})
    assert len(waits) == num, "a step that has computed something does not wait"
    own_redis.resume()


def test_a_change_of_the_weights_forgets_what_was_stored(engine, redis):
    one = engine(redis.unix_url)
    one.run(IDS)
    assert one.scheduler.reset_cache() is True
    assert one.run(IDS) == 0
    assert one.tier._space.fields["epoch"] != ""
    assert engine(redis.unix_url).run(IDS) == 40


def test_what_the_old_weights_have_computed_is_not_saved_after_a_change(engine, redis):
    one = engine(redis.unix_url)
    running = one.request(IDS)
    one.allocate(running, running.num_tokens, 0)
    one.step({running: (0, 20)}, [running])
    one.settle()
    one.scheduler.reset_cache()
    one.step({running: (20, 22)})
    one.settle()
    with kvferry.Store(redis.unix_url) as store:
        spaces = {entry.space for entry in store.walk() if entry.kind == "block"}
    assert one.tier._space.digest not in spaces


def test_a_reset_waits_until_nothing_touches_the_rows(engine, own_redis):
    engine(own_redis.tcp_url).run(IDS)
    one = engine(own_redis.tcp_url, save_timeout=1.0, patience=1.0)
    begin_load(one, IDS, own_redis.pause)
    assert is_loading(one)
    one.scheduler.reset_cache()
    assert one.tier._flights == {}
    assert one.tier._view.fence(array("q", range(32)), 0) is True
    own_redis.resume()


def test_events_tell_what_is_stored(engine, redis, monkeypatch):
    one = engine(redis.unix_url, enable_kv_events=True, locality="REMOTE")
    one.tier._publishes = True  # as with kv_events_config
    one.run(IDS)
    (event,) = one.tier.take_events()
    assert (len(event.keys), event.removed, event.locality.value, event.medium.value) == (
        10,
        False,
        "REMOTE",
        "STORAGE",
    )
    assert list(one.tier.take_events()) == []


def test_vllm_counts_what_the_tier_moves(engine, redis):
    first, second = engine(redis.unix_url), engine(redis.unix_url)
    first.run(IDS)
    assert first.stats()["vllm:kv_offload_tiering_write_bytes:('1:KvferryTier',)"] == 40960
    second.run(IDS)
    assert second.stats()["vllm:kv_offload_tiering_read_bytes:('1:KvferryTier',)"] == 40960


# ---- faults of our own


@pytest.mark.parametrize("where", ["_ask", "_submit_load", "_submit_save", "_land", "_give_up_late_loads"])
def test_a_fault_of_ours_turns_the_tier_off_and_the_engine_goes_on(engine, redis, monkeypatch, without, where):
    engine(redis.unix_url).run(IDS[:20])
    second = engine(redis.unix_url)
    method = where if where not in ("_submit_load", "_submit_save") else "_took_off"
    original = getattr(KvferryTier, method)

    def fails(self, *args):
        if method == "_took_off" and args[1].op != where.removeprefix("_submit_"):
            return original(self, *args)
        raise ZeroDivisionError

    monkeypatch.setattr(KvferryTier, method, fails)
    _, pages = second.answer(IDS)
    assert torch.equal(pages, without(IDS))
    assert second.tier._is_on is False
    assert second.tier._queue.closed, "nothing of ours touches the rows any more"
    assert second.run([1, *IDS]) == 0
    second.close()
    assert second.tier._store.closed


# ---- start and end


def test_nothing_is_left_at_the_end(engine, redis):
    engine(redis.unix_url).run(IDS)
    before = len(os.listdir("/proc/self/task"))
    one = engine(redis.unix_url)
    one.run(IDS)
    assert len(os.listdir("/proc/self/task")) > before
    one.close()
    until(lambda: len(os.listdir("/proc/self/task")) <= before, "its threads have ended")
    assert not os.path.exists(one.region)
    assert one.region not in Path("/proc/self/maps").read_text(), "nobody holds the memory any more"


def test_the_end_does_not_wait_for_a_store_that_hangs(engine, own_redis, monkeypatch):
    monkeypatch.setattr(tier, "DRAIN", 0.2)
    one = engine(own_redis.tcp_url, save_timeout=1.0)
    assert one.ask(one.request([7] * 42)) == 0, "it is connected"
    own_redis.pause()
    one.prefill(one.request(IDS))
    until(lambda: one.step({}) and is_saving(one), "the saves are under way")
    one.close()
    assert not os.path.exists(one.region)


def test_nothing_is_left_after_sigkill(redis):
    script = (
        "import pytest, sys\nfrom vllm_tier_engine import TierEngine\n"
        "one = TierEngine(pytest.MonkeyPatch(), sys.argv[1])\nprint('@', one.region, flush=True)\nsys.stdin.read()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", script, redis.unix_url], env=env, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
        region = next(line.split()[1] for line in process.stdout if line.startswith("@"))
        assert region in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGKILL)
    assert not os.path.exists(region)


def test_the_name_of_the_memory_stays_until_all_have_mapped_it(tmp_path):
    path = tmp_path / "region"
    path.write_bytes(bytes(8192))
    assert unlink_region(str(path), 0) is False, "nobody has"
    with open(path, "r+b") as file:
        import mmap

        maps = [mmap.mmap(file.fileno(), 8192) for _ in range(2)]
    assert unlink_region(str(path), 2) is False
    assert path.exists()
    assert unlink_region(str(path), 1) is True
    assert not path.exists()
    for one in maps:
        one.close()


def test_the_names_are_registered_once_or_twice():
    from kvferry.vllm.plugin import register

    register()
    register()
    assert SecondaryTierFactory.get_tier_class({"type": "KvferryTier"}) is KvferryTier
    assert SecondaryTierFactory.get_tier_class({"type": "KvferryTier", "module_path": "kvferry.vllm"}) is KvferryTier


@pytest.mark.parametrize("option, words", [
    ({"stroe": 1}, "no option 'stroe'"), ({"store": 7}, "store"), ({"save_timeout": 0}, "save_timeout"),
])  # fmt: skip
def test_options_are_checked(engine, option, words):
    with pytest.raises(ValueError, match=words):
        engine("mem:", **option)


def refused(path, value):
    config, _ = configs({})
    way, last = path.rpartition(".")[::2]
    setattr(getattr(config, way) if way else config, last, value)
    return identity.tier_refusal(config)


@pytest.mark.parametrize("path, value, words", [
    ("lora_config", object(), "LoRA"), ("model_config.is_multimodal_model", True, "images"),
    ("speculative_config", object(), "speculative"), ("load_config.load_format", "dummy", "load format dummy"),
    ("model_config.model_weights", "s3://bucket", "not in the model's folder"),
    ("cache_config.calculate_kv_scales", True, "KV scales"),
])  # fmt: skip
def test_what_is_not_proven_is_refused(path, value, words):
    assert identity.tier_refusal(configs({})[0]) is None
    assert words in refused(path, value)


def test_a_refused_engine_does_not_start(engine, monkeypatch):
    monkeypatch.setattr(identity, "tier_refusal", lambda config: "this")
    with pytest.raises(ValueError, match="kvferry does not support this"):
        engine("mem:")


def test_hashes_that_no_other_process_computes_turn_the_tier_off(engine, redis, monkeypatch):
    monkeypatch.setattr(identity, "has_random_hashes", lambda config: True)
    one = engine(redis.unix_url)
    one.run(IDS)
    assert engine(redis.unix_url).run(IDS) == 0


def test_a_vllm_that_does_not_tell_its_configuration_is_refused():
    with pytest.raises(RuntimeError, match="does not tell"):
        threading_result(tier._engine_config)


def threading_result(function):
    """Called by a thread of its own: without the callers of this test."""
    results = []

    def run():
        try:
            results.append((function(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = results[0]
    if error is not None:
        raise error
    return value


# ---- identity


@pytest.fixture
def fields(monkeypatch):
    name_without_files(monkeypatch)
    return lambda row=4096, extra=None, **kind: identity.tier_fields_of(*offload_of(extra, **kind), row)


def test_what_changes_a_row_is_another_name(fields):
    names = [fields(), fields(row=8192), fields(dtype=torch.bfloat16), fields(block=8), fields(tp=2)]
    assert len({json.dumps(name, sort_keys=True) for name in names}) == len(names)


CANONICAL = {"canonical_layout": True}


def test_the_canonical_layout_does_not_depend_on_the_number_of_ranks(fields):
    assert fields(extra=CANONICAL) == fields(extra=CANONICAL, tp=2)
    assert fields(extra=CANONICAL) != fields()


def test_the_model_is_named_as_by_the_connector(monkeypatch):
    monkeypatch.setattr(identity, "folder_digest", lambda folder, log: folder)
    monkeypatch.setattr(identity, "model_folder", lambda model, revision, cache: f"{model}@{revision}")
    config, _ = configs({})
    config.model_config.__dict__.update(
        model_impl="auto", enforce_eager=True, quantization=None, quantization_config=None, revision="main",
        hf_text_config=SimpleNamespace(rope_parameters=None), hf_config=SimpleNamespace(to_dict=dict),
    )  # fmt: skip

    def name(epoch="", machines=(), by_ranks=True):
        return identity._fields_of_model(config, epoch, machines, by_ranks=by_ranks)

    named = name()
    assert named["model"] == "sha256:toy@main"
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    assert name() != named
    assert name("epoch")["epoch"] == "epoch"
    assert name(machines=[{"threads": "2"}]) != name(machines=[{"threads": "4"}])
    one, apart = name(by_ranks=False), name()
    config.parallel_config.tensor_parallel_size = 2
    assert name(by_ranks=False) == one
    assert name() != apart


# ---- answers


def test_an_answer_is_kept_as_long_as_a_request_that_asked():
    answers = Answers()
    for request in ("a", "b"):
        assert answers.of(b"k", request) is LookupResult.RETRY
    (asked,) = answers.take_new(10).values()
    assert answers.take_new(10) == {}
    asked.answer = LookupResult.HIT
    answers.end("a")
    assert answers.of(b"k", "b") is LookupResult.HIT
    answers.miss([b"k", b"other"])
    assert answers.of(b"k", "b") is LookupResult.MISS
    answers.end("b")
    assert answers.of(b"k", "c") is LookupResult.RETRY
    asked.answer = LookupResult.HIT
    assert answers.of(b"k", "c") is LookupResult.RETRY, "an old answer is not one to a new question"


def test_what_nobody_asks_for_any_more_is_not_looked_up():
    answers = Answers()
    answers.of(b"k", "a")
    answers.end("a")
    assert answers.take_new(10) == {}
    for i in range(5):
        answers.of(bytes([i]), "b")
    assert [list(answers.take_new(3)), list(answers.take_new(3))] == [[b"\0", b"\1", b"\2"], [b"\3", b"\4"]]
    answers.clear()
    assert answers.of(b"\0", "b") is LookupResult.RETRY


def test_requests_are_forgotten_at_their_end(engine, redis):
    one = engine(redis.unix_url)
    one.run(IDS)
    assert (one.tier._requests, one.tier._answers._asked, one.tier._answers._keys) == (set(), {}, {})
    one.tier.on_request_finished(ReqContext("nobody"))
