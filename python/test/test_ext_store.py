# SPDX-License-Identifier: Apache-2.0
"""Store, Space and blocks on each kind of store: what is saved loads byte for byte, or misses with a reason."""

from __future__ import annotations

import array
import os

import pytest
from conftest import FIELDS

import kvferry


def payloads(num: int, size: int = 1000) -> list[bytes]:
    return [os.urandom(size) for _ in range(num)]


def saved(store, space, num: int = 5, size: int = 1000):
    tokens = list(range(4 * num))
    keys, source = space.chain(tokens), payloads(num, size)
    assert space.save(keys, source, tokens=tokens) == (num, (None,) * num)
    assert store.flush() == (True, 0)
    return tokens, keys, source


def test_what_is_saved_is_loaded(store, space):
    tokens, keys, source = saved(store, space)
    into = [bytearray(1000) for _ in source]
    assert space.match(keys) == 5
    assert space.load(keys, into, tokens=tokens) == (5, (None,) * 5)
    assert [bytes(b) for b in into] == source


def test_a_block_in_pieces_is_one_payload(store, space):
    _, keys, source = saved(store, space, num=2)
    pieces = [[bytearray(1), bytearray(400), bytearray(0), bytearray(599)] for _ in source]
    assert space.load(keys, pieces).num_ok == 2
    assert [b"".join(p) for p in pieces] == source


def test_addresses_are_memory_too(store, space):
    _, keys, source = saved(store, space, num=2)
    room = array.array("B", bytes(2000))
    address, _ = room.buffer_info()
    blocks = [(address, 1000), [(address + 1000, 300), (address + 1300, 700)]]
    assert space.load(keys, blocks, owner=room).num_ok == 2
    assert room.tobytes() == b"".join(source)


def test_a_gap_ends_a_load_and_each_goes_on(store, space):
    tokens, keys, source = saved(store, space)
    assert store.remove(space.digest, space.stored_key(keys[64:96]))
    into = [bytearray(1000) for _ in source]
    assert space.load(keys, into).reasons == (None, None, "absent", "after-gap", "after-gap")
    result = space.load(keys, into, each=True)
    assert (result.num_ok, result.reasons) == (4, (None, None, "absent", None, None))
    assert [bytes(b) for i, b in enumerate(into) if i != 2] == [b for i, b in enumerate(source) if i != 2]
    assert space.match(keys) == 2
    assert [f.why for f in space.find(keys)] == [None, None, "absent", None, None]


def test_found_says_the_room_that_a_load_needs(store, space):
    _, keys, _ = saved(store, space, num=1, size=77)
    (found,) = space.find(keys)
    assert (found.payload_bytes, found.num_tokens, found.tier) == (77, 4, 0)
    assert found.stored > 1.7e9


def test_other_tokens_are_a_miss(store, space):
    tokens, keys, _ = saved(store, space, num=1)
    assert space.load(keys, [bytearray(1000)], tokens=[9, 9, 9, 9]).reasons == ("other-tokens",)
    assert space.load(keys, [bytearray(1000)], tokens=tokens, first_token=4).reasons != (None,)


def test_memory_of_another_length_is_a_miss(store, space):
    _, keys, _ = saved(store, space, num=1)
    assert space.load(keys, [bytearray(999)]).reasons == ("truncated",)
    assert space.load(keys, [bytearray(1001)]).reasons == ("truncated",)


def test_a_last_block_may_have_fewer_tokens(store, space):
    tokens = [1, 2, 3, 4, 5, 6]
    block = space.chain(tokens)
    keys = block + space.tail_key(block, tokens[4:])
    source = payloads(2)
    assert space.save(keys, source, tokens=tokens).num_ok == 2
    store.flush()
    into = [bytearray(1000), bytearray(1000)]
    assert space.load(keys, into, tokens=tokens).num_ok == 2
    assert [bytes(b) for b in into] == source
    assert [found.num_tokens for found in space.find(keys)] == [4, 2]


def test_the_rest_of_a_prompt_may_follow(store, space):
    prompt = list(range(11))
    keys = space.chain(prompt)
    assert space.save(keys, payloads(2), tokens=prompt).num_ok == 2
    store.flush()
    assert space.load(keys, [bytearray(1000), bytearray(1000)], tokens=prompt[:8]).num_ok == 2
    assert space.load(keys, [bytearray(1000), bytearray(1000)], tokens=prompt).num_ok == 2
    for tokens in (prompt[:4], [*prompt, 11], []):
        with pytest.raises(kvferry.LimitError, match="tokens for 2 blocks of 4"):
            space.load(keys, [bytearray(1000), bytearray(1000)], tokens=tokens)


def test_views_load_into_slots(store, space):
    _, keys, source = saved(store, space)
    pool = array.array("B", bytes(8 * 1000))
    address, _ = pool.buffer_info()
    with kvferry.View([(address, 1000, 250, 250, 4)], 8, pool) as view:
        assert (view.num_slots, view.slot_bytes) == (8, 1000)
        assert space.load(keys, view, slots=[7, 5, 3, 1, 0]).num_ok == 5
        assert view.fence([0, 1]) is True
        other = kvferry.Space(store, {**FIELDS, "tenant": "b"}, block_tokens=4)
        keys = other.chain(range(20))
        assert other.save(keys, view, slots=array.array("i", [7, 5, 3, 1, 0])).num_ok == 5
        store.flush()
        into = [bytearray(1000) for _ in source]
        assert other.load(keys, into).num_ok == 5
    assert [bytes(pool[s * 1000 : s * 1000 + 1000]) for s in (7, 5, 3, 1, 0)] == source
    assert [bytes(b) for b in into] == source


def test_what_is_known_is_not_saved_again(store, space):
    tokens, keys, source = saved(store, space, num=2)
    assert space.knows(keys[:32])
    assert space.save(keys, source, tokens=tokens).num_ok == 2
    assert store.flush() == (True, 0)
    assert store.stats()["known"] == 2
    space.forget(keys)
    assert not space.knows(keys[:32])


def test_spaces_do_not_see_each_other(store, space):
    _, keys, _ = saved(store, space, num=2)
    other = kvferry.Space(store, {**FIELDS, "model": "1" * 64}, block_tokens=4)
    assert other.match(other.chain(range(8))) == 0
    assert other.load(keys, [bytearray(1000), bytearray(1000)]).num_ok == 0


def test_walk_describe_clear(store, space):
    tokens, keys, source = saved(store, space, num=3)
    entries = list(store.walk())
    assert sorted(e.kind for e in entries) == ["block", "block", "block", "card"]
    blocks = [e for e in entries if e.kind == "block"]
    assert {e.key for e in blocks} == {keys[i : i + 32] for i in (0, 32, 64)}
    assert all(e.space == space.digest and e.payload_bytes == 1000 and e.damage is None for e in blocks)
    (one,) = store.walk(space=space.digest, key=keys[32:64], whole=True)
    assert (one.payload, one.tokens, one.first_token) == (source[1], (4, 5, 6, 7), 4)
    assert store.describe(space.digest) == {**FIELDS, "block_tokens": "4"} == space.fields
    assert store.describe(bytes(32)) is None
    assert store.clear(space.digest) == 4
    assert list(store.walk()) == []
    assert store.clear() == 0


def test_remove_says_whether_there_was_one(store, space):
    _, keys, _ = saved(store, space, num=1)
    assert store.remove(space.digest, keys) is True
    assert store.remove(space.digest, keys) is False


def test_stats_count(store, space):
    _, keys, source = saved(store, space, num=3)
    space.load(keys + bytes(32), [bytearray(1000) for _ in range(4)])
    stats = store.stats()
    assert (stats["saves"], stats["saved"], stats["loads"], stats["load_hits"]) == (3, 3, 4, 3)
    assert stats["misses"] == {"absent": 1} and stats["save_failures"] == {}
    assert stats["num_tiers"] == store.num_tiers == 1


def test_tiers_and_doctor(store):
    (tier,) = store.tiers()
    assert tier.reachable and isinstance(tier.url, str)
    findings = store.doctor()
    assert findings and all(f.severity in ("fine", "note", "warning", "fatal") for f in findings)


def test_sealed_blocks_need_the_secret(any_url):
    secret = os.urandom(32)
    with kvferry.Store(any_url, secret=secret) as store:
        space = kvferry.Space(store, FIELDS, block_tokens=4)
        tokens, keys, source = saved(store, space, num=2)
        assert space.stored_key(keys[:32]) != keys[:32]
        into = [bytearray(1000), bytearray(1000)]
        assert space.load(keys, into, tokens=tokens).num_ok == 2
        assert [bytes(b) for b in into] == source
        if any_url != "mem:":
            with kvferry.Store(any_url) as other, kvferry.Space(other, FIELDS, block_tokens=4) as plain:
                assert plain.match(plain.chain(tokens)) == 0
                with pytest.raises(kvferry.RefusedError):
                    other.describe(space.digest)


def test_a_previous_secret_still_opens(any_url):
    old, new = os.urandom(32), os.urandom(32)
    with kvferry.Store(any_url) as store:
        tokens, keys, source = saved(store, kvferry.Space(store, FIELDS, block_tokens=4, secret=old), num=1)
        renewed = kvferry.Space(store, FIELDS, block_tokens=4, secret=new, previous_secret=old)
        assert kvferry.Space(store, FIELDS, block_tokens=4, secret=new).match(keys) == 0
        into = bytearray(1000)
        assert renewed.load(renewed.chain(tokens), [into], tokens=tokens).num_ok == 1
        assert into == source[0]


# ---- keys


def test_chains_continue_and_salts_separate(mem_space):
    tokens = list(range(12))
    keys = mem_space.chain(tokens)
    assert len(keys) == 96
    assert keys == mem_space.chain(tokens[:4]) + mem_space.chain(tokens[4:], keys[:32])
    assert mem_space.chain(tokens + [99]) == keys
    salt = mem_space.salt_key(None, b"tenant")
    assert mem_space.chain(tokens, salt) != keys
    assert mem_space.chain([]) == b""


def test_tokens_come_in_many_forms(mem_space):
    keys = mem_space.chain(list(range(8)))
    for tokens in (
        range(8),
        tuple(range(8)),
        array.array("I", range(8)),
        array.array("i", range(8)),
        array.array("q", range(8)),
        array.array("Q", range(8)),
        memoryview(array.array("i", range(8))),
    ):
        assert mem_space.chain(tokens) == keys


def test_numpy_is_memory_and_tokens(store, space):
    np = pytest.importorskip("numpy")
    tokens = np.arange(8, dtype=np.int64)
    keys = space.chain(tokens)
    assert keys == space.chain(tokens.astype(np.uint32)) == space.chain([np.int32(i) for i in range(8)])
    source = np.random.default_rng(1).integers(0, 256, (2, 3, 100), dtype=np.uint8)
    assert space.save(keys, source, tokens=tokens).num_ok == 2
    store.flush()
    into = np.zeros_like(source)
    assert space.load(keys, into, tokens=tokens).num_ok == 2
    assert (into == source).all()


def test_keys_of_hashes(mem_space):
    hashes = [b"a", b"b" * 100, b""]
    keys = mem_space.keys_of(hashes, suffix=b"/3")
    assert keys == b"".join(mem_space.key_of(h + b"/3") for h in hashes)
    assert mem_space.keys_of([]) == b""
    names = {mem_space.state_key(keys[:32]), mem_space.apart_key(keys[:32], b"x"), keys[:32]}
    assert len(names) == 3
    assert mem_space.stored_key(keys[:32]) == keys[:32]
