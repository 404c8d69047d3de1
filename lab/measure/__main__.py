"""A measurement of a machine by all ranks of a job, after a check that its nodes agree.

    torchrun ... -m lab.measure [--tensor_size 8] [--expect FILE] [--write FILE] -- ARGUMENTS OF THE PROGRAM

It reports what differs on which node, with exit code 2, and which links and devices are slow, and can write a cluster
file for dry runs and the planner.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lab.measure import bandwidth
from lab.measure.bandwidth import BYTES_PER_GB, LinkRate, Rates
from lab.measure.cluster import ClusterSpec
from lab.measure.device_kernels import DeviceKernels
from lab.measure.health import describe_link, slow_devices, slow_links
from lab.measure.measured_cluster import ACROSS, INSIDE, Measured, cluster_of, reserved_bytes, write_cluster
from parallel.launch.node_facts import Job, NodeFacts, find_facts, find_problems
from parallel.launch.preflight import refuse, split_words
from parallel.mesh import Mesh
from parallel.store import Decisions
from parallel.world import World, exit_as_rank, start_world


def check_and_measure(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Compare the nodes and measure links and devices, by all ranks of a job. Raises ConfigError on all ranks."""
    expected = ClusterSpec.load(options.expect) if options.expect else None
    world = start_world()
    # Nodes are compared before anything is measured: rates of a job that cannot start are of no use.
    check_ranks(world, Job(settings=tuple(arguments)))
    if by_rank := bandwidth.gathered(measure(world, options.tensor_size), world):
        sys.stdout.write("\n".join(describe(by_rank, expected)) + "\n")
        if options.write:
            spec = cluster_of(by_rank, world, options.name)
            write_cluster(spec, Path(options.write), sorted({measured.rates.node for measured in by_rank}))
            sys.stdout.write(f"{options.write} has these rates, for --dry_run.cluster and the planner\n")


def check_ranks(world: World, job: Job) -> None:
    """Compare the nodes of a started job, each represented by its first rank. Raises ConfigError on all ranks."""
    own = asdict(find_facts(job)) if world.local_rank == 0 else None
    refuse(
        Decisions(world.rank, world.size).decide(
            own, lambda by_rank: find_problems([NodeFacts(**facts) for facts in by_rank if facts])
        )
    )


def measure(world: World, tensor_size: int | None) -> Measured:
    """Measure links inside and between nodes, links of the job's own mesh, and devices. All ranks must call this."""
    nodes = Mesh.create(world.local_size, world.device.type)
    links = bandwidth.measure_mesh(nodes, world.device)
    one_rank_per_node = bandwidth.measure_links(nodes.data, world.device, takes_part=world.local_rank == 0)
    job_mesh = []
    if tensor_size is not None and tensor_size != world.local_size:
        job_mesh = bandwidth.measure_mesh(Mesh.create(tensor_size, world.device.type), world.device)
    # All links are measured before any device, because copies to the host compete with messages for its memory.
    nodes.barrier()
    device = bandwidth.measure_device(world.device)
    hop_seconds = max(bandwidth.latency(axis, world.device) for axis in (nodes.data, nodes.tensor))
    nodes.barrier()
    collectives = bandwidth.measure_sizes(nodes.tensor, world.device)
    nodes.barrier()
    kernels = DeviceKernels.measure(world.device)
    rates = Rates.of(world, device, links)
    reserved = reserved_bytes(world.device)
    return Measured(rates, one_rank_per_node, job_mesh, hop_seconds, collectives, kernels, reserved)


def describe(by_rank: Sequence[Measured], expected: ClusterSpec | None) -> list[str]:
    """Return the lines of the report; the last ones name what is slow."""
    rates = [measured.rates for measured in by_rank]
    links = [link for found in rates for link in found.links]
    of_job = [link for measured in by_rank for link in measured.job_mesh]
    lines = [*_summary("inside nodes", links, INSIDE), *_summary("across nodes", links, ACROSS)]
    for axis in (INSIDE, ACROSS):
        lines += _summary(f"along the {axis} axis", of_job, axis)
    flops = sorted(found.device.flops_per_second / 1e12 for found in rates)
    lines.append(f"devices: {flops[0]:,.4g} to {flops[-1]:,.4g} TFLOPs in half precision")
    slow = slow_links(links, _kind_of, partial(_expected_rate, expected, len(rates))) + slow_links(of_job, _kind_of)
    node_of = {found.rank: found.node for found in rates}
    peak = expected.peak_half_tflops * expected.gemm_fraction * 1e12 if expected else 0.0
    named = [describe_link(link, node_of) for link in slow] + [what for _, what in slow_devices(rates, peak)]
    return lines + (named or ["nothing is slow"])


def _kind_of(link: LinkRate) -> object:
    return link.axis, link.what


def _expected_rate(expected: ClusterSpec | None, num_ranks: int, link: LinkRate) -> float:
    """Return the bytes per second that a rank should send over a link; 0 without a cluster file."""
    if expected is None:
        return 0.0
    between = expected.node_gb_per_second * expected.node_fraction / min(expected.gpus_per_node, num_ranks)
    return (expected.intra_node_gb_per_second if link.axis == INSIDE else between) * BYTES_PER_GB


def _summary(title: str, links: Sequence[LinkRate], axis: str) -> list[str]:
    """Return a line for each operation along an axis: the GB/s of a rank in the slowest and in the fastest group."""
    along, lines = [link for link in links if link.axis == axis], []
    for what in dict.fromkeys(link.what for link in along):
        rates = sorted(link.bytes_per_second / BYTES_PER_GB for link in along if link.what == what)
        lines.append(f"{title}: {what}: {rates[0]:.3g} to {rates[-1]:.3g} GB/s a rank")
    return lines


def main(words: Sequence[str]) -> None:
    """Run the measurement. `words` are its options, and after `--` the arguments of the program. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m lab.measure", description=__doc__)
    parser.add_argument("--tensor_size", type=int, help="tensor size of the job, if it is not a whole node")
    parser.add_argument("--expect", help="cluster file: a link or device with less than half of its rate is slow")
    parser.add_argument("--write", help="cluster file to write the measured rates to")
    parser.add_argument("--name", default="measured", help="name of the measured cluster")
    own, arguments = split_words(words)
    check_and_measure(parser.parse_args(own), arguments)


if __name__ == "__main__":
    with exit_as_rank():
        main(sys.argv[1:])
