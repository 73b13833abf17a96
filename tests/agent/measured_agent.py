"""The real agent, which writes down in the end how much memory it and its tools had at most: bytes, in two lines.

The file is the first argument. Memory that a process inherited before it became this one does not count: it is the peak
of its own address space, as proc_pid_status(5) tells it.
"""

import resource
import sys
from pathlib import Path

from storage_admin.agent import main

if __name__ == "__main__":
    report = Path(sys.argv.pop(1))
    code = main.main()
    status = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    tools = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    report.write_text(f"{own * 1024}\n{tools * 1024}\n")
    sys.exit(code)
