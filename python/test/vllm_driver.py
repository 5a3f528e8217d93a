# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven by lines of JSON: vllm_driver.py CONFIG.

CONFIG: {"model": folder, "llm": {arguments of LLM}, "kvferry": {options} or null}. Each line of stdin is a command,
each line of stdout that begins with "@" its result:
    {"do": "run", "prompts": [[ids], ...], "max_tokens": n, "salt": text, "lora": folder}
                         tokens, log-probabilities, how far each token leads, seconds
    {"do": "begin", "prompt": [ids]}, {"do": "abort"}    a request, and its end before it has an answer
    {"do": "reset"}      drops vLLM's own prefix cache, not the store
    {"do": "metrics"}    vLLM's counters of kvferry, and of preemptions
"""

import json
import sys
import time


def lead(step):
    """How far the best token is before the second."""
    best = sorted((one.logprob for one in step.values()), reverse=True)
    return best[0] - best[1]


def run(llm, command):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=command["max_tokens"], temperature=0, ignore_eos=True, logprobs=2)
    lora = LoRARequest("adapter", 1, command["lora"]) if command.get("lora") else None
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    for prompt in prompts:
        if command.get("salt"):
            prompt["cache_salt"] = command["salt"]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    took = time.perf_counter() - began
    return [{**said(out.outputs[0]), "cached": out.num_cached_tokens, "seconds": took} for out in outputs]


def said(out):
    steps = list(zip(out.token_ids, out.logprobs, strict=True))
    return {
        "ids": list(out.token_ids),
        "logprobs": [best[token].logprob for token, best in steps],
        "leads": [lead(best) for _, best in steps],
        "finish": out.finish_reason,
    }


def begin(llm, command):
    from vllm import SamplingParams

    llm.llm_engine.add_request("begun", {"prompt_token_ids": command["prompt"]}, SamplingParams(max_tokens=1))


def metrics(llm, command):
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
    usual = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 16}
    return LLM(config["model"], **{**usual, **more})


COMMANDS = {
    "run": run,
    "begin": begin,
    "abort": lambda llm, command: llm.llm_engine.abort_request(["begun"]),
    "reset": lambda llm, command: llm.reset_prefix_cache(),
    "metrics": metrics,
}


def main():
    began = time.perf_counter()
    llm = make(json.loads(sys.argv[1]))
    print("@", json.dumps({"ready": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print("@", json.dumps(COMMANDS[command["do"]](llm, command)), flush=True)


if __name__ == "__main__":
    main()
