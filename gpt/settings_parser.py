"""Reads the settings of a run: YAML files, DeepSpeed's configuration and dotted options, in layers.

--config a.yaml --config b.yaml    <    --zero.deepspeed_config ds_config.json    <    --zero.stage 2 ...
"""

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from rich.table import Table

from gpt.deepspeed.config import deepspeed_layer
from gpt.option_names import errors_in_option_names
from gpt.settings import Settings
from parallel.errors import ConfigError

DEEPSPEED_CONFIG = "zero.deepspeed_config"  # not a field of ZeroConfig: the file sets more than ZeRO


@errors_in_option_names()
def parse_settings(
    arguments: Sequence[str], num_ranks: int | None = None, show: Callable[[Table], None] = lambda table: None
) -> Settings:
    """Return the settings that a command line gives, such as `--config FILE --zero.stage 2`.

    Options override all files, wherever they are on the command line; a later `--config` overrides an earlier one, and
    DeepSpeed's configuration overrides the YAML files. Its batch sizes are translated for `num_ranks` ranks, by default
    those that the launcher has started, and `show` is called with a table of its keys.

    Raises ConfigError, with a message of one line, if anything in the settings is wrong.
    """
    parser = _parser()
    configs, options = _split(arguments)
    try:
        namespace = parser.parse_args([*configs, *options])
        # The parser adds this option to every namespace; it is removed each time, as it is not a field of Settings.
        if path := namespace.pop(DEEPSPEED_CONFIG):
            names = frozenset(_names_of_options(options, namespace))
            layer = deepspeed_layer(Path(path), namespace, names, num_ranks, show)
            namespace = parser.parse_object(layer, namespace)
            namespace.pop(DEEPSPEED_CONFIG)
        instantiated = parser.instantiate(namespace)
    except ArgumentError as error:
        raise ConfigError(_explain(error, list(parser.get_defaults().keys()))) from error
    return Settings(**{name: getattr(instantiated, name) for name in Settings.__dataclass_fields__})


def _parser() -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="pretrain_gpt.py", description=Settings.__doc__, exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file of settings; may be given several times")
    parser.add_class_arguments(Settings, as_group=False)
    parser.add_argument(
        f"--{DEEPSPEED_CONFIG}",
        type=str | None,
        help="A JSON configuration of DeepSpeed, translated into settings; see docs/deepspeed.md",
    )
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that belong to `--config`, and all others; both keep their order."""
    configs: list[str] = []
    options: list[str] = []
    for previous, argument in zip(["", *arguments[:-1]], arguments, strict=False):
        is_config = argument.partition("=")[0] == "--config" or previous == "--config"
        (configs if is_config else options).append(argument)
    return configs, options


def _names_of_options(options: Sequence[str], parsed: Namespace) -> Iterator[str]:
    """Yield the dotted name of every setting that the options give; `--zero={stage: 1}` gives `zero.stage`."""
    for option, following in zip(options, [*options[1:], ""], strict=False):
        if not option.startswith("--"):
            continue
        name, separator, value = option[2:].partition("=")
        if isinstance(parsed.get(name), Namespace):  # a group of settings, given as YAML or by the name of a YAML file
            value = value if separator else following
            yield from _leaves(name, yaml.safe_load(Path(value).read_text() if Path(value).is_file() else value))
        else:
            yield name


def _leaves(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted name of every leaf of a nested dictionary that is called `name`."""
    if not isinstance(value, dict):
        yield name
        return
    for key, below in value.items():
        yield from _leaves(f"{name}.{key}", below)


def _explain(error: Exception, known_names: list[str]) -> str:
    """Return the parser's message in one line. If a setting does not exist, suggest the one with the closest name."""
    message = re.sub(r'^Parser key "([^"]+)":', r"\1:", " ".join(str(error).split()))
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|Group '(\w+)' does not accept option '(\w+)'", message)
    if unknown is None:
        return message
    name = ".".join(filter(None, unknown.groups()))
    likely = get_close_matches(name, known_names, n=1)
    remedy = f"did you mean {likely[0]}?" if likely else "see pretrain_gpt.py --help"
    return f"{name}: there is no such setting; {remedy}"
