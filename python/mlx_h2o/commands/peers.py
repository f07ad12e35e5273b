"""Watch over a process: once another one of its group is gone, print a message and kill it.

MLX reports a loss only if no other process waits for this one; otherwise its threads block in MLX,
holding Python's lock. Standard input closes when the process ends. Runs by its path, alone.
"""

import os
import select
import signal
import sys

if __name__ == "__main__":
    said, process, grace, *connections = sys.argv[1:]
    ends = select.poll()
    ends.register(0, select.POLLIN)
    for one in connections:
        ends.register(int(one), getattr(select, "POLLRDHUP", 0))
    closed = {file for file, _ in ends.poll()}
    # A process that is ending or failing by itself gets the time to do so.
    if 0 not in closed and not select.select([0], [], [], float(grace))[0]:
        print(said, file=sys.stderr, flush=True)
        os.kill(int(process), signal.SIGKILL)
