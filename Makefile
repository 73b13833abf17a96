# make run and make test work on a fresh Debian or Ubuntu machine by themselves: setup/prepare brings what is missing.
.PHONY: run test bench lint fmt faults machines nights screenshots
VENV_PYTHON := .venv/bin/python

run:
	@setup/prepare run
	@exec $(VENV_PYTHON) manage.py up

test:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages

lint:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages lint

# With many times more trials than make test; it takes hours, and says as it goes what held. `make machines` comes first.
faults:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages night

# Two Debian machines with NFS between them, kept in /var/cache: about ten minutes and 1 GB, once.
machines:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.machines

# Ten nights of policies over 200 images on three hosts, with the time moved and faults thrown in.
nights:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.nights

bench:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.performance

screenshots:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.screenshots

fmt:
	@setup/prepare test
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .
