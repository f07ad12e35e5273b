"""A program beside a process of a group: ends it with a message once another one has gone.

MLX tells of that only where no other process waits for this one; its threads wait in MLX then, and
hold Python's lock. Standard input is closed when the process ends. It is run by its path, alone.
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
    # A process that is about to end, or to fail, may do so.
    if 0 not in closed and not select.select([0], [], [], float(grace))[0]:
        print(said, file=sys.stderr, flush=True)
        os.kill(int(process), signal.SIGKILL)
