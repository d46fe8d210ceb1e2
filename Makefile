SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# resolved before .venv comes first on PATH: it is the Python that makes .venv
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell command -v python3)
endif
export PYTHON
TESTHOST := $(PYTHON) tests/host/testhost.py
# tools that start other tools (molecule, ansible-lint) find them on PATH
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# every start of Ansible, Molecule and pytest loads hundreds of modules: without their bytecode each start compiles them
unexport PYTHONDONTWRITEBYTECODE
# borders around a playbook's output wrap its lines
export MOLECULE_COMMAND_BORDERS := false

# $(call step,what it does,command): says what runs and how long it took; the command's exit status is the step's
define step
@printf '\n==> %s\n' "$(1)"; start=$$SECONDS; rc=0; { $(2); } || rc=$$?; \
if [ $$rc -eq 0 ]; then printf '==> %s: done in %s s\n' "$(1)" $$((SECONDS - start)); \
else printf '==> %s: FAILED after %s s (exit %s)\n' "$(1)" $$((SECONDS - start)) $$rc >&2; fi; exit $$rc
endef

.PHONY: help venv venv-run demo demo-down bench test test-full lint unit molecule integration

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: ## make .venv with Ansible and the test tools
	@$(PYTHON) tests/host/make_venv.py dev

venv-run:
	@$(PYTHON) tests/host/make_venv.py run

demo: ## from a bare machine to two served replicas on a node on this machine
	$(call step,Ansible in .venv,$(MAKE) venv-run)
	$(call step,Docker as the host of the demo node,$(TESTHOST) docker)
	$(call step,Demo node gpu-node,$(TESTHOST) up gpu-node --ssh-port 2222 --publish 8080:8080)
	$(call step,site.yml on gpu-node,ansible-playbook -i inventories/demo site.yml -l gpu-node </dev/null)
	$(call step,Ask the replicas,$(PYTHON) tests/host/demo_ask.py)

demo-down: ## remove every trace of nodes: containers, volumes, images, .demo/ and a Docker engine we started
	$(call step,Removing nodes and their image,$(TESTHOST) purge)
	@echo ".venv stays: rm -r .venv removes it"

bench: venv ## what the balancer costs, and how long a second run takes (after make demo)
	$(call step,The balancer against direct and HAProxy,python bench/balancer.py)
	$(call step,The second run of site.yml,python bench/second_run.py)

lint: venv ## ruff, mypy, yamllint and ansible-lint
	$(call step,ruff,ruff check . && ruff format --check .)
	$(call step,mypy,mypy)
	$(call step,yamllint,yamllint --strict .)
	$(call step,ansible-lint,ansible-lint --profile production --offline)

unit: venv
	$(call step,Unit tests,pytest tests/unit -m 'not full' -n auto --dist loadfile --durations=12)

molecule: venv
	$(call step,Molecule scenario default: the whole job on a fresh node,molecule test -s default </dev/null)
	$(call step,Molecule scenario prepare: driver and container runtime on a fresh node,molecule test -s prepare </dev/null)
	$(call step,Molecule scenario fleet: rollouts over three nodes under load,molecule test -s fleet </dev/null)

integration: venv
	$(call step,Integration tests on real nodes,pytest tests/integration -m 'not full' --durations=12)

test: ## lint, unit tests, the Molecule scenarios and the integration tests
	@$(MAKE) lint
	@$(MAKE) unit
	@$(MAKE) molecule
	@$(MAKE) integration

test-full: test ## `make test`, then the slow tests
	$(call step,Slow unit tests,pytest tests/unit -m full -n auto)
	$(call step,Slow tests of scenario prepare,PREPARE_TESTS=full molecule test -s prepare </dev/null)
	$(call step,Slow tests of scenario fleet,FLEET_TESTS=full molecule test -s fleet </dev/null)
	$(call step,Slow integration tests,pytest tests/integration -m full --durations=12)
