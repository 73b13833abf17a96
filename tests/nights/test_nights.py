"""A few nights with faults, as ``make nights`` runs ten: a dashboard of its own, in processes of its own."""

import subprocess
import sys

import pytest

from tests.harness.services import ROOT

pytestmark = [pytest.mark.night, pytest.mark.faults, pytest.mark.services, pytest.mark.qemu]

SEED = "6"


def test_after_nights_with_faults_every_guest_reads_the_same_and_the_ledger_says_what_the_disks_say() -> None:
    argv = [sys.executable, "-m", "tests.nights", "--nights", "2", "--images", "20", "--seed", SEED]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("the ledger says") == 3
