"""Names of settings in messages: the names that `zero` and `parallel` use are replaced by those of options.

These libraries do not know the command line: their errors name `ZeroConfig.stage` or `tensor_size=3`, where a user of
the training program has to set `zero.stage` or `parallel.tensor_size`.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from gpt.settings.settings import Settings
from gpt.settings.training import ParallelSettings
from gpt.settings.tree import Group, walk


def in_option_names(text: str) -> str:
    """Return the text with `zero.stage` instead of `ZeroConfig.stage`, and with `parallel.tensor_size=` in full."""
    for name, option in _SET_BY.items():
        text = re.sub(name, option, text)
    return re.sub(_ARGUMENT, r"parallel.\1", re.sub(_CLASS, lambda found: _GROUPS[found[1]], text))


@contextmanager
def messages_in_option_names() -> Iterator[None]:
    """Apply `in_option_names` to the message of an error that leaves this block, and to this project's warnings in it.

    Such a warning is printed as one line, without the line of code that caused it.
    """
    format_others = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not any(Path(filename).is_relative_to(package) for package in _PACKAGES):
            return format_others(message, category, filename, lineno, line)
        return f"warning: {in_option_names(str(message))}\n"

    warnings.formatwarning = format_warning
    try:
        yield
    except (ValueError, RuntimeError) as error:  # a ConfigError is a ValueError
        error.args = tuple(in_option_names(part) if isinstance(part, str) else part for part in error.args)
        raise
    finally:
        warnings.formatwarning = format_others


_PACKAGES = [Path(__file__).parents[2] / name for name in ("gpt", "zero", "parallel")]
_GROUPS = {node.kind.__name__: node.name for node in walk(Settings) if isinstance(node, Group)}
_GROUPS["StartOptions"] = "run"
_GROUPS["ScheduledWeights"] = "data.schedule"
_GROUPS["Muon"] = "optimizer.muon"
_SET_BY = {
    r"ZeroConfig\.leaf_blocks(?==\d+ of )": "train.reproducible_blocks",
    r"ZeroConfig\.leaf_parts(?==\d+ of )": "parallel.context_size",
    r"ZeroConfig\.sum_over_ranks=leaves": "train.reproducible=layout",
    r"Muon\.per_repetition": "optimizer.muon.per_head",
}
_CLASS = re.compile(rf"\b({'|'.join(_GROUPS)})\b(?=\.\w)")  # ZeroConfig in ZeroConfig.stage
# `parallel` has no class of settings: it takes these as arguments of functions.
_ARGUMENT = re.compile(rf"(?<![\w.-])({'|'.join(field.name for field in fields(ParallelSettings))})(?==)")
