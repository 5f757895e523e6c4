# Every target does its own set-up: a virtual environment in .venv, installed once per change of the two files below.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-versions test-recordings smoke release-check lint bench bench-peers stress test-cluster cluster test-peers peers beside integrations format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("penstock needs Python 3.10 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[rl,onnx,dev]'
	@touch $@

demo: setup
	$(BIN)/penstock demo

test: setup
	$(BIN)/python -m pytest -m "not stress and not peers and not recordings and not cluster" -n 2 --dist worksteal

# The wheel on every Python from 3.10 to 3.13 that is found, and on 3.10 with torch 2.0.1 (4 GB, once).
test-versions: setup
	$(BIN)/python .ci/versions.py test

# What is published: the same bytes twice, twine's checks, and the README on every Python (8 GB, not kept).
release-check: setup
	$(BIN)/python .ci/versions.py release

smoke: setup
	$(BIN)/python .ci/versions.py smoke

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

stress: setup
	$(BIN)/python -m pytest -m stress --timeout 3000

# Recordings of others and the MCAP conformance suite, where they are (see tests/test_recordings.py).
test-recordings: setup
	$(BIN)/python -m pytest -m recordings -n 2 -rs tests/test_recordings.py

# The real lerobot, in an environment of its own: about 8 GB and 8 minutes, once.
PEERS := .venv-peers
peers: $(PEERS)/.installed

$(PEERS)/.installed:
	command -v ffmpeg > /dev/null || apt-get install -y --no-install-recommends ffmpeg  # torchcodec's libraries
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check lerobot==0.4.4
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(PEERS)/v21 lerobot==0.3.3 datasets==3.6.0
	@touch $@

# lerobot 0.6.1 and penstock in one environment: about 6 GB, once; penstock is installed anew each time.
BESIDE := .venv-peers-312
beside: $(BESIDE)/.installed
	$(BESIDE)/bin/python -m pip install --quiet --disable-pip-version-check .

$(BESIDE)/.installed:
	test -x $(BESIDE)/bin/python || $$($(PYTHON) .ci/versions.py find 3.12) -m venv $(BESIDE)
	$(BESIDE)/bin/python -m pip install --quiet --disable-pip-version-check 'lerobot[dataset]==0.6.1'
	@touch $@

# The real Lightning and transformers, beside the same torch.
INTEGRATIONS := .venv-integrations
integrations: $(INTEGRATIONS)/.installed

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lightning,transformers]'
	@touch $@

test-peers: setup peers beside integrations
	$(BIN)/python -m pytest -m peers --timeout 1200

# A real Ray cluster and a real S3 server on this machine: about 1 GB and a minute, once.
CLUSTER := .venv-cluster
cluster: $(CLUSTER)/.installed

$(CLUSTER)/.installed: pyproject.toml constraints.txt
	test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,test]' 'moto[s3]>=5' flask flask-cors
	@touch $@

test-cluster: cluster
	$(CLUSTER)/bin/python -m pytest -m cluster --timeout 3000 tests/conversion tests/bags tests/dataset

bench-peers: setup peers beside
	$(BIN)/python -m benchmarks convert

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo
