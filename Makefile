# One command each; every one works from a fresh clone. `make help` lists them.
VENV := .venv
PYTHON ?=
CASES ?=
EXTRAS ?=
SECONDS ?=
ARGS ?=

# Packages are compiled when they are first imported: without what is kept then, each process would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu test-models fuzz soak chaos check lock serve clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## make .venv and install (EXTRAS=cpu,dev or gpu,dev chooses; PYTHON=/path names the interpreter)
	@python=$$(sh scripts/find_python.sh $(PYTHON)) && "$$python" scripts/setup.py $(if $(EXTRAS),--extras "$(EXTRAS)")

demo: setup ## start the application with a small checkpoint, ask it about two pictures, stop it
	@$(VENV)/bin/python examples/demo.py $(ARGS)

# One thread a process: the tests run several processes at once on models too small to share out.
test: setup ## run the tests that need no GPU (ARGS="tests/unit -k packing" narrows)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python scripts/run_tests.py $(ARGS)

# The host's own python3: on a GPU machine its torch is the one that fits the driver.
test-gpu: ## run the tests that need a GPU, with the host's own python3
	@python3 -m pytest tests/gpu -m gpu $(ARGS)

# Three of them are part of `make test`. A minute each, on an idle core.
test-models: setup ## compare encoder and engine with vLLM alone, on a small checkpoint of each architecture (ARGS="gemma3 llava")
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.models.prove $(ARGS)
	@$(VENV)/bin/python scripts/models_page.py

# A fiftieth of these cases is part of `make test`.
fuzz: setup ## try 100,000 random files, URLs, requests and headers, as many bodies with images, 2,000 requests more over HTTP (CASES=N for another number)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/fuzz tests/serve/test_openapi.py --fuzz-cases $(or $(CASES),100000) --timeout 7200 $(ARGS)

# A little of it is part of `make test`.
soak: setup ## 30 minutes of good and bad traffic at full load: nothing lost, flat memory (SECONDS=N for another time)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/serve/test_soak.py -s --soak-seconds $(or $(SECONDS),1800) --timeout 86400 $(ARGS)

# A little of it is part of `make test`.
chaos: setup ## 5 minutes of load while ingresses, language models and encoders are killed in turn, then lost nodes: no request fails, no answer is wrong (SECONDS=N)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/cluster/test_chaos.py tests/cluster/test_two_nodes.py tests/cluster/test_served_fleet.py tests/serve/test_killed_replicas.py tests/serve/test_rolling_update.py -m "not gpu" -s --chaos-seconds $(or $(SECONDS),300) --timeout 86400 $(ARGS)

check: setup ## ruff, mypy, import-linter, hadolint, and pip-audit on the locks where it can reach the advisories
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/hadolint Dockerfile
	@$(VENV)/bin/python scripts/audit.py

lock: setup ## resolve pyproject.toml anew into locks/, which `make setup` and the Dockerfile install
	@$(VENV)/bin/python scripts/lock.py

serve: setup ## start the application of serve_config.yaml (ARGS="--no-haproxy" for Serve's own proxy)
	@$(VENV)/bin/vitray serve $(ARGS)

clean: ## remove .venv and every cache (checkpoints and results stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find configs encoder deployments planner benchmarks training examples scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
