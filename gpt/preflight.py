"""The preflight of a training run: nodes must also have the same settings and data, and be able to write to run.dir.

python -m gpt.preflight --nodes 2 --meet node0:29501 -- OPTIONS OF pretrain_gpt.py

The options before `--`, and the checks, are those of parallel/launch/preflight.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from data.blend import parse_path
from data.errors import DataError
from gpt.settings.parser import parse_settings
from gpt.settings.tree import dotted
from parallel.launch import preflight
from parallel.launch.node_facts import Job
from parallel.validation.errors import exit_on_config_error


def describe_job(arguments: Sequence[str], num_ranks: int | None) -> Job:
    """Return the settings, the data files and the folder of a training run, which nodes compare.

    A data file is represented by its index, which the .bin file beside it must match. `num_ranks` also
    translates batch sizes of a DeepSpeed configuration. Raises ConfigError or DataError if the run could not start.
    """
    settings = parse_settings(arguments, num_ranks)
    _, prefixes = parse_path(settings.data.path)
    return Job(
        settings=tuple(f"{name}={value}" for name, value in dotted(yaml.safe_load(settings.to_yaml())).items()),
        files=tuple(Path(f"{prefix}.idx") for prefix in prefixes),
        folder=Path(settings.run.dir),
        num_ranks=num_ranks or 1,
    )


if __name__ == "__main__":
    with exit_on_config_error(DataError):
        preflight.main(sys.argv[1:], describe_job)
