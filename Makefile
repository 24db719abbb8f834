# Needs make and Python 3.11 or newer; a C++ compiler makes it fast. Everything lives in .venv.
# ARGS goes to the command: make up ARGS="--stages 3 --port 8123", make test ARGS="-k planning". `make help` lists targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARITY_VENV := .venv-parity
EXPORTERS := optimum torch genai
EXPORTER_VENV := .venv-exporters
CLIENTS_VENV := .venv-clients
CLIENTS := $(patsubst tests/clients/%.txt,%,$(filter-out %.no-deps.txt,$(wildcard tests/clients/python/*.txt)))
CLIENTS += $(if $(shell command -v npm),$(patsubst tests/clients/%.json,%,$(wildcard tests/clients/node/*.json)))
FUZZ_VENV := .venv-fuzz
DOCS_VENV := .venv-docs
DEPLOY_VENV := .venv-deploy
LOCK_VENV := .venv-lock
# For example an index of CPU-only builds of torch: make parity PARITY_PIP="--extra-index-url URL"
PARITY_PIP ?=
# Not empty: install exactly the versions of requirements.lock.
LOCKED ?=
PEER_PIP ?=
# Requests for each route that `make fuzz` makes from /openapi.json.
EXAMPLES ?= 300
PIP := pip install --quiet --disable-pip-version-check
# Where an image sets it, every process of every suite would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo up check test test-clients test-system test-all coverage flaky model parity parity-goldens parity-templates parity-exporters schemas onnx-blocks thorough kernels sanitize equality fuzz faults drill audit test-compose failovers drill-failovers valkey check-deploy observability software-gpu gpu-kit gpu-proof dashboards dashboard-pictures manifests docs docs-pages lock bench bench-recovery bench-moves bench-plans bench-simulator overload quality clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1 \2/p' Makefile | while read -r name text; do printf '%-16s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## everything into .venv

KERNELS := services/worker/blockrelay_worker/kernels
# Where there are no kernels, and a compiler has come since the last install, they are built now.
COMPILER_NEWS := $(if $(wildcard $(KERNELS)/_baseline.*),,$(if $(shell command -v c++ || command -v g++ || command -v clang++),.compiler-news))
.compiler-news: ;

$(STAMP): pyproject.toml setup.py $(wildcard services/worker/native/*) $(COMPILER_NEWS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) $(if $(LOCKED),--constraint requirements.lock) --editable '.[dev]'
	@touch $@

demo: install ## one prompt through a whole system, and a table
	$(BIN)/blockrelay demo $(ARGS)

up: install ## gateway, scheduler, workers and Redis, until Ctrl-C
	$(BIN)/blockrelay up $(ARGS)

# Every test is in one suite, by its marker or its folder (tests/support/suites.py).
test: install ## the quick tests, minutes
	$(BIN)/pytest --quiet --numprocesses auto --dist loadfile -m quick $(ARGS)

# What exporters write, made by scripts of ours in a hundred forms; parity-exporters has the exporters themselves.
onnx-blocks: install ## ONNX blocks of every form, minutes
	$(BIN)/pytest --quiet --numprocesses auto --dist loadfile -m onnx_blocks tests/unit tests/contract $(ARGS)

# Parts of the product that take long to test, and that `test` therefore leaves out.
thorough: install ## conversions, simulations and commands as processes, minutes
	$(BIN)/pytest --quiet --numprocesses auto --dist loadfile -m thorough tests/unit tests/contract tests/properties $(ARGS)

# Whole systems that are killed, frozen, starved and cut off, each answer compared.
test-system: install ## whole systems: kills, stops, full disks; minutes
	$(BIN)/pytest --quiet --numprocesses auto --dist loadfile --timeout 300 -m system $(ARGS)

# Everything there is, each suite in its long form (.ci/suites.toml); hours. `coverage` has the first ones.
test-all: check model demo coverage ## everything there is, hours
	$(BIN)/python .ci/long_suites.py --everything --long --without test-system --without onnx-blocks --without thorough --without kernels

# `test` and `test-system` with every line and branch counted, in the processes that they start too (those that are
# killed with -9 take what they counted with them). Fails below what pyproject.toml demands.
coverage: install ## what the tests reach, in all processes; fails below the gate
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --quiet --numprocesses auto --dist loadfile --timeout 600 -m 'quick or system or onnx_blocks or thorough or kernels' $(ARGS)
	find . -maxdepth 1 -name '.coverage.*' -empty -delete
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

# Runs test (or --target test-system) again and again, every second time beside endless loops, and counts what failed.
flaky: install ## which tests fail now and then: make flaky ARGS="--times 10 --load 2"
	$(BIN)/python -m tests.flaky $(ARGS)

# Needs a container engine (.ci/container-engine gets one where it can). The images are built from the wheels that this
# machine's pip finds, so that a mirror or a proxy works here as it does for install.
test-compose: install ## the containers; needs a container engine
	.ci/wheelhouse $(BIN)/python
	PIP_NO_INDEX=1 $(BIN)/pytest --quiet -m docker tests/compose $(ARGS)

# Renders every overlay and component of deploy/k8s; checks the objects against the schemas of the API and of operators,
# against each other and the code.
check-deploy: install $(DEPLOY_VENV)/.installed ## the Kubernetes manifests; needs npm
	KUBECTL="$$(.ci/kubectl)" CRD_MODELS="$$(.ci/crd-models)" KUBERNETES_VALIDATE=$(DEPLOY_VENV)/bin/kubernetes-validate \
		$(BIN)/pytest --quiet -m deploy tests/deploy $(ARGS)

# Sentinels and clusters whose masters are replaced, and killed; over TLS too where the redis-server has it.
failovers: install ## Redis behind Sentinels and in clusters, whose masters go
	$(BIN)/pytest --quiet -m failovers tests/contract tests/recovery $(ARGS)

# The scripts and what is read beside them, and every accident, on Valkey in Redis' place.
valkey: install ## tests of Redis on Valkey 8; needs it, or Debian's package
	PATH="$$(.ci/valkey):$$PATH" $(BIN)/pytest --quiet --numprocesses auto --dist loadfile --timeout 300 \
		-m 'quick or system' $(if $(ARGS),$(ARGS),tests/contract tests/recovery)

# Behind Sentinels and in a cluster, with BLOCKRELAY_ACCEPT_REPLICAS and without; ARGS="--redis sentinel --wait 1 --minutes 1".
drill-failovers: install ## the drill on a Redis that fails over, again and again
	$(BIN)/python -m tests.support.failover_drill $(ARGS)

# Real Prometheus and Alertmanager beside real systems: every panel of every dashboard shows what it is for.
observability: install ## dashboards against a real Prometheus; needs Debian's prometheus packages
	$(BIN)/pytest --quiet -m observability tests/observability $(ARGS)

# Every executor's contract and numbers on WebGPU, and the story of a split: in float32 by SwiftShader, in float16 by
# lavapipe. The plug-in is no part of `dev`: it comes into .venv here. Drivers that compute on CPUs take minutes to compile
# a model's shaders on a busy machine; loading has ten.
software-gpu: install ## WebGPU on drivers that compute on CPUs; needs Debian's chromium and Mesa 25
	$(BIN)/$(PIP) --no-deps --constraint requirements.lock onnxruntime-ep-webgpu
	DRIVER=swiftshader .ci/software-gpu $(BIN)/pytest --quiet --timeout 600 -m 'software_gpu and not float16' tests/unit/worker/execution tests/stories $(ARGS)
	DRIVER=lavapipe .ci/software-gpu $(BIN)/pytest --quiet --timeout 600 -m 'software_gpu and float16' tests/unit/worker/execution $(ARGS)

# Kernels, wheels for Python 3.12 and Vulkan's loader, 45 MB at most: with a checkout beside it, build/gpu-kit/run proves a
# GPU where nothing else can be had (docs/gpu.md).
gpu-kit: install ## build/gpu-kit: what proves a GPU on a bare machine; needs a network
	$(BIN)/python -m bench.gpu_kit.make build/gpu-kit

# The script of the kit with what is installed here, and small shapes, on a driver that computes on CPUs.
gpu-proof: install ## the script of gpu-kit with small shapes, without a GPU
	$(BIN)/$(PIP) --no-deps --constraint requirements.lock onnxruntime-ep-webgpu
	mkdir -p build
	.ci/software-gpu $(BIN)/python -m bench.gpu_kit build/gpu-proof.json --small $(ARGS)

# Grafana's dashboards from deploy/dashboards; what is committed must be what they say.
dashboards: install ## deploy/grafana/dashboards, made anew
	$(BIN)/python -m deploy.dashboards

# A run of `observability` as pictures: docs/dashboards/*.png.
dashboard-pictures: install ## pictures of every panel from a real run; needs Debian's prometheus packages
	$(BIN)/$(PIP) --editable '.[pictures]'
	mkdir -p build
	$(BIN)/pytest --quiet -m observability tests/observability/test_panels.py --panels-to build/panels.json
	$(BIN)/python -m deploy.dashboards.pictures build/panels.json

# What deploy/k8s has from elsewhere, where kustomize cannot read it there: alerts, users of Redis. DOCS=https://... makes
# that the address that alerts link to.
manifests: install ## what deploy/k8s has of alerts and Redis users, made anew
	$(BIN)/python -m deploy.manifests $(if $(DOCS),--docs $(DOCS))

$(DEPLOY_VENV)/.installed: Makefile
	@test -x $(DEPLOY_VENV)/bin/python || $(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/$(PIP) 'kubernetes-validate==1.37.0'
	@touch $@

check: install ## lint, format, strict types, import rules, plain words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright --pythonplatform Windows shared services/worker
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.plain_words

# Every order of events of the protocol, in bounds that take minutes; ARGS names configurations, --quick takes seconds.
model: install ## every order of events of the protocol, minutes
	$(BIN)/pytest --quiet --numprocesses auto -m model tests/unit/protocol_model
	$(BIN)/python -m tests.protocol_model $(ARGS)

parity: parity-goldens parity-templates parity-exporters ## what others compute and export; installs torch

# Every client of tests/clients in an environment of its own, against a whole system; ARGS="-k litellm" takes one. Those of
# Node are left out where there is no npm.
test-clients: install ## real clients of OpenAI's API; needs curl and npm
	$(MAKE) --no-print-directory --jobs 2 $(foreach client,$(CLIENTS),$(CLIENTS_VENV)/$(subst /,-,$(client))/.installed)
	$(BIN)/pytest --quiet -m clients tests/clients $(ARGS)

$(CLIENTS_VENV)/python-%/.installed: tests/clients/python/%.txt $(wildcard tests/clients/python/*.no-deps.txt)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP) --no-compile $(PARITY_PIP) --requirement $<
	@test ! -e $(<:.txt=.no-deps.txt) || $(@D)/bin/$(PIP) --no-compile --no-deps --requirement $(<:.txt=.no-deps.txt)
	@touch $@

$(CLIENTS_VENV)/node-%/.installed: tests/clients/node/%.json
	@mkdir -p $(@D) && cp $< $(@D)/package.json
	cd $(@D) && npm install --silent --no-package-lock --no-audit --no-fund
	@touch $@

# Makes the goldens anew with torch, compares them with the committed ones, and runs the tests that use them.
parity-goldens: install $(PARITY_VENV)/.installed ## against transformers; installs torch
	$(PARITY_VENV)/bin/python -m tests.parity.make_goldens --check
	$(PARITY_VENV)/bin/python -m tests.parity.make_readings --check
	$(BIN)/pytest --quiet tests/parity/test_goldens.py tests/parity/test_readings.py $(ARGS)

# The chat templates of many families, which a source distribution on PyPI holds, rendered by us and by transformers.
TEMPLATES := build/templates
parity-templates: $(PARITY_VENV)/.installed ## real chat templates against transformers; installs torch
	@test -n "$(wildcard $(TEMPLATES)/*.tar.gz)" || $(PARITY_VENV)/bin/$(PIP:install%=download%) $(PARITY_PIP) --no-deps \
		--no-binary llama-cpp-python --dest $(TEMPLATES) llama-cpp-python==0.3.36
	PYTHONPATH=shared:services/gateway $(PARITY_VENV)/bin/python -m tests.parity.chat_templates $(TEMPLATES)/*.tar.gz

# The JSON-Schema-Test-Suite, which a source distribution on PyPI holds, against grammars; ARGS=--publish writes
# docs/json-schema.md.
SCHEMAS := build/schemas
schemas: install ## what is accepted of JSON Schema, and obeyed
	@test -n "$(wildcard $(SCHEMAS)/*.tar.gz)" || $(BIN)/$(PIP:install%=download%) --no-deps --no-binary jsonschema \
		--dest $(SCHEMAS) jsonschema==4.26.0
	$(BIN)/python -m tests.parity.json_schemas $(SCHEMAS)/*.tar.gz $(ARGS)

# Exports tiny models with each exporter in an environment of its own, since their transformers differ, and takes what
# they write through split, check, serving as it is, and import. Exports stay in build/exporters until a script changes.
parity-exporters: install ## real exports split, served and imported; installs torch
	$(MAKE) --no-print-directory --jobs 2 $(EXPORTERS:%=build/exporters/%/.exported)
	$(BIN)/pytest --quiet -m exporters tests/parity $(ARGS)

build/exporters/%/.exported: $(EXPORTER_VENV)-%/.installed tests/parity/exporters/export.py \
		tests/support/models/exports.py tests/support/models/checkpoints.py
	$(EXPORTER_VENV)-$*/bin/python -m tests.parity.exporters.export $*
	@touch $@

.PRECIOUS: $(EXPORTER_VENV)-%/.installed
$(EXPORTER_VENV)-%/.installed: tests/parity/exporters/%.txt
	@test -x $(EXPORTER_VENV)-$*/bin/python || $(PYTHON) -m venv $(EXPORTER_VENV)-$*
	$(EXPORTER_VENV)-$*/bin/$(PIP) --no-compile $(PARITY_PIP) --requirement $<
	@touch $@

$(PARITY_VENV)/.installed: pyproject.toml
	@test -x $(PARITY_VENV)/bin/python || $(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/$(PIP) $(PARITY_PIP) --editable '.[parity]'
	@touch $@

# Builds the native kernels with AddressSanitizer, UBSan and ThreadSanitizer, and runs them.
kernels: install ## the native kernels in every shape, bit by bit
	$(BIN)/pytest --quiet --numprocesses auto -m kernels tests/unit/worker/kernels $(ARGS)

sanitize: install ## the native kernels under ASan, UBSan and TSan
	$(BIN)/pytest --quiet -m sanitizer $(ARGS)

# Hundreds of requests through whole systems, each against its solo run; whole models on emulated CPUs (where qemu-user is).
equality: install ## hundreds of requests, each against its solo run
	$(BIN)/pytest --quiet -m 'equality or emulated' $(ARGS)

# A million inputs for everything that reads bytes of others (atheris), and requests made from /openapi.json (schemathesis).
fuzz: install $(FUZZ_VENV)/.installed ## a million inputs for everything that reads bytes of others
	$(FUZZ_VENV)/bin/python -m tests.fuzz.campaign $(ARGS)
	SCHEMATHESIS=$(FUZZ_VENV)/bin/schemathesis EXAMPLES=$(EXAMPLES) $(BIN)/pytest --quiet -m fuzz tests/fuzz

$(FUZZ_VENV)/.installed: pyproject.toml
	@test -x $(FUZZ_VENV)/bin/python || $(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/$(PIP) --editable '.[fuzz]'
	@touch $@

# The pages of docs/ as a site in site/, strictly: a link that leads nowhere fails, and so does a page that would load
# anything from another host. mkdocs reads mkdocs.yml too.
docs: install $(DOCS_VENV)/.installed ## the documents as a site, in site/; their commands run
	$(DOCS_VENV)/bin/zensical build --strict --clean
	$(BIN)/python -m docs.generate.foreign_loads site
	$(BIN)/pytest --quiet tests/stories/test_documents.py

$(DOCS_VENV)/.installed: Makefile
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/$(PIP) 'zensical>=0.0.73,<0.1'
	@touch $@

docs-pages: install ## write the pages of docs/ that are made from the code
	$(BIN)/python -m docs.generate

# For all platforms and Pythons at once. `make install LOCKED=1` and the images with LOCKED=1 take these versions.
lock: $(LOCK_VENV)/bin/uv ## the newest versions of all dependencies into requirements.lock
	$(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-emit-index-url \
		--no-emit-find-links --custom-compile-command 'make lock' --extra dev --extra webgpu --extra quality --output-file requirements.lock pyproject.toml

$(LOCK_VENV)/bin/uv:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/$(PIP) uv

# Known faults of what is installed; needs a network that reaches the advisory database.
audit: install ## known faults of what is installed; needs a network
	.ci/audit $(BIN)/python

# Every service at every failure point, dying, sleeping, losing Redis, waiting; networks that are cut; a full disk.
faults: install ## every service at every failure point
	$(BIN)/pytest --quiet --numprocesses auto --dist loadfile --timeout 300 -m faults $(ARGS)

# How long streams stand still when a worker, its host or Redis dies: make bench-recovery ARGS="--model DIR"
bench-recovery: install ## how long streams stand still after an accident
	$(BIN)/python -m bench.scenarios.recovery $(ARGS)

# How long streams stand still while another plan is applied: make bench-moves ARGS="--model DIR"
bench-moves: install ## how long streams stand still while blocks move
	$(BIN)/python -m bench.scenarios.plan_moves $(ARGS)

# How long the planner takes, and whether plans are as fast as they say: ten minutes on an idle machine of two cores.
bench-plans: install ## how quick the planner is, and how right its predictions
	$(BIN)/python -m bench.scenarios.plan_time
	$(BIN)/python -m bench.scenarios.plan_accuracy $(ARGS)

# Ninety seconds under load while everything is killed at random; more with ARGS="--minutes 10 --fsync everysec".
drill: install ## hurts a loaded system at random and compares every answer
	$(BIN)/blockrelay drill --minutes 1.5 --stages 2 $(ARGS)

# Predictions of six systems, written before they are measured: ten minutes on an idle machine of two cores. They become
# the tables of docs/cells.md with `.venv/bin/python -m bench.simulate.million --costs .bench/simulate.json`.
bench-simulator: install ## how right the simulator of whole systems is
	$(BIN)/python -m bench.simulate.accuracy $(ARGS)

# Beside other servers, which install themselves into .bench; writes .bench/benchmarks.md, with ARGS=--publish
# docs/benchmarks.md. gguf, which is no part of `dev`, reads the public model. ARGS="--help" shows how to take parts. PEER_PIP goes to the installation of peers, for example an index of CPU-only builds of torch.
bench: install ## speed beside other servers, two hours
	$(BIN)/$(PIP) --no-deps --constraint requirements.lock gguf
	PEER_PIP='$(PEER_PIP)' $(BIN)/python -m bench.compare $(ARGS)

# What each number format costs a real model, 90 MB from PyPI, beside llama.cpp, which builds for ten minutes the first time
# (ARGS=--without-llamacpp). gguf is no part of `dev`: it comes into .venv here. ARGS=--publish writes docs/quantisation.md.
quality: install ## what number formats cost a public model; needs a network
	$(BIN)/$(PIP) --no-deps --constraint requirements.lock gguf
	PEER_PIP='$(PEER_PIP)' $(BIN)/python -m bench.quality $(ARGS)

# Ten times more requests than can be served: what becomes of them, and of the memory. Minutes, on an idle machine.
overload: install ## ten times more requests than can be served
	$(BIN)/python -m bench.scenarios.overload $(ARGS)

# The native kernels go too, so the next target installs again; the environment stays.
clean: ## what was built and cached; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage* .demo .data site .cache
	rm -f $(STAMP) $(KERNELS)/*.so
	find services shared tests bench docs -name __pycache__ -type d -prune -exec rm -rf {} +
