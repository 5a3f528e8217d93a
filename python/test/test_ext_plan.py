# SPDX-License-Identifier: Apache-2.0
"""Load or compute (kvferry/plan.h) as Python calls it: every field of a gap reaches the library, and every field of a
plan comes back."""

from __future__ import annotations

import pickle
import sys

import pytest
from conftest import FIELDS, until

import kvferry

GAP = {"block_bytes": 1_000_000, "block_tokens": 100, "batch_tokens": 1000}
FAST, SLOW = kvferry.Link((1e9, 0.001, False)), kvferry.Link((1e6, 0.001, False))
SILENT = kvferry.Link((0.0, 0.0, True))


@pytest.fixture
def pace():
    """A millisecond a token: a block of GAP takes 0.1 s."""
    pace = kvferry.Pace()
    pace.note(1000, 1.0)
    return pace


def test_a_new_pace_knows_nothing():
    pace = kvferry.Pace()
    assert pace.seconds(1000, 1000) == 0
    pace.note(0, 1.0)
    pace.note(1000, 0.0)
    assert pace.seconds(1000, 1000) == 0
    plan = pace.decide(10, **GAP)
    assert (plan.kind, plan.num_load, plan.compute_seconds) == ("try", 10, 0)


def test_the_last_batches_count_most(pace):
    assert pace.seconds(2000, 1000) == pytest.approx(2.0)
    for _ in range(20):
        pace.note(1000, 3.0)
    assert pace.seconds(1000, 1000) == pytest.approx(3.0, rel=0.01)
    pace.note(100, 0.2)
    assert pace.seconds(100, 1000) == pytest.approx(0.2)


@pytest.mark.parametrize("link, more, kind, num_load", [
    (FAST, {}, "load", 10), (kvferry.Link((1e7, 0.0, False)), {}, "both", None), (SLOW, {"whole": True}, "compute", 0),
    (SILENT, {}, "compute", 0), (None, {}, "try", 10), (kvferry.Link((1e12, 0.0, False)), {"whole": True}, "load", 10),
    (SLOW, {"whole": True, "instead_blocks": 1000}, "load", 10),
    (SLOW, {"whole": True, "here_bytes": 9_500_000}, "load", 10),
    (FAST, {"whole": True, "other_bytes": 2_000_000_000}, "compute", 0),
])  # fmt: skip
def test_the_link_and_the_gap_decide(pace, link, more, kind, num_load):
    plan = pace.decide(10, **GAP, link=link, **more)
    assert plan.kind == kind
    assert plan.num_load + plan.num_compute == 10
    assert num_load is None or plan.num_load == num_load
    assert num_load is not None or 0 < plan.num_load < 10


def test_a_plan_has_its_times(pace):
    plan = pace.decide(10, **GAP, link=SLOW, whole=True, instead_blocks=1000)
    assert plan.compute_seconds == pytest.approx(100.0)
    assert plan.load_seconds == pytest.approx(10.001)
    assert plan.patience == pytest.approx(3.0)
    moving = pace.decide(10, **GAP, link=SLOW, whole=True, instead_blocks=1000, moving=True)
    assert moving.load_seconds == pytest.approx(10.0)
    assert pace.decide(0, **GAP).kind == "none"


def test_a_trifle_is_loaded_unless_patience_is_used_up(pace):
    gap = {**GAP, "block_tokens": 1}
    assert pace.decide(1, **gap, link=SILENT).kind == "load"
    assert pace.decide(1, **gap, link=SILENT, impatient=True).kind == "compute"


@pytest.mark.parametrize("wrong", [
    {"block_bytes": -1}, {"block_tokens": 0}, {"batch_tokens": 0}, {"here_bytes": -1}, {"instead_blocks": 1 << 20},
    {"link": (-1.0, 0.0, False)}, {"link": (float("nan"), 0.0, False)}, {"link": (1.0, -1.0, False)},
    {"link": (1.0, 1e12, False)},
])  # fmt: skip
def test_a_gap_that_can_not_be_is_an_error(pace, wrong):
    with pytest.raises(kvferry.LimitError):
        pace.decide(10, **{**GAP, **wrong})


@pytest.mark.parametrize("call", [
    lambda pace: pace.decide(kvferry.MAX_BLOCKS + 1, **GAP), lambda pace: pace.decide(-1, **GAP),
    lambda pace: pace.note(-1, 1.0), lambda pace: pace.note(1, -1.0), lambda pace: pace.note(1, float("nan")),
    lambda pace: pace.seconds(1, 0),
])  # fmt: skip
def test_a_number_that_can_not_be_is_an_error(pace, call):
    with pytest.raises(kvferry.LimitError):
        call(pace)


@pytest.mark.parametrize("call", [
    lambda pace: pace.decide(10), lambda pace: pace.decide(10, **GAP, link=7), lambda pace: pace.decide(10, **GAP, x=1),
    lambda pace: pace.decide(10, **GAP, link=(1.0,)), lambda pace: pace.note("1", 1.0), lambda pace: kvferry.Pace(1),
])  # fmt: skip
def test_what_is_no_gap_is_a_type_error(pace, call):
    with pytest.raises(TypeError):
        call(pace)


def test_a_store_measures_its_link(redis):
    """Two blocks of 512 KiB, loaded: the rate is known. A tier beyond the last is the last one."""
    with kvferry.Store(redis.tcp_url) as store, kvferry.Space(store, FIELDS, block_tokens=4) as space:
        assert store.link() == (0.0, 0.0, False)
        keys = space.chain(range(8))
        blocks = [bytes(1 << 19), bytes(1 << 19)]
        space.save(keys, blocks)
        assert store.flush(timeout=30).done
        memory = [bytearray(1 << 19), bytearray(1 << 19)]

        def is_known():
            assert space.load(keys, memory, timeout=30).num_ok == 2
            return store.link(7).bytes_per_s > 0

        until(is_known, "the rate is known")
        assert not store.link().silent


def test_values_go_from_one_process_to_another(pace):
    for value in (FAST, pace.decide(10, **GAP, link=FAST)):
        again = pickle.loads(pickle.dumps(value))
        assert (again, type(again)) == (value, type(value))


def test_many_decisions_leave_no_memory_behind(pace):
    for _ in range(100):
        pace.decide(10, **GAP, link=FAST)
    before = sys.getallocatedblocks()
    for _ in range(10000):
        pace.decide(10, **GAP, link=FAST)
        pace.note(100, 1.0)
    assert sys.getallocatedblocks() - before < 100
