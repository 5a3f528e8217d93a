# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven by lines of JSON: vllm_driver.py CONFIG.

CONFIG: {"model": folder, "llm": {arguments of LLM}, "kvferry": {options} or null}. Each line of stdin is a command,
each line of stdout that begins with "@" its result:
    {"do": "run", "prompts": [[ids], ...], "max_tokens": n, "salt": text}    tokens, log-probabilities, seconds
    {"do": "reset"}      drops vLLM's own prefix cache, not the store
    {"do": "metrics"}    vLLM's counters of kvferry, and of preemptions
"""

import json
import os
import sys
import time

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    OMP_WAIT_POLICY="passive",  # threads that wait leave the core to others, on a busy machine too
)


def run(llm, command):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=command["max_tokens"], temperature=0, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    for prompt in prompts:
        if command.get("salt"):
            prompt["cache_salt"] = command["salt"]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    return [
        {
            "ids": list(out.outputs[0].token_ids),
            "logprobs": [next(iter(step.values())).logprob for step in out.outputs[0].logprobs],
            "cached": out.num_cached_tokens,
            "finish": out.outputs[0].finish_reason,
            "seconds": took,
        }
        for out in outputs
    ]


def metrics(llm):
    counters = [m for m in llm.get_metrics() if hasattr(m, "value")]
    return {m.name: m.value for m in counters if "kvferry" in m.name or "preempt" in m.name}


def make(config):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    more = dict(config["llm"])
    if config["kvferry"] is not None:
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvferryConnector",
            kv_connector_module_path="kvferry.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=config["kvferry"],
        )
    return LLM(config["model"], dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=16, **more)


def main():
    began = time.perf_counter()
    llm = make(json.loads(sys.argv[1]))
    print("@", json.dumps({"ready": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "run":
            result = run(llm, command)
        elif command["do"] == "reset":
            result = llm.reset_prefix_cache()
        else:
            result = metrics(llm)
        print("@", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
