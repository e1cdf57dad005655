# Every habit of the project is one command; CI runs the same ones.
PYTHON_VENV := .venv/bin/python
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_NO_USAGE_STATS ?= 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo serve bench dashboards dashboards-check reference test test-unit test-live test-gpu test-slow test-newest-vllm clients test-clients check format clean distclean

help: ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv: the GPU stack where there is a GPU, else the CPU stack; again only when the pins change
	@scripts/setup.sh

demo: setup ## train a small model with GRPO through the service, with its engine on a GPU if any; report in out/demo/
	@$(PYTHON_VENV) -m examples.grpo_digits

serve: setup ## run the service until Ctrl-C: deployments/fp8_rollout.yaml on GPUs, else deployments/cpu_rollout.yaml
	@scripts/serve.sh

bench: setup ## measure the quantizer; the result goes to benchmarks/results/
	@$(PYTHON_VENV) -m benchmarks.quantizer

dashboards: setup ## make dashboards/*.json and alerts.yml anew from dashboards/*.py
	@$(PYTHON_VENV) -m dashboards.generate

dashboards-check: setup ## every panel and alert against a real Prometheus and a running service (about 5 minutes)
	@$(PYTHON_VENV) -m dashboards.check

reference: setup ## write docs/settings.md, docs/http.md and docs/metrics.md anew from the code
	@$(PYTHON_VENV) -m scripts.reference --write

# tests run beside each other: threads that spin while they wait, engines that vLLM binds to one core, and processes
# for workers that import vLLM once more cost minutes
test test-unit test-live test-slow: export OMP_NUM_THREADS := 1
test test-unit test-live test-slow: export VLLM_CPU_OMP_THREADS_BIND := nobind
test test-unit test-live test-slow: export VLLM_ENABLE_V1_MULTIPROCESSING := 0
# Ray runs its workers, and with them engines, at a niceness of 15: beside tests a service would start for ten minutes
test test-live test-slow: export RAY_worker_niceness := 0
# each worker collects all tests: compiled anew, as images for containers ask for, that is a third of its time
test test-unit test-live test-slow: export PYTHONDONTWRITEBYTECODE :=
test: setup ## lint, types, unit tests and tests with real engines (10 to 16 minutes on 2 cores)
	@# the kernels take the core that the lint leaves idle, and the cores that others leave; then a worker each for the
	@# service and for engines alone, and unit tests while those wait
	@mkdir -p out; TRITON_INTERPRET=1 nice $(PYTHON_VENV) -m pytest tests/interpreted >out/interpreted.log 2>&1 & interpreted=$$!; \
	$(MAKE) --no-print-directory check || { kill $$interpreted; exit 1; }; \
	$(PYTHON_VENV) -m pytest tests/service tests/engine tests/unit -m "not slow" -n 3 --no-loadscope-reorder; others=$$?; \
	wait $$interpreted || others=1; cat out/interpreted.log; exit $$others

test-unit: setup ## tests without an engine (5 minutes)
	@$(PYTHON_VENV) -m pytest tests/unit -m "not slow" -n 2
	@TRITON_INTERPRET=1 $(PYTHON_VENV) -m pytest tests/interpreted

test-live: setup ## tests with real engines: alone, and in one service that they share
	@$(PYTHON_VENV) -m pytest tests/service tests/engine -m "not slow" -n 2

test-gpu: setup ## tests that only a GPU can decide
	@$(PYTHON_VENV) -m pytest tests/gpu

test-slow: setup ## an engine of every family, and services of their own: autoscaling, two nodes, TLS (2.5 hours)
	@# engines alone two at a time; services that autoscale or are killed have the cores for themselves
	@$(PYTHON_VENV) -m pytest tests/unit tests/engine -m slow -n 2; engines=$$?; \
	$(PYTHON_VENV) -m pytest tests/service tests/own_service -m slow || engines=1; exit $$engines

test-newest-vllm: setup ## the tests against the newest vLLM that pip finds; what breaks, by name, in out/newest_vllm/
	@scripts/newest_vllm.sh

clients: setup ## install trainers' released packages into .clients/, for the tests that drive the service with them
	@scripts/clients.sh

test-clients: setup ## other people's clients against a running service, and the table of docs/clients.md
	@$(PYTHON_VENV) -m benchmarks.clients

check: setup ## lint, format, types, and whether generated pages and tables are up to date
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m ruff format --check .
	@$(PYTHON_VENV) -m mypy
	@$(PYTHON_VENV) -m benchmarks.index
	@$(PYTHON_VENV) -m benchmarks.clients.table
	@$(PYTHON_VENV) -m benchmarks.families.table
	@$(PYTHON_VENV) -m scripts.reference

format: setup ## reformat the code and sort its imports
	@$(PYTHON_VENV) -m ruff check --select I --fix --quiet .
	@$(PYTHON_VENV) -m ruff format .

clean: ## remove out/, the models made here (models/tiny-*) and caches; stop a running service first
	@rm -rf out models/tiny-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv and .clients too
	@rm -rf .venv .venv.old .clients .newest
