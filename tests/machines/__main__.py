"""``make machines``: builds them where they are not there yet."""

from tests.machines.lab import SUITES, build

if __name__ == "__main__":
    for suite in SUITES:
        print(f"The machines of {suite} are in {build(suite)}.")
