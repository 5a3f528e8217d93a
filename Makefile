# SPDX-License-Identifier: Apache-2.0
#
# Front end of scripts/setup.sh, CMake's presets and the checks. `make` alone lists all targets; docs/testing.md explains
# them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PREFIX ?= /usr/local
release := build/release
minimal := build/minimal

# Where llama.cpp, the model and the Python of the tests are.
paths := eval "$$(scripts/setup.sh --print)"; export KVF_LLAMA_DIR KVF_LLAMA_SERVER KVF_MODEL KVF_GEMMA KVF_PYTHON KVF_VALKEY KVF_LLAMA_PYTHON KVF_PYTEST KVF_ENGINES KVF_HF_MODEL KVF_VLLM_OLDER KVF_TRITON KVF_TRITON_PYTHON
programs := export KVFERRY="$$PWD/$(release)/kvferry" KVF_SOURCE="$$PWD" KVF_BUILD="$$PWD/$(release)"

.PHONY: help setup setup-engines setup-triton program build demo demo-triton test install uninstall format tidy clean check abi-baseline

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## set up what is missing: Debian packages, llama.cpp, a small model (asks once)
	@scripts/setup.sh

setup-engines: setup ## also torch, Transformers, vLLM, LMCache, SGLang, for the tests of engines that are Python (915 MB download)
	@scripts/setup.sh --engines

setup-triton: setup ## also Triton Inference Server and its client, for the tests of engines/triton (92 MB download)
	@scripts/setup.sh --triton

program: ## set up the least that the program kvferry needs, and build it, without tests, in build/minimal
	@scripts/setup.sh --run
	@$(paths); scripts/build.sh minimal

build: setup ## the library, the program kvferry, tests and benchmarks, in build/release
	@$(paths); scripts/build.sh release

demo: program ## a 4,000-token document: computed once, then loaded from a folder and from Redis
	@$(paths); KVFERRY=$(minimal)/kvferry checks/demo.sh

# The pinned engines are for x86-64. Elsewhere their tests are skipped.
engines := $(if $(filter x86_64,$(shell uname -m)),setup-engines setup-triton)
test: setup $(engines) ## all tests: release, Python and its engines, sanitizers, fuzzers, short checks
	@$(paths); scripts/test.sh

install: ## install what `make build` built into PREFIX (default /usr/local)
	@test -e $(release)/build.ninja || { echo "nothing is built yet: make build" >&2; exit 1; }
	@umask 022; cmake --install $(release) --prefix "$(PREFIX)" --strip

uninstall: ## remove what `make install` put into PREFIX
	@scripts/uninstall.sh "$(PREFIX)"

format: ## format all C files by .clang-format
	@scripts/format.sh

tidy: build ## clang-tidy over all C files (minutes)
	@scripts/tidy.sh

clean: ## remove all build folders (not the cache of make setup)
	@rm -rf build

# --- the checks of the project's promises. Each is a file in checks/: the exit status is 0 if the figure holds, and the figure
# is on the last line.

checks := $(patsubst %:,%,$(shell grep -oE '^check-[a-z0-9-]+:' $(firstword $(MAKEFILE_LIST))))
.PHONY: $(checks)
check: $(checks) ## all checks below
run := $(paths); $(programs); $(release)/checks/check_
script := $(paths); $(programs); checks/
python := $(paths); $(programs); $$KVF_PYTHON checks/

check-demo: program ## the demo, and: same answer, at least 90 % loaded, 100 times faster to the first token
	@$(paths); KVFERRY=$(minimal)/kvferry checks/demo.sh --check

check-wire: build ## Redis GET and SET beside the bare ceiling, hiredis and redis-py
	@$(run)wire --check

check-cold: build ## write-behind costs a cold run at most 2 %
	@$(run)cold --check

check-article: build ## ten lines of redis-py and numpy read our sessions, and we theirs
	@$(script)article.sh

check-kill: build ## kill -9 of writer, server and reader in loops: never a wrong byte
	@$(script)kill.sh

check-128k: build ## 128K tokens (4 GiB) through Redis: bounded client memory, one chain call, one round trip
	@$(run)128k

check-faults: build ## the n-th allocation and the n-th system call fail, for every n
	@$(script)faults.sh

check-exact: build ## logits after a load equal those of a run without one, by KV type and flash attention
	@$(script)exact.sh

check-cluster: build ## a Cluster of three shards: all at once, one dead, slots that move while loads run
	@$(run)cluster

check-recovery: build ## first whole load within 1 s of the server's return: single, Cluster, Sentinel
	@$(run)recovery

check-chaos: build ## 200 seeds of faults on real servers while loads and saves go on; SEED=n for one
	@$(run)chaos

check-stall: build ## loads beside a connection that stalls are at most 10 % slower
	@$(run)stall

check-staging: build ## staged saves beside queue saves and a bare socket: at most 1.3 times the CPU and the time
	@$(run)staging

check-hf: build ## Transformers in a second process: 2,000 tokens, first token 10 times sooner, logits equal to the bit
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/hf.py

demo-triton: build setup-triton ## Triton twice on one Redis: a prompt of 3,000 tokens is computed once, then loaded
	@$(paths); $(programs); $$KVF_TRITON_PYTHON -B checks/triton_demo.py
check-triton: build setup-triton ## a real Triton, started anew: 3,000 tokens, same answer, first token 100 times sooner
	@$(paths); $(programs); $$KVF_TRITON_PYTHON -B checks/triton_demo.py --check

check-triton-load: build setup-triton ## Triton's backend under load: 0.95 of llama.cpp's speed, nobody starves, gaps while a prompt is loaded
	@$(paths); $(programs); $$KVF_TRITON_PYTHON -B checks/triton_load.py --check

check-triton-two: build setup-triton ## two Tritons on one Redis: what one computed the other loads; a session goes on on the other
	@$(paths); $(programs); test/triton/backend_faults.sh two_servers

check-triton-faults: build setup-triton ## Triton's backend: faults of the store, bad input, unloading, SIGTERM: an answer or a clear error
	@$(paths); $(programs); test/triton/backend_answers.sh; test/triton/backend_faults.sh

check-triton-vllm: build setup-engines setup-triton ## vLLM in Triton's Python backend, started anew: the prompt is loaded from Redis, same tokens
	@$(paths); $(programs); $$KVF_TRITON_PYTHON -B checks/triton_vllm.py

check-vllm: build ## a fresh vLLM loads 2,048 tokens: first token 10 times sooner, log-probabilities as from its own cache
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/vllm_restart.py

check-vllm-tier: build ## the secondary tier on a folder beside vLLM's own tier fs, interleaved: saves and loads not slower
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/vllm_tier.py

check-vllm-never-slower: build ## vLLM with a slow or silent store takes at most 1.05 of its time without
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/vllm_never_slower.py

check-vllm-serve: build ## vLLM's OpenAI server, 16 clients, Redis killed, server restarted: every answer as without kvferry
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/vllm_serve.py

check-vllm-versions: build ## the connector with an older vLLM: its tests, and blocks that a fresh engine loads
	@scripts/setup.sh --engines --older-vllm
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/vllm_versions.py

check-conformance: build ## one set of cases for the adapters of all engines, as a table; ADAPTERS=names for some
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/conformance.py

check-lmcache: build ## kvferry.lmcache beside LMCache's native client: loads, saves 1.0 of it over TCP, 1.3 over a unix socket; lookups 5
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_ENGINES checks/lmcache_native.py

check-servers: build ## all tests that need a server, on redis-server and on valkey-server
	@$(paths); scripts/test.sh redis valkey

check-evict: build ## loadable prefixes at 2x overcommit, by eviction policy: the documented one is the best
	@$(run)evict

check-faults-public: build ## eleven kinds of faults that users have reported, each by the inputs that failed
	@$(script)faults_public.sh

check-manager: build ## kvferry.KVCacheManager in place of an article's class of redis-py: same tokens, both ways, faster
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_PYTEST checks/manager.py

check-python-wire: build ## kvferry.Queue from Python beside C: load and save of 1 and 4 MiB have at least 0.9 of the speed
	@$(paths); $(programs); PYTHONPATH=$(release)/python $$KVF_PYTEST checks/python_wire.py

check-llama-cpp-python: build ## llama-cpp-python, 2,000 tokens, second process: first token 50 times sooner; beside its LlamaDiskCache
	@$(paths); $(programs); LLAMA_CPP_LIB_PATH=$$KVF_LLAMA_DIR/lib PYTHONPATH=$(release)/python $$KVF_LLAMA_PYTHON checks/llama_cpp_python.py

check-wheel: setup ## the wheel, repaired, in clean environments of Python 3.11, 3.12, 3.13 at hand; at most 3 MB
	@$(paths); checks/wheel.sh

check-tls: build ## TLS: faults are refused with their reason, valid settings work in all three topologies
	@$(script)tls.sh

check-tenant: build ## without a tenant's secret nobody reads, forges, moves or recognises a record; the cost of sealing
	@$(script)tenant.sh

check-hostile: build ## 20,000 cases of forged records, lying servers and odd files cost at most a miss; SEED=n, CASES=n
	@$(paths); scripts/build.sh asan kvf_store_hostile; checks/hostile.sh

check-identity: build ## everything that changes a block's bytes is in its name, or refused; llama.h beside the list of settings
	@$(script)identity.sh

check-never-slower: build ## time to the first token at every bandwidth, beside that without a store
	@$(run)never_slower --check $${SERIES:+--series "$$SERIES"} --svg "$${SVG:-/dev/null}"

check-decode: build ## llama-server generates as fast with the shim and write-behind as without (0.98)
	@$(python)decode.py

check-server-restart: build ## llama-server restarted between two requests of 4,000 tokens: first token 100 times sooner
	@$(python)server_restart.py

check-shared: build ## 8 clients of a llama-server with one system prompt: its prefill is computed once
	@$(python)shared.py

check-upstream: build ## llama.cpp's own server tests pass and fail alike with the shim and without
	@$(python)upstream.py

check-triton-cache: build setup-triton ## Triton's response cache: hits, misses, faults of Redis, and beside Triton's local cache
	@$(script)triton_cache.py

check-mutants: setup ## at least 85 % of 200 changes of the library fail a test; SEED=n, MUTANTS=n, PORTION=i/n
	@checks/mutants.py

check-docs: build ## the docs: commands run, links and names exist, lines fit, public functions have comments
	@$(paths); $(programs); checks/docs.py --self-test

check-abi: build ## programs of the oldest headers of this minor version run with today's libraries
	@$(paths); $(programs); checks/abi.sh

abi-baseline: build ## add new parts of the API to test/abi; refuses changes that break programs (ABI_NEW=1: not released yet)
	@$(paths); $(programs); checks/abi.sh --renew

check: check-layers
.PHONY: check-layers
check-layers: build ## includes and calls go down only, folder by folder
	@checks/layers.py --self-test && checks/layers.py $(release)
