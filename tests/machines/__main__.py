"""``make machines``: builds them where they are not there yet."""

from tests.machines.lab import build

if __name__ == "__main__":
    print(f"The machines are in {build()}.")
