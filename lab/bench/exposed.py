"""Count the communication of a step that no computation hides, in dry runs of any size.

    python -m lab.bench.exposed --config configs/gpt2-1.5b.yaml --dry_run.world_size 400 \
        --train.global_batch_size 3200 --dry_run.cluster configs/clusters/dgx-h100-estimated.yaml

Arguments are those of pretrain_gpt.py; rows are stages 1 to 3, and stages 2 and 3 sharded in groups of a node. A
collective is exposed if the computation waits for it and has run nothing since its launch. The seconds are those of
the projection, in which a collective also waits for those before it.
"""

import logging
import sys
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from gpt.settings.parser import parse_settings
from gpt.settings.settings import Settings
from lab.dryrun.dry_run import dry_run, record_launches
from lab.dryrun.projection import project_recording
from lab.measure.cluster import ClusterSpec
from lab.observe.fake_tensors import QuickFakeTensorMode
from lab.races.launch_order import exposed
from parallel.errors import ConfigError
from parallel.world import exit_with_error, imitated_world

NUMBER_BYTES = 8  # the all-reduce of the gradient norm is a single number, which every step waits for
ROWS = [(1, False), (2, False), (3, False), (2, True), (3, True)]  # (stage, is sharded in groups)


def measure(settings: Settings, cluster: ClusterSpec) -> list[str]:
    """Return the cells of a row: collectives and exposed ones with their bytes, the time of a step and of its waits."""
    chosen = settings.dry_run
    assert chosen.world_size is not None
    with imitated_world(chosen.rank, chosen.world_size, cluster.gpus_per_node, "nccl") as world:
        launches, first = record_launches(settings, world, QuickFakeTensorMode())
    of_step = [launch for launch in launches[first:] if launch.is_collective and launch.num_bytes > NUMBER_BYTES]
    bare = [launch for launch in exposed(launches, first) if launch.num_bytes > NUMBER_BYTES]
    timeline = project_recording(dry_run(settings), cluster)
    waiting = timeline.seconds - timeline.busy_seconds()["compute"]
    cells = []
    for some in (of_step, bare):
        cells += [str(len(some)), f"{sum(launch.num_bytes for launch in some) / 1e9:.2f}"]
    return [*cells, f"{1e3 * timeline.seconds:.0f}", f"{1e3 * waiting:.0f}"]


def main(arguments: list[str]) -> None:
    logging.disable(logging.WARNING)
    settings = parse_settings(arguments)
    if settings.dry_run.world_size is None or settings.dry_run.cluster is None:
        raise ConfigError("dry_run.world_size and dry_run.cluster are not set; give both")
    cluster = ClusterSpec.load(settings.dry_run.cluster)
    table = Table("stage", "collectives", "GB", "exposed", "GB", "step, ms", "waiting, ms")
    for stage, in_groups in ROWS:
        shard_size = cluster.gpus_per_node if in_groups else None
        row = replace(settings, zero=replace(settings.zero, stage=stage))
        name = f"{stage}, groups of {shard_size}" if in_groups else str(stage)
        table.add_row(name, *measure(replace(row, parallel=replace(settings.parallel, shard_size=shard_size)), cluster))
    Console().print(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        exit_with_error(error)
