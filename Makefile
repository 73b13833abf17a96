# make run and make test work on a fresh Debian or Ubuntu machine by themselves: setup/prepare brings what is missing.
.PHONY: run check test night faults machines nights bench lint fmt screenshots
VENV_PYTHON := .venv/bin/python

run:
	@setup/prepare run
	@exec $(VENV_PYTHON) manage.py up

# After each edit: linters, types, contracts and the tests that need nothing but Python. Less than two minutes.
check:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages check

# What a merge has to pass. About 15 minutes on two cores.
test:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages test

# Everything, with the figures of docs/reliability.md. It takes hours; `make machines` comes first. One that was cut off
# goes on at the test where it was, as long as the commit is the same.
night:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages night --go-on

lint:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages lint

# Of the night only what kills, cuts off, fills up and tries at random.
faults:
	@setup/prepare test
	@exec $(VENV_PYTHON) -m tests.stages figures

# Virtual machines of Debian 12 and 13, kept in /var/cache: about half an hour and 2 GB, once.
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
