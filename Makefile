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
paths := eval "$$(scripts/setup.sh --print)"; export KVF_LLAMA_DIR KVF_LLAMA_SERVER KVF_MODEL KVF_GEMMA KVF_PYTHON KVF_VALKEY
programs := export KVFERRY="$$PWD/$(release)/kvferry" KVF_SOURCE="$$PWD" KVF_BUILD="$$PWD/$(release)"

.PHONY: help setup program build demo test install format tidy clean \
	check check-demo check-wire check-cold check-article check-kill check-128k check-faults check-exact \
	check-cluster check-recovery check-chaos check-stall check-servers check-evict check-never-slower

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## set up what is missing: Debian packages, llama.cpp, a small model (asks once)
	@scripts/setup.sh

program: ## set up the least that the program kvferry needs, and build it, without tests, in build/minimal
	@scripts/setup.sh --run
	@$(paths); scripts/build.sh minimal

build: setup ## the library, the program kvferry, tests and benchmarks, in build/release
	@$(paths); scripts/build.sh release

demo: program ## a 4,000-token document: computed once, then loaded from a folder and from Redis
	@$(paths); KVFERRY=$(minimal)/kvferry bench/demo.sh

test: setup ## all tests: release, sanitizers, fuzzers, short checks
	@$(paths); scripts/test.sh

install: ## install what `make build` built into PREFIX (default /usr/local)
	@test -e $(release)/build.ninja || { echo "nothing is built yet: make build" >&2; exit 1; }
	@cmake --install $(release) --prefix "$(PREFIX)"

format: ## format all C files by .clang-format
	@scripts/format.sh

tidy: build ## clang-tidy over all C files (minutes)
	@scripts/tidy.sh

clean: ## remove all build folders (not the cache of make setup)
	@rm -rf build

# --- the checks of the project's promises: the exit status is 0 if the figure holds; the figure is on the last line

check: check-faults check-article check-kill check-exact check-cluster check-recovery check-chaos check-stall check-servers check-evict check-demo check-128k check-cold check-wire ## all checks below

check-demo: program ## the demo, and: same answer, at least 90 % loaded, 100 times faster to the first token
	@$(paths); KVFERRY=$(minimal)/kvferry bench/demo.sh --check

check-wire: build ## Redis GET and SET beside the bare ceiling, hiredis and redis-py
	@$(paths); $(programs); $(release)/bench/wire_bench --check

check-cold: build ## write-behind costs a cold run at most 2 %
	@$(paths); $(programs); $(release)/bench/cold_bench --check

check-article: build ## ten lines of redis-py and numpy read our sessions, and we theirs
	@$(paths); $(programs); test/shell/article.sh

check-kill: build ## kill -9 of writer, server and reader in loops: never a wrong byte
	@$(paths); $(programs); test/shell/kill.sh

check-128k: build ## 128K tokens (4 GiB) through Redis: bounded client memory, one chain call, one round trip
	@$(paths); $(programs); $(release)/bench/k128_bench

check-cluster: build ## a Cluster of three shards: all at once, one dead, slots that move while loads run
	@$(paths); $(programs); $(release)/bench/cluster_bench

check-chaos: build ## 200 seeds of faults on real servers while loads and saves go on; SEED=n for one
	@$(paths); $(programs); $(release)/bench/chaos_bench

check-stall: build ## loads beside a connection that stalls are at most 10 % slower
	@$(paths); $(programs); $(release)/bench/stall_bench

check: check-staging
.PHONY: check-staging
check-staging: build ## staged saves beside queue saves and a bare socket: at most 1.3 times the CPU and the time
	@$(paths); $(programs); $(release)/bench/staging_bench

check-recovery: build ## first whole load within 1 s of the server's return: single, Cluster, Sentinel
	@$(paths); $(programs); $(release)/bench/recovery_bench

check-servers: build ## all tests that need a server, on redis-server and on valkey-server
	@$(paths); scripts/test.sh redis valkey

check-evict: build ## loadable prefixes at 2x overcommit, by eviction policy: the documented one is the best
	@$(paths); $(programs); $(release)/bench/evict_bench

check: check-faults-public
.PHONY: check-faults-public
check-faults-public: build ## eleven kinds of faults that users have reported, each by the inputs that failed
	@$(paths); $(programs); scripts/faults_public.sh

check: check-tls
.PHONY: check-tls
check-tls: build ## TLS: faults are refused with their reason, valid settings work in all three topologies
	@$(paths); $(programs); $(release)/test/live_tls_test

check: check-tenant
.PHONY: check-tenant
check-tenant: build ## without a tenant's secret nobody reads, forges, moves or recognises a record; the cost of sealing
	@$(paths); $(programs); $(release)/test/live_tenant_test && $(release)/bench/tenant_bench

check: check-hostile
.PHONY: check-hostile
check-hostile: build ## 20,000 cases of forged records, lying servers and odd files cost at most a miss; SEED=n, CASES=n
	@$(paths); scripts/build.sh asan kvf_store_hostile; test/hostile/check.sh

check-faults: build ## the n-th allocation and the n-th system call fail, for every n
	@$(paths); $(programs); $(release)/test/live_faults_test

check: check-mutants
.PHONY: check-mutants
check-mutants: setup ## at least 85 % of 200 changes of the library fail a test; SEED=n, MUTANTS=n, PORTION=i/n
	@python3 scripts/mutants.py

check: check-docs
.PHONY: check-docs
check-docs: build ## the docs: commands run, links and names exist, lines fit, public functions have comments
	@$(paths); $(programs); checks/docs.py --self-test

check: check-abi
.PHONY: check-abi abi-baseline
check-abi: build ## programs of the oldest headers of this minor version run with today's libraries
	@$(paths); $(programs); checks/abi.sh

abi-baseline: build ## add new parts of the API to test/abi; refuses changes that break programs (ABI_NEW=1: not released yet)
	@$(paths); $(programs); checks/abi.sh --renew

# --- with a model: the engine and llama-server
check: check-server-restart check-shared check-upstream check-decode check-never-slower
.PHONY: check-server-restart check-upstream check-decode check-shared

check-server-restart: build ## llama-server restarted between two requests of 4,000 tokens: first token 100 times sooner
	@$(paths); $(programs); $$KVF_PYTHON bench/server_restart.py

check-shared: build ## 8 clients of a llama-server with one system prompt: its prefill is computed once
	@$(paths); $(programs); $$KVF_PYTHON bench/server_shared.py

check-upstream: build ## llama.cpp's own server tests pass and fail alike with the shim and without
	@$(paths); $(programs); $$KVF_PYTHON test/server/upstream.py

check-decode: build ## llama-server generates as fast with the shim and write-behind as without (0.98)
	@$(paths); $(programs); $$KVF_PYTHON bench/server_decode.py

check-exact: build ## logits after a load equal those of a run without one, by KV type and flash attention
	@$(paths); $(programs) KVFT_EXACT=full; $(release)/test/llama_exact_test

check: check-identity
.PHONY: check-identity
check-identity: build ## everything that changes a block's bytes is in its name, or refused; llama.h beside the list of settings
	@$(paths); $(programs); ctest --test-dir $(release) -L identity --output-on-failure --no-tests=error
	@$(paths); python3 test/llama/settings_test.py $$KVF_LLAMA_DIR/include/llama.h

check-never-slower: build ## time to the first token at every bandwidth, beside that without a store
	@$(paths); $(release)/bench/never_slower_bench --check $${SERIES:+--series "$$SERIES"} --svg "$${SVG:-/dev/null}"
