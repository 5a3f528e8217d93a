# SPDX-License-Identifier: Apache-2.0
"""Queue: submit and reap, and the awaitables of asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import FIELDS, until

import kvferry


def reap_all(queue, num):
    done = []
    while len(done) < num:
        assert queue.wait(60)
        done += queue.reap()
    return sorted(done)


def test_submit_and_reap(store, space):
    queue = kvferry.Queue(store)
    tokens, source = list(range(12)), [os.urandom(1000) for _ in range(3)]
    keys = space.chain(tokens)
    into = [bytearray(1000) for _ in source]
    saved = queue.submit_save(space, keys, source, tokens=tokens)
    assert len(queue) == 1
    assert reap_all(queue, 1) == [(saved, "save", 3, (None,) * 3, None)]
    loaded = queue.submit_load(space, keys + bytes(32), [*into, bytearray(5)])
    matched = queue.submit_match(space, keys + bytes(32))
    assert select.select([queue], [], [], 60)[0] == [queue]
    load, match = reap_all(queue, 2)
    assert load == (loaded, "load", 3, (None, None, None, "absent"), None)
    assert [bytes(b) for b in into] == source
    assert (match.ticket, match.num_ok, match.reasons) == (matched, 3, (None, None, None, "absent"))
    assert [f.payload_bytes for f in match.found] == [1000, 1000, 1000, 0]
    queue.submit_touch(space, keys)
    assert reap_all(queue, 1)[0][1:4] == ("touch", 3, (None,) * 3)
    queue.submit_remove(space, keys)
    assert reap_all(queue, 1)[0][1:4] == ("remove", 3, (None,) * 3)
    queue.submit_remove(space, keys)
    assert reap_all(queue, 1)[0][1:4] == ("remove", 0, ("absent",) * 3)
    assert len(queue) == 0
    assert queue.reap() == []
    assert queue.wait(0) is False


def test_each_and_arrivals(store, space):
    queue = kvferry.Queue(store)
    keys, source = space.chain(range(20)), [os.urandom(100) for _ in range(5)]
    space.save(keys, source)
    store.flush()
    store.remove(space.digest, space.stored_key(keys[32:64]))
    into = [bytearray(100) for _ in source]
    queue.submit_load(space, keys, into, each=True)
    assert reap_all(queue, 1)[0][2:4] == (4, (None, "absent", None, None, None))
    ticket = queue.submit_load(space, keys, into, arrivals=True)
    until(lambda: queue.arrived(ticket)[1].count(0) == 0, "all blocks arrive or miss")
    num_bytes, states = queue.arrived(ticket)
    assert (num_bytes >= 400, states[0], states[1] > 1) == (True, 1, True)
    queue.trim(ticket, 2)
    assert reap_all(queue, 1)[0].num_ok == 4
    assert queue.arrived(ticket) is None
    queue.trim(ticket, 0)
    queue.cancel(ticket)


def test_a_cancelled_batch_completes(own_redis):
    with kvferry.Store(own_redis.tcp_url, drain=0) as store, kvferry.Queue(store) as queue:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        own_redis.pause()
        ticket = queue.submit_load(space, bytes(32), [bytearray(1)], timeout=600, patience=600)
        assert queue.wait(0) is False
        queue.cancel(ticket)
        assert reap_all(queue, 1)[0].num_ok == 0
        own_redis.resume()


def test_a_space_of_another_store_is_refused(mem_space):
    with kvferry.Store("mem:") as other, kvferry.Queue(other) as queue:
        with pytest.raises(kvferry.LimitError, match="of another store"):
            queue.submit_match(mem_space, bytes(32))
        with pytest.raises(kvferry.LimitError):
            kvferry.Queue(other, 0)
        with pytest.raises(kvferry.LimitError):
            kvferry.Queue(other, 4097)
        assert kvferry.Queue(other, 4096).depth == 4096


def test_a_wait_ends_when_the_queue_is_closed(mem):
    queue = kvferry.Queue(mem)
    begun, errors = threading.Event(), []

    def wait():
        begun.set()
        try:
            queue.wait()
        except kvferry.ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    queue.close()
    thread.join(60)
    assert len(errors) == 1


# ---- asyncio


def test_await(store, space):
    tokens, source = list(range(12)), [os.urandom(1000) for _ in range(3)]
    keys = space.chain(tokens)

    async def main():
        async with kvferry.Queue(store) as queue:
            assert (await queue.save(space, keys, source, tokens=tokens)).num_ok == 3
            into = [bytearray(1000) for _ in source]
            assert (await queue.load(space, keys, into, tokens=tokens)).reasons == (None,) * 3
            assert [bytes(b) for b in into] == source
            assert (await queue.match(space, keys)).found[2].num_tokens == 4
            assert (await queue.touch(space, keys)).num_ok == 3
            assert (await queue.remove(space, keys)).num_ok == 3
            assert (await queue.match(space, keys)).num_ok == 0
            assert len(queue) == 0

    asyncio.run(main())
    asyncio.run(main())


def test_an_awaited_match_of_each_counts_all(mem, mem_space):
    keys = mem_space.chain(range(12))
    mem_space.save(keys, [b"x"] * 3)
    mem.flush()
    mem.remove(mem_space.digest, mem_space.stored_key(keys[32:64]))
    queue = kvferry.Queue(mem)
    assert asyncio.run(queue.match(mem_space, keys)).num_ok == 1
    assert asyncio.run(queue.match(mem_space, keys, each=True)).num_ok == 2


def test_more_awaits_than_the_queue_holds(mem, mem_space):
    keys = mem_space.chain(range(400))
    mem_space.save(keys, [os.urandom(10) for _ in range(100)])
    mem.flush()

    async def main():
        queue = kvferry.Queue(mem, depth=4)
        done = await asyncio.gather(*(queue.match(mem_space, keys[: 32 * n]) for n in range(100)))
        assert [d.num_ok for d in done] == list(range(100))
        queue.close()

    asyncio.run(main())


def test_a_cancelled_task_gives_its_memory_back(own_redis):
    async def main(store, space):
        queue = kvferry.Queue(store)
        memory = bytearray(10)
        task = asyncio.create_task(queue.load(space, bytes(32), [memory], timeout=600, patience=600))
        while len(queue) == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        memory.extend(b"x")  # nobody holds it
        assert len(queue) == 0
        queue.close()

    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        own_redis.pause()
        asyncio.run(main(store, kvferry.Space(store, FIELDS)))
        own_redis.resume()


def test_a_task_that_is_cancelled_again_still_waits(own_redis):
    class Slow(kvferry.Queue):
        def cancel(self, ticket):
            """Nothing is dropped, as of blocks that have begun."""

    async def main(store, space):
        queue, memory = Slow(store), bytearray(10)
        task = asyncio.create_task(queue.load(space, bytes(32), [memory], timeout=600, patience=600))
        while len(queue) == 0:
            await asyncio.sleep(0)
        for _ in range(10):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        own_redis.resume()
        with pytest.raises(asyncio.CancelledError):
            await task
        memory.extend(b"x")  # nobody holds it
        queue.close()

    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        own_redis.pause()
        asyncio.run(main(store, kvferry.Space(store, FIELDS)))


@pytest.mark.parametrize("closes", ["queue", "store", "thread"])
def test_an_await_ends_when_the_queue_is_closed(own_redis, closes):
    async def main(store, space):
        queue = kvferry.Queue(store)
        task = asyncio.create_task(queue.load(space, bytes(32), [bytearray(1)], timeout=2, patience=2))
        while len(queue) == 0:
            await asyncio.sleep(0)
        if closes == "thread":
            await asyncio.to_thread(queue.close)
        else:
            (queue if closes == "queue" else store).close()
        with pytest.raises(kvferry.ClosedError):
            await task

    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        own_redis.pause()
        asyncio.run(main(store, kvferry.Space(store, FIELDS)))
        own_redis.resume()


def test_two_loops_take_turns(mem, mem_space):
    queue = kvferry.Queue(mem)
    for _ in range(3):
        assert asyncio.run(queue.match(mem_space, b"")).num_ok == 0
    ticket = queue.submit_match(mem_space, b"")
    assert queue.wait(60)
    assert asyncio.run(queue.match(mem_space, b"")).ticket == ticket + 1
    assert [d.ticket for d in queue.reap()] == [ticket]
    assert queue.reap() == []


def test_two_loops_at_once_are_refused(own_redis):
    async def wait(queue, space, begun, end):
        task = asyncio.create_task(queue.match(space, bytes(32), timeout=600))
        while len(queue) == 0:
            await asyncio.sleep(0)
        begun.set()
        await asyncio.to_thread(end.wait)
        return await task

    with kvferry.Store(own_redis.tcp_url, drain=0) as store, ThreadPoolExecutor(1) as thread:
        space, queue = kvferry.Space(store, FIELDS), kvferry.Queue(store)
        begun, end = threading.Event(), threading.Event()
        own_redis.pause()
        first = thread.submit(asyncio.run, wait(queue, space, begun, end))
        begun.wait()
        try:
            with pytest.raises(RuntimeError, match="open one for each loop"):
                asyncio.run(queue.match(space, bytes(32)))
        finally:
            own_redis.resume()
            end.set()
        assert first.result(60).op == "match"


def test_an_await_raises_what_its_arguments_cause(mem, mem_space):
    with pytest.raises(TypeError):
        asyncio.run(kvferry.Queue(mem).load(mem_space, "x", []))
    mem.close()
    with pytest.raises(kvferry.ClosedError):
        asyncio.run(kvferry.Queue(mem).match(mem_space, b""))


async def refused(queue, space):
    with pytest.raises(kvferry.LimitError):
        await queue.load(space, bytes(31), [])


async def thrown_away(queue, space):
    waiting = queue.match(space, b"")
    waiting.send(None)
    waiting.close()
    until(lambda: select.select([queue], [], [], 0)[0], "the batch ends")
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def cancelled_without_room(queue, space):
    while queue.submit_match(space, b"") is not None:
        pass
    task = asyncio.create_task(queue.match(space, b""))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("end", [refused, thrown_away, cancelled_without_room])
def test_a_loop_keeps_no_queue_that_nobody_awaits(mem, mem_space, end):
    async def main():
        queue = kvferry.Queue(mem, 1)
        gone = weakref.ref(queue)
        await end(queue, mem_space)
        await asyncio.sleep(0)  # the loop lets go of the task that has woken this one
        del queue
        gc.collect()
        assert gone() is None

    asyncio.run(main())


def test_the_loop_runs_while_it_waits(own_redis):
    async def main(store, space):
        queue = kvferry.Queue(store)
        task = asyncio.create_task(queue.load(space, bytes(32), [bytearray(1)], timeout=60, patience=60))
        turns = 0
        while turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert not task.done()
        own_redis.resume()
        assert (await task).reasons == ("absent",)

    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        own_redis.pause()
        asyncio.run(main(store, kvferry.Space(store, FIELDS)))
