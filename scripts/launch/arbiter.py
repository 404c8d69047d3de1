"""The arbiter of a launch with MIN_NODES: a process outside of the nodes, which grants each start to one of them.

    python scripts/launch/arbiter.py ADDRESS:PORT ARGUMENTS OF pretrain_gpt.py

Of the parts of a parted network that can reach it, the first one that asks goes on, and no other. slurm.sbatch and
hostfile.sh start it, and end it with the launch.
"""

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpt.preflight import describe_job
from parallel.launch.channel import Channel, read_secret
from parallel.launch.peers import ARBITER
from parallel.launch.route import resolve


def arbitrate(address: tuple[str, int], secret: bytes) -> None:
    """Grant starts until this process ends. Raises OSError if the port is in use."""
    newest, by = 0, ""

    def answer(request: dict[str, Any]) -> str:
        nonlocal newest, by
        if request["start"] > newest:
            newest, by = request["start"], request["by"]
            sys.stderr.write(f"launch: the arbiter grants start {newest} to {by}\n")
        return "granted" if (request["start"], request["by"]) == (newest, by) else "refused"

    Channel(secret).serve(address, ARBITER, answer)
    threading.Event().wait()


if __name__ == "__main__":
    try:
        arbitrate(resolve(sys.argv[1]), read_secret(describe_job(sys.argv[2:], None).folder))
    except (OSError, ValueError) as error:
        sys.exit(f"launch: there is no arbiter: {error}")
