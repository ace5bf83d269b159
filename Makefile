# The verbs of the project; CI runs the same ones as a person. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Named after what it installed, so that a checkout of other dependencies installs and a mere touch does not.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml onward/pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# What tests and checks need besides, half of all packages: serving and load tests do not wait for them.
DEV := $(STAMP)-dev
SERVING := build/serving-venv
CLIENT := build/client-venv
RAY := build/ray-venv
LITELLM := build/litellm-venv
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# pip prefers the pinned versions everywhere; torch goes in first and by itself, so that nothing else picks its build.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test stress-test check kernels .kernels serve bench scenarios evidence scaling faults nightly soak ray litellm gpu-check image release-check wheels proto reference format serving-check client-check node-client clean

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3-venv is needed: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(VENV) has $$($(BIN)/python --version)"; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(BIN)/python $(PIP_INSTALL) torch==2.13.0 numpy
	$(BIN)/python $(PIP_INSTALL) --editable onward --editable '.[cpu,http,otel,train,load]'
	@rm -f $(VENV)/.installed-* && touch $@

$(DEV): $(STAMP)
	$(BIN)/python $(PIP_INSTALL) --editable onward --editable '.[dev]'
	@touch $@

# No stamp: the library's own name says what it was built of, and asking takes a moment.
.kernels: $(STAMP)
	@$(BIN)/python -m model.kernels --if-possible

demo: $(STAMP) .kernels ## train two models, export, prove, serve and ask them (DEMO=quick: one, in less than a minute)
	$(BIN)/python -m benchmarks.demo $(if $(filter quick,$(DEMO)),--quick)

# A file's tests stay together, as they share servers and artifacts; many of them wait more than they compute. The
# order is random, and its seed is printed first.
test: $(DEV) .kernels ## run the test suite in a random order (PYTEST_ADDOPTS=--randomly-seed=N), four processes at most
	$(BIN)/python -m pytest --numprocesses $(or $(TEST_PROCESSES),logical) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

stress-test: $(DEV) .kernels ## run the tests in other orders, clocks and loads: 25 passes, hours, resumable (STRESS="--only core")
	$(BIN)/python -m tests.stress $(STRESS)

check: $(DEV) ## lint, types, layers, wire contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/python -m proto.generate --check

kernels: $(STAMP) ## build the kernels for this machine's processor, which other verbs do where there is a C++ compiler
	$(BIN)/python -m model.kernels

serve: $(STAMP) .kernels ## serve what is under build/models
	$(BIN)/python -m service serve --models build/models

bench: $(DEV) .kernels ## benchmark against peers, each in an environment of its own (BENCH="--quick" to try it)
	$(BIN)/python -m benchmarks run bench $(BENCH)

scenarios: $(STAMP) .kernels ## each situation with its promise: long prompts, prefixes, deadlines, other models (SCENARIOS="--quick")
	for name in interference prefix prediction translation goodput core_sharing; do \
		$(BIN)/python -m benchmarks run $$name $(SCENARIOS) || exit; \
	done

evidence: $(DEV) .kernels ## measure every table behind the README's figures that is missing or of older code (EVIDENCE="--list")
	$(BIN)/python -m benchmarks evidence $(EVIDENCE)
	$(BIN)/python -m benchmarks evidence --write

scaling: $(STAMP) .kernels ## measure the quadratic law of attention, fit it, report it (SCALING="--quick")
	$(BIN)/python -m loadtest scaling $(SCALING)

faults: $(DEV) .kernels ## all faults in their long form, some forty minutes: fuzzing, killed clients, hostile kernel models, a siege
	$(BIN)/python -m pytest tests/faults -p no:randomly -rP --whole --fuzz 100000 --kills 200 --victims 300 --large-rounds 5 --kernel-fuzz-seconds 600 --siege-seconds 600 --timeout 3600
	$(BIN)/python -m pytest tests/unit/service/repository/test_model_life.py -p no:randomly --hypothesis-profile long --hypothesis-show-statistics --timeout 3600

nightly: faults litellm ## what is too long for every run: faults, LiteLLM's proxy, tests that others leave out or sample, every block of README and docs/start for real (15 minutes), every mutant of an artifact at a width of 768 (7), 10,000 hostile grammars, 1,000 schemas
	$(BIN)/python -m pytest tests -m "sampled or whole" --ignore tests/integration/test_readme.py --ignore tests/faults -p no:randomly --whole --timeout 3600
	$(BIN)/python -m pytest tests/integration/test_readme.py tests/parity/test_mutants.py tests/parity/test_stored_weights.py tests/integration/test_http_parity.py tests/integration/test_server_structured.py tests/unit/service/process/test_grammar_check.py -p no:randomly --whole --timeout 3600

soak: $(STAMP) .kernels ## ten minutes of load with cancels, then the same with a leak that must be found
	$(BIN)/python -m benchmarks run soak $(SOAK)

# In the file's order: its last tests replace the replicas that the others share.
ray: $(DEV) .kernels ## install Ray Serve into an environment of its own (half a gigabyte) and try the server on it
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(PIP_INSTALL) --editable onward --editable '.[cpu,ray]'
	$(BIN)/python -m pytest -p no:randomly tests/faults/test_ray.py

# Without the pinned versions, which the proxy's own contradict.
litellm: $(DEV) .kernels ## install LiteLLM's proxy into an environment of its own (half a gigabyte) and try it in front of the server
	@test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/python -m pip install --quiet --disable-pip-version-check 'litellm[proxy]==1.83.0'
	$(BIN)/python -m pytest -p no:randomly tests/integration/test_http_proxy.py

gpu-check: ## check and measure all that needs CUDA, in the present interpreter (GPU="--only parity" or "--device cpu")
	@$(PYTHON) -m model.kernels --if-possible
	$(PYTHON) -m benchmarks.gpu_check $(GPU)

image: ## build the container image (EXTRA=gpu for CUDA)
	docker build --build-arg EXTRA=$(or $(EXTRA),cpu) --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse --short HEAD) \
		--tag onward:$(or $(EXTRA),cpu) --tag onward:$(VERSION)-$(or $(EXTRA),cpu) .

release-check: wheels ## build and install the wheels as a user would; refuse figures that are not the data's, or of older code
	$(BIN)/python -m tests.release
	$(BIN)/python -m benchmarks evidence --check
	$(BIN)/python -m benchmarks evidence --fresh

wheels: $(STAMP) .kernels ## build the distributions `onward` and `onward-server` into dist/, for x86-64 with kernels
	@rm -f dist/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./onward .

proto: $(DEV) ## regenerate the wire stubs and their reference
	$(BIN)/python -m proto.generate

reference: $(DEV) ## regenerate the reference of flags
	$(BIN)/python -m tests.reference

format: $(DEV) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With `kernels` beside it, it waits for them: what it installs has them.
serving-check: $(filter kernels,$(MAKECMDGOALS)) ## install the serving dependencies alone and import every service module without torch
	@test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python $(PIP_INSTALL) ./onward '.[cpu]'
	cd $(SERVING) && bin/python $(CURDIR)/tests/serving_install.py

client-check: ## install the client's dependencies alone, import it, and call nobody
	@test -x $(CLIENT)/bin/python || $(PYTHON) -m venv $(CLIENT)
	$(CLIENT)/bin/python $(PIP_INSTALL) ./onward
	cd $(CLIENT) && bin/python $(CURDIR)/tests/client_install.py

node-client: ## install what examples/clients/node needs, and schemas that no other registry has, as their lock files say
	npm ci --prefix examples/clients/node --ignore-scripts --no-audit --no-fund
	npm ci --prefix tests/kubernetes --ignore-scripts --no-audit --no-fund

clean: ## remove what was built, but not the environment
	rm -rf build model/kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
