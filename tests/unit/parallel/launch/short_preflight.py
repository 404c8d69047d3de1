"""The preflight with few, small measurements; also a program, for tests that need the cluster file that it writes."""

import sys
from collections.abc import Sequence
from unittest import mock

from parallel.launch import bandwidth, device_kernels, reference_step
from parallel.launch.preflight import main
from parallel.launch.reference_step import Shape


def main_in_short(words: Sequence[str]) -> None:
    sizes = {"NUMELS": {"cpu": (2**10, 2**12)}, "LAYERS": {"cpu": ((8, 16, 32), (32, 32, 32))}, "BUDGET_SECONDS": 0.0}
    messages = {"MESSAGE_BYTES": (2**10, 2**14), "SECONDS_EACH": 0.01, "SECONDS_EACH_SIZE": 0.01}
    shapes = {"cpu": Shape(1, 16, 2, 8, 2, 32)}
    with (
        mock.patch.multiple(device_kernels, **sizes),
        mock.patch.multiple(bandwidth, **messages),
        mock.patch.multiple(reference_step, SHAPES=shapes, BUDGET_SECONDS=0.0),
    ):
        main(words)


if __name__ == "__main__":
    main_in_short(sys.argv[1:])
