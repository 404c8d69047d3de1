"""A wrapper of torchrun that exits with the code of the rank that failed first: torchrun's own exit code is always 1.

python -m parallel.launch --nnodes 2 --nproc-per-node 8 ... pretrain_gpt.py ...      every option is torchrun's
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: list[str]) -> int:
    """Run torchrun and return the exit code: 128 + the number of the signal if a rank was killed, as in a shell."""
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"launch: rank {rank} failed first, with exit code {failure.exitcode}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
