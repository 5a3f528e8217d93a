# SPDX-License-Identifier: Apache-2.0
"""The connector for pages in a device's memory: on a stand-in whose streams run as late as they may (fake_device.py),
and on a GPU where there is one. The stores are real."""

from array import array

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here (make setup-engines)")
pytest.importorskip("torch")

import fake_device
import torch
import vllm_lab
from conftest import until
from test_vllm import (  # noqa: F401  these run here with the fixture `engine` of this file
    IDS,
    test_a_corrupt_block_is_computed_and_stored_anew,
    test_a_fault_in_a_worker_turns_kvferry_off,
    test_a_folder_serves_as_a_store,
    test_a_load_goes_on_as_long_as_it_is_worth_it,
    test_a_missing_block_ends_the_hit,
    test_a_prompt_that_goes_on_differently_loads_the_common_blocks,
    test_a_resumed_request_begins_anew,
    test_a_second_engine_loads_what_the_first_has_computed,
    test_a_silent_store_does_not_answer_for_ever,
    test_a_slow_store_gets_no_more_saves,
    test_a_store_that_dies_while_loading_is_a_miss,
    test_a_store_that_is_down_at_the_start_is_a_miss,
    test_all_ranks_must_have_a_block,
    test_an_aborted_request_still_ends_its_load,
    test_blocks_of_a_prefill_in_chunks_and_of_generated_tokens_are_saved,
    test_blocks_that_are_stored_are_announced,
    test_eviction_between_lookup_and_load_is_a_miss,
    test_many_requests_in_two_rounds,
    test_one_token_is_always_computed,
    test_pages_are_not_written_while_a_save_reads_them,
    test_the_trace_tells_what_was_done,
)
from vllm_engine import BLOCK, FIELDS, LAYERS, ROW, SLOTS, Engine, expected

from kvferry.vllm import staging, worker

HEADS, HALF = 2, ROW // 2
SLOT_BYTES = LAYERS * BLOCK * ROW * 4


class DeviceEngine(Engine):
    """device: a stand-in, or None for a GPU. New pages are filled with zeros before anything is loaded into them, as
    vLLM does, and all that the model does is on the stream of its own."""

    def __init__(self, monkeypatch, url, device, layout="LBHNC", **more):
        self.device, (self.make, self.page_of) = device, LAYOUTS[layout]
        if device is not None:
            monkeypatch.setattr(staging, "streams_of", lambda _: device)
        self.fresh = []
        super().__init__(monkeypatch, url, **more)
        for one, pages in zip(self.workers, self.pages, strict=True):
            self._zero_new_pages(one, pages)

    def _zero_new_pages(self, worker, pages):
        before = worker.handle_preemptions

        def handle_preemptions(meta):
            before(meta)
            for slot in self.fresh:
                for cache in pages.values():
                    self.write(self.page(cache, slot), torch.zeros(BLOCK * ROW))
            if worker is self.workers[-1]:
                self.fresh = []

        worker.handle_preemptions = handle_preemptions

    def new_pages(self):
        where = "cpu" if self.device is not None else "cuda"
        return {f"model.layers.{i}.attn": cache for i, cache in enumerate(self.make(where))}

    def page(self, cache, slot):
        return self.page_of(cache, slot)

    def write(self, page, row):
        if self.device is None:
            return super().write(page, row.to(page.device))
        row = row.reshape(page.shape).clone()
        with self.device.stream(self.device.compute):
            page.copy_(row)

    def allocate(self, request, num_tokens, external):
        known = len(self.slots.get(request.request_id, ()))
        own = super().allocate(request, num_tokens, external)
        self.fresh += own[known:]
        return own

    def check(self, request, blocks):
        """What the engine's own stream finds after all that it was given."""
        stream = torch.cuda.current_stream() if self.device is None else self.device.compute
        stream.synchronize()
        super().check(request, blocks)

    @property
    def staged(self):
        return self.workers[0]._worker._registered


def each_layer(*shape, order=None):
    """Layers of this shape, whose memory is ordered by these axes."""

    def make(where):
        order_ = order or tuple(range(len(shape)))
        back = [order_.index(i) for i in range(len(shape))]
        return [torch.zeros([shape[i] for i in order_], device=where).permute(back) for _ in range(LAYERS)]

    return make


def of_one_tensor(where):
    return list(torch.zeros(SLOTS, LAYERS, HEADS, BLOCK, HALF, device=where).unbind(1))


def first(cache, slot):
    return cache[slot]


def second(cache, slot):
    return cache[:, slot]


LAYOUTS = {
    "LBHNC": (each_layer(SLOTS, HEADS, BLOCK, HALF), first),
    "LBNHC": (each_layer(SLOTS, HEADS, BLOCK, HALF, order=(0, 2, 1, 3)), first),
    "LHBNC": (each_layer(SLOTS, HEADS, BLOCK, HALF, order=(1, 0, 2, 3)), first),
    "BLHNC": (of_one_tensor, first),
    "FlashAttention NHD": (each_layer(2, SLOTS, BLOCK, HEADS, HALF // 2), second),
    "FlashAttention HND": (each_layer(2, SLOTS, BLOCK, HEADS, HALF // 2, order=(0, 1, 3, 2, 4)), second),
    "FlashInfer": (each_layer(SLOTS, 2, BLOCK, HEADS, HALF // 2), first),
    "MLA": (each_layer(SLOTS, BLOCK, ROW), first),
    "smaller blocks of kernels": (
        each_layer(SLOTS * 2, HEADS, BLOCK // 2, HALF),
        lambda cache, slot: cache[2 * slot : 2 * slot + 2],
    ),
}


@pytest.fixture(params=["stand-in", "GPU"])
def device(request):
    if request.param == "GPU":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU here")
        return None
    return fake_device.Device()


@pytest.fixture
def fake():
    return fake_device.Device()


@pytest.fixture
def start(monkeypatch):
    engines = []

    def start(url, device, **more):
        engines.append(DeviceEngine(monkeypatch, url, device, **more))
        return engines[-1]

    yield start
    for one in engines:
        if one.device is not None:
            one.device.may_run.set()
        one.close()


# ---- what the tests of host memory say of the connector is right here too


@pytest.fixture
def engine(start, device):
    return lambda url, **more: start(url, device, **more)


# ---- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_any_layout_come_back(start, device, folder_url, layout):
    assert start(folder_url, device, layout=layout).run(IDS) == 0
    assert start(folder_url, device, layout=layout).run(IDS) == 40


def test_a_block_is_stored_layer_by_layer_as_memory_has_it(start, device, folder_url):
    one = start(folder_url, device)
    one.run(IDS)
    space = one.scheduler._scheduler._space
    key = space.keys_of([bytes(one.request(IDS).block_hashes[3])], bytes(8))
    payload = bytearray(SLOT_BYTES)
    assert space.load(key, [payload], tokens=IDS[12:16], first_token=12).num_ok == 1
    assert bytes(payload) == expected(IDS, 3).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("width", [6, 7, 8])
def test_pages_are_copied_in_the_largest_words_that_they_are_made_of(dtype, width):
    pages = staging.by_block(torch.zeros(64, 2, 4, width, dtype=dtype), 64)
    word = staging.word_of(pages)
    num_bytes = 8 * width * dtype.itemsize
    assert num_bytes % word.itemsize == 0
    assert word is torch.int64 or num_bytes % (2 * word.itemsize) != 0
    assert pages.view(word).shape == (64, num_bytes // word.itemsize)


@pytest.mark.parametrize(
    "cache, words",
    [
        (torch.zeros(64, 64, 4, 8), "not clear"),
        (torch.zeros(63, 1, 4, 8), "not clear"),
        (torch.zeros(64, 1, 4, 16)[..., ::2], "gaps"),
    ],
)
def test_pages_that_are_not_understood_are_refused(cache, words):
    with pytest.raises(ValueError, match=words):
        staging.by_block(cache, 64)


def test_a_pool_that_is_too_small_is_refused(start, fake):
    with pytest.raises(ValueError, match=f"staging_bytes {SLOT_BYTES} is less than two blocks"):
        start("mem:", fake, staging_bytes=SLOT_BYTES)


# ---- the order of copies


def test_the_engine_writes_a_page_anew_only_when_it_is_gathered(start, fake, folder_url, monkeypatch):
    """The copies are late, and the engine does not wait for them: its stream does."""
    monkeypatch.setattr(worker, "SLOW_SAVE", 1000.0)  # the copies are held for as long as the machine takes
    one = start(folder_url, fake, save_timeout=60.0)
    fake.may_run.clear()
    request = one.request(IDS)
    one.ask(request)
    one.prefill(request)
    one.end(request)
    other = one.request([9] * 42)
    one.free.sort()  # the same pages again
    one.prefill(other)
    fake.compute.synchronize()
    fake.may_run.set()
    one.settle()
    assert start(folder_url, fake).run(IDS) == 40
    assert start(folder_url, fake).run([9] * 42) == 40


def test_a_load_into_pages_that_a_save_still_reads(start, fake, folder_url, monkeypatch):
    start(folder_url, fake).run([9] * 42)
    monkeypatch.setattr(worker, "SLOW_SAVE", 1000.0)  # the copies are held for as long as the machine takes
    one = start(folder_url, fake, save_timeout=60.0)
    request = one.request(IDS)
    one.ask(request)
    fake.may_run.clear()
    one.prefill(request)
    one.end(request)
    one.free.sort()
    other = one.request([9] * 42)
    external = one.ask(other)
    one.allocate(other, external, external)
    until(lambda: one.step({}) and one.staged._landing, "the load has arrived")
    lane = one.staged._lanes["load"]
    lane.stream.synchronize()
    fake.may_run.set()
    until(lambda: other.request_id in one.step({}).finished_recving, "the load ends")
    one.check(other, range(10))
    one.settle()
    assert start(folder_url, fake).run(IDS) == 40


def test_a_fence_does_not_wait_for_the_save(start, device, own_redis):
    """The server hangs with saves under way: pages are free as soon as they are copied."""
    one = start(own_redis.tcp_url, device, save_timeout=60.0)
    request = one.request(IDS)
    one.ask(request)
    own_redis.pause()
    one.prefill(request)
    assert one.staged.fence(array("q", one.slots[request.request_id]), 0.0)
    one.end(request)
    one.free.sort()
    other = one.request([9] * 42)
    one.prefill(other)
    one.check(other, range(10))
    own_redis.resume()
    one.settle()
    assert start(own_redis.tcp_url, device).run(IDS) == 40


# ---- the pool


def test_loads_larger_than_the_pool_wait_for_room(start, device, redis):
    """Each slot of the pool is used again and again, and never before its copy has ended."""
    start(redis.unix_url, device).run(IDS)
    one = start(redis.unix_url, device, staging_bytes=4 * SLOT_BYTES)
    for request in [one.request(IDS) for _ in range(3)]:
        assert one.load(request) == 40
        one.check(request, range(10))
    assert sorted(one.staged._room) == list(range(4))


def test_saves_that_find_no_room_are_shed_and_leave_half_of_it_to_loads(start, device, own_redis, tmp_path):
    trace = tmp_path / "trace"
    start(own_redis.tcp_url, device).run([9] * 42)
    one = start(own_redis.tcp_url, device, staging_bytes=8 * SLOT_BYTES, save_timeout=60.0, trace=str(trace))
    first, second, third = one.request(IDS), one.request([7] * 42), one.request([9] * 42)
    assert one.ask(first) == 0 and one.ask(third) == 40
    own_redis.pause()
    one.prefill(first)
    one.prefill(second)
    assert [e["request"] for e in vllm_lab.events(trace, "shed")] == [second.request_id]
    assert len(one.staged._room) == 4
    own_redis.resume()
    one.settle()
    saves = vllm_lab.events(trace, "save")
    assert [(e["ok"], e["why"]) for e in saves] == [(4, "full")]
    assert sorted(one.staged._room) == list(range(8))
    assert start(own_redis.tcp_url, device).run(IDS) == 16


def test_a_load_that_is_given_up_does_not_wait_for_the_room_of_others(start, device, own_redis):
    start(own_redis.tcp_url, device).run(IDS)
    one = start(own_redis.tcp_url, device, staging_bytes=4 * SLOT_BYTES, load_timeout=60.0)
    first = one.request(IDS)
    assert one.ask(first) == 40
    own_redis.pause()
    one.allocate(first, 40, 40)
    one.step({})
    pages, worker = one.staged, one.workers[0]._worker
    assert len(pages._room) == 0 and len(pages._waiting) == 6
    keys, slots = bytes(2 * 32), array("q", [50, 51])
    more = {"tokens": array("I", [9] * 8), "first_token": 0, "timeout": 60.0, "patience": 60.0}
    ticket = pages.load(worker._space, keys, slots, **more)
    pages.cancel(ticket)
    done = [done for done in pages.reap() if done.ticket == ticket]
    assert [(d.num_ok, d.reasons) for d in done] == [(0, ("budget", "budget"))]
    own_redis.resume()
    until(lambda: first.request_id in one.step({}).finished_recving, "the first load ends")
    one.check(first, range(10))


# ---- copies that fail


@pytest.mark.parametrize("call", ["copy_", "index_copy_", "query"])
def test_a_load_whose_copy_fails_is_computed(start, fake, redis, call):
    start(redis.unix_url, fake).run(IDS)
    one = start(redis.unix_url, fake)
    request = one.request(IDS)
    assert one.ask(request) == 40
    fake.fail(call)
    assert one.load(request) == 0
    one.prefill(request)
    one.check(request, range(10))
    one.settle()
    one.end(request)
    assert one.run(IDS) == 40, "the next request loads again"


@pytest.mark.parametrize("call", ["copy_", "index_select", "synchronize"])
def test_a_save_whose_copy_fails_stores_nothing(start, fake, redis, call):
    one = start(redis.unix_url, fake)
    request = one.request(IDS)
    assert one.ask(request) == 0
    fake.fail(call)
    one.prefill(request)
    one.check(request, range(10))
    one.settle()
    one.end(request)
    assert start(redis.unix_url, fake).run(IDS) == 0
    assert start(redis.unix_url, fake).run(IDS) == 40


def test_the_end_waits_for_copies_that_are_under_way(start, fake, own_redis):
    one = start(own_redis.tcp_url, fake)
    request = one.request(IDS)
    one.ask(request)
    one.prefill(request)
    one.close()
    assert not one.staged._thread.is_alive()
    assert not any(lane.stream.work for lane in one.staged._lanes.values())
    assert start(own_redis.tcp_url, fake).run(IDS) == 40


def test_another_identity_finds_nothing(start, device, redis):
    start(redis.unix_url, device).run(IDS)
    assert start(redis.unix_url, device, fields={**FIELDS, "kv": "other pages"}).run(IDS) == 0
