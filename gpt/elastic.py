"""Train on as many nodes of a list as there are and as the settings fit to.

python -m gpt.elastic --nodes node0,node1 --num_ranks 8 -- pretrain_gpt.py OPTIONS

The options before `--` are those of parallel/launch/elastic.py. If MIN_NODES is set, `scripts/launch` runs it on every
node.
"""

import sys
from collections.abc import Sequence

from data.errors import DataError
from gpt.builder.train_state import build_mesh
from gpt.preflight import describe_job
from gpt.settings.parser import parse_settings
from parallel.launch import elastic
from parallel.validation.errors import ConfigError, exit_on_config_error
from parallel.world import imitated_world


def find_problem(arguments: Sequence[str], num_nodes: int, num_ranks: int) -> str | None:
    """Return why a run with these options cannot be divided over nodes of `num_ranks` ranks, or None if it can."""
    size = num_nodes * num_ranks
    try:
        settings = parse_settings(arguments, size)
        with imitated_world(0, size, num_ranks, "gloo") as world:
            build_mesh(settings, world)
    except ConfigError as error:
        return f"on {size} ranks: {error}"
    return None


if __name__ == "__main__":
    with exit_on_config_error(DataError):
        elastic.main(sys.argv[1:], describe_job, find_problem)
