"""The measurement with few, small measurements; also a program, for tests that need the cluster file that it writes."""

import sys
from unittest import mock

from lab.measure import __main__ as measurement
from lab.measure import bandwidth, device_kernels, reference_step
from lab.measure.reference_step import Shape
from parallel.launch import node_facts


def main() -> None:
    sizes = {"NUMELS": {"cpu": (2**10, 2**12)}, "LAYERS": {"cpu": ((8, 16, 32), (32, 32, 32))}, "BUDGET_SECONDS": 0.0}
    sizes["ATTENTIONS"] = {"cpu": ((2, 64, 32), (4, 32, 32))}
    messages = {"MESSAGE_BYTES": (2**10, 2**14), "SECONDS_EACH": 0.01, "SECONDS_EACH_SIZE": 0.01}
    messages["DEVICE_SIZES"] = {"cpu": (64, 2**12)}
    shapes = {"cpu": Shape(1, 16, 2, 8, 2, 32)}
    with (
        mock.patch.multiple(device_kernels, **sizes),
        mock.patch.multiple(bandwidth, **messages),
        mock.patch.multiple(reference_step, SHAPES=shapes, BUDGET_SECONDS=0.0),
        mock.patch.object(node_facts, "MIN_DISK_BYTES_PER_SECOND", 0.0),
    ):
        measurement.main(sys.argv[1:])


if __name__ == "__main__":
    main()
