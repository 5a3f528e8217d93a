# SPDX-License-Identifier: Apache-2.0
"""The conformance set: what must hold for each adapter of an engine, once for them all.

A case of an adapter is a test in the adapter's file with the name test_conformance_CASE (parameters may follow), or a
test that Adapter.tests names. It compares the engine's answers with those of the same engine without kvferry. A case
that the engine can't have is named in Adapter.without, with the reason; one that the adapter refuses in
Adapter.refuses, and its test shows the refusal. checks/conformance.py runs them all and prints the table."""

from __future__ import annotations

from dataclasses import dataclass, field

CASES = {
    "full_prompt_hit": "all of a prompt is stored: a token is left to compute",
    "one_block_hit": "only the first block is stored",
    "miss_in_the_middle": "a block in the middle is gone: those before it are used",
    "corrupt_record": "a byte of a record is another one: the block is computed and stored anew",
    "record_of_another_space": "a whole record of another space lies under the key",
    "store_down_at_start": "no server answers when the engine starts; it is used when it is there",
    "store_down_in_the_middle": "the server is killed while a load is under way",
    "store_slow_past_the_deadline": "the load takes longer than it may",
    "store_hangs_while_loading": "SIGSTOP of the server with loads in flight",
    "store_hangs_while_saving": "SIGSTOP of the server with saves in flight",
    "abort_while_loading": "the request ends before its load",
    "preemption_while_storing": "the engine takes the pages of a request away while they are saved",
    "eviction_between_lookup_and_load": "the lookup finds blocks that the load does not",
    "restart_with_another_dtype": "an engine with another data type finds nothing",
    "restart_with_another_block_size": "an engine with another block size finds nothing",
    "two_writers_of_one_key": "two engines compute and save the same blocks at once",
    "two_processes_on_one_store": "a second process loads what the first has saved",
    "sixteen_requests_over_two_rounds": "16 at once, with shared prefixes and different tails, twice",
    "lora_on_and_off": "blocks of an adapter of the weights, and of none, are apart",
    "salt_apart": "what one tenant has stored another does not find",
    "exactly_n_blocks_and_one_more_or_less": "prompts that end at, before and behind the end of a block",
}


@dataclass(frozen=True)
class Adapter:
    """Where an adapter's cases are. The files are in python/test and run with KVF_ENGINES."""

    name: str
    files: tuple[str, ...]
    tests: dict[str, str] = field(default_factory=dict)
    """Cases whose tests have other names."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Cases that the adapter refuses, with the reason. Their tests show that it does."""
    without: dict[str, str] = field(default_factory=dict)
    """Cases that this engine can't have, with the reason."""


ADAPTERS = (
    Adapter("vLLM connector", ("test_vllm_conformance.py",)),
    Adapter(
        "vLLM tier",
        ("test_vllm_tier.py",),
        refuses={"lora_on_and_off": "the tier is given the hashes of blocks, which name an adapter, not its files"},
    ),
    Adapter(
        "HF",
        ("test_hf.py", "test_hf_conformance.py"),
        tests={
            "corrupt_record": "test_a_bad_block_is_computed_and_replaced",
            "two_processes_on_one_store": "test_a_second_process_loads_what_the_first_has_stored",
            "restart_with_another_dtype": "test_a_change_of_the_model_is_another_name",
            "restart_with_another_block_size": "test_own_names_and_block_sizes_are_other_names",
            "lora_on_and_off": "test_adapters",
            "salt_apart": "test_blocks_are_separate_by_secret",
        },
        without={
            "abort_while_loading": "generate() loads before it returns, and can't be ended from outside",
            "preemption_while_storing": "there is no scheduler: what is saved is a copy of the caller's own cache",
        },
    ),
    Adapter(
        "SGLang",
        ("test_sglang.py",),
        without={
            "abort_while_loading": "SGLang lets the batch under way end, and takes no page back before",
            "preemption_while_storing": "what is saved is in SGLang's host pool, which keeps it until the save ends",
        },
    ),
    Adapter(
        "LMCache",
        ("test_lmcache.py",),
        without={
            "preemption_while_storing": "what is saved is in LMCache's memory, which keeps it until the save ends",
        },
    ),
)
