"""Reads the settings of a run: YAML files, DeepSpeed's configuration and dotted options, in layers.

--config a.yaml --config b.yaml    <    --zero.deepspeed_config ds_config.json    <    --zero.stage 2 ...

Below these are the settings of the model in the config.json of initial weights.

A layer has values by dotted names, and says of each where it is written. The dataclasses check the values.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from rich.table import Table

from gpt.formats.config_files import Section, parse_yaml, read_section
from gpt.settings.option_names import in_option_names, messages_in_option_names
from gpt.settings.removed import REMOVED_SETTINGS, is_removed, problem_of
from gpt.settings.settings import Settings
from gpt.settings.tree import Group, Leaf, default_of, help_text, walk
from parallel.validation.errors import ConfigError
from parallel.validation.fields import FilePath, alternatives, convert, is_text, shown

CONFIG = "config"
DEEPSPEED_CONFIG = "zero.deepspeed_config"  # not a field of ZeroConfig: the file sets more than ZeRO
INITIAL_WEIGHTS = "train.initial_weights"
RUN_DIR, RUN_CONFIG, METRICS = "run.dir", "config.yaml", "metrics.jsonl"  # files of the folder of a run
DEEPSPEED_TEXT = "A JSON configuration of DeepSpeed, translated into settings; see docs/deepspeed.md."
MAX_COMPARED = 100  # characters of a wrong name, for which similar ones are looked for
TREE = [*walk(Settings), Leaf(DEEPSPEED_CONFIG, FilePath | None, None, DEEPSPEED_TEXT)]
GROUPS = {node.name: node for node in TREE if isinstance(node, Group)}
LEAVES = {node.name: node for node in TREE if isinstance(node, Leaf)}


@dataclass(frozen=True)
class Given:
    """A value that a layer gives, and "FILE, line N: "; "" for an option on the command line."""

    value: Any
    origin: str = ""


Layer = dict[str, Given]


@messages_in_option_names()
def parse_settings(
    arguments: Sequence[str], num_ranks: int | None = None, show: Callable[[Table], None] = lambda table: None
) -> Settings:
    """Return the settings that a command line gives, such as `--config FILE --zero.stage 2`.

    Options override all files, wherever they are on the command line; a later `--config` overrides an earlier one, and
    DeepSpeed's configuration overrides the YAML files. Its batch sizes are translated for `num_ranks` ranks, by default
    those that the launcher has started, and `show` is called with a table of its keys.

    The model of `train.initial_weights` is that of the folder's config.json, as far as nothing else is given; `show` is
    called with a table of what is taken from there.

    Raises ConfigError, with a message of one line, if anything in the settings is wrong.
    """
    given = given_settings(arguments, num_ranks, show)
    settings = _build(Settings, "", None, given)
    _check_run_dir(given, settings.run.dir)
    return settings


def _check_run_dir(given: Layer, run_dir: str) -> None:
    """Raise ConfigError if run.dir is that of a run whose folder was moved or copied to where its config.yaml is."""
    origin = given.get(RUN_DIR, Given(None)).origin
    file = Path(origin.rpartition(", line ")[0])
    is_of_a_run = file.name == RUN_CONFIG and file.with_name(METRICS).exists()
    if is_of_a_run and file.parent.resolve() != Path(run_dir).resolve():
        raise ConfigError(
            f"{origin}{RUN_DIR}={shown(run_dir)}, but the run is in {file.parent}, as if it was moved or copied; give "
            f"--{RUN_DIR}={file.parent} to go on with this one, or --{RUN_DIR}={run_dir}"
        )


@messages_in_option_names()
def given_settings(
    arguments: Sequence[str], num_ranks: int | None = None, show: Callable[[Table], None] = lambda table: None
) -> Layer:
    """Return what a command line gives, {dotted name: value and origin}, with the arguments of `parse_settings`."""
    files, options = _without_removed(*_layers(arguments))
    files = _merged(_initial_model(_merged(files, options), show), files)
    given = _merged(files, options)
    path = _typed(DEEPSPEED_CONFIG, given.pop(DEEPSPEED_CONFIG, Given(None)))
    if path is not None:
        from gpt.deepspeed.config import deepspeed_layer

        base = {name: leaf.default for name, leaf in LEAVES.items()}
        base |= {name: _typed(name, found) for name, found in given.items()}
        translated = deepspeed_layer(Path(path), base, frozenset(options), num_ranks, show)
        layer = {name: Given(value, f"{path}: ") for name, value in translated.items()}
        given = _merged(files, layer, options)
        del given[DEEPSPEED_CONFIG]
    return given


def _initial_model(given: Layer, show: Callable[[Table], None]) -> Layer:
    """Return the settings of the model whose weights a run begins with, and show those that are not given."""
    weights = _typed(INITIAL_WEIGHTS, given.get(INITIAL_WEIGHTS, Given(None)))
    if weights is None:
        return {}
    from gpt.pretrained.weights import CONFIG as WEIGHTS_CONFIG
    from gpt.pretrained.weights import model_options

    if not _is_file(f"{weights}/{WEIGHTS_CONFIG}"):
        return {}  # what is missing is named when the weights are read
    path = Path(weights) / WEIGHTS_CONFIG
    layer = {name: Given(value, f"{path}: ") for name, value in model_options(path.parent).items()}
    if taken := {name: found.value for name, found in _merged(layer, given).items() if found is layer.get(name)}:
        table = Table("setting", "value", title=f"Taken from {path}", title_justify="left")
        for name, value in taken.items():
            table.add_row(name, shown(value))
        show(table)
    return layer


def _layers(arguments: Sequence[str]) -> tuple[Layer, Layer]:
    """Return what the files of `--config` give, and what all other options give."""
    files: Layer = {}
    options: Layer = {}
    for name, text in _options(arguments):
        if name == CONFIG:
            is_inline = text.startswith("{")
            content = parse_yaml(text, f"--{CONFIG}") if is_inline else read_section(Path(text).expanduser(), text)
            files = _merged(files, dict(_entries("", content, f"--{CONFIG}" if is_inline else text)))
        elif name not in LEAVES.keys() | REMOVED_SETTINGS.keys() and not text.startswith("{") and _is_file(text):
            options = _merged(options, dict(_entries(name, read_section(Path(text), text), text)))
        else:
            options = _merged(options, dict(_entries(name, _value_of_option(name, text), f"--{name}")))
    return files, options


def _without_removed(*layers: Layer) -> list[Layer]:
    """Return the layers without settings that are removed. Raise ConfigError if one of these would be needed."""
    for name, given in _merged(*layers).items():
        if problem := problem_of(name, given.value):
            raise ConfigError(f"{given.origin}{name}={shown(given.value)} {problem}")
    return [{name: layer[name] for name in layer if name not in REMOVED_SETTINGS} for layer in layers]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text of the value) of every option. Print the help and exit if one asks for it."""
    remaining = iter(arguments)
    for argument in remaining:
        if argument in ("-h", "--help"):
            sys.stdout.write(help_text(Settings, TREE))
            sys.exit(0)
        if not argument.startswith("--"):
            raise ConfigError(f"{shown(argument)} is not an option; options are --NAME=VALUE or --NAME VALUE")
        name, equals, text = argument[2:].partition("=")
        if name != CONFIG:
            _check_name(name)
        if not equals:
            text = next(remaining, "")
        if not text or (not equals and text.startswith("--")):
            raise ConfigError(f"--{name} has no value; write --{name}=VALUE")
        yield name, text


def _check_name(name: str, origin: str = "") -> None:
    """Raise ConfigError if there is no setting of this name, and suggest the one with the closest name."""
    if name not in LEAVES and name not in GROUPS and not is_removed(name):
        likely = get_close_matches(name[:MAX_COMPARED], [*LEAVES, *GROUPS])
        remedy = f"did you mean {likely[0]}?" if likely else "see pretrain_gpt.py --help"
        raise ConfigError(f"{origin}{shown(name)}: there is no such setting; {remedy}")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than the name of a file may be, or a null byte
        return False


def _value_of_option(name: str, text: str) -> Any:
    """Return the value of an option: its text if the setting is a text, else the YAML value."""
    kinds = alternatives(LEAVES[name].hint) if name in LEAVES else ()
    is_null = text == "null" and NoneType in kinds
    is_list = text.startswith("[") and any(get_origin(kind) is list for kind in kinds)
    if any(map(is_text, kinds)) and not is_null and not is_list:
        return text
    return parse_yaml(text, f"--{name}")


def _entries(name: str, value: Any, source: str, line: int | None = None) -> Iterator[tuple[str, Given]]:
    """Yield (dotted name, value and origin) of every leaf below a setting or a group; "" is the root of all."""
    origin = f"{source}, line {line}: " if line else ""
    if name in LEAVES or name in REMOVED_SETTINGS:
        yield name, Given(value, origin)
    elif isinstance(value, Section):
        for key, below in value.items():
            child, place = f"{name}.{key}" if name else key, f"{source}, line {value.lines[key]}: "
            if "." in key:  # it could be in the file a second time, below its group
                raise ConfigError(f"{place}{shown(key)} contains a dot; write the setting below its group")
            _check_name(child, place)
            yield from _entries(child, below, source, value.lines[key])
    elif value is not None:
        raise ConfigError(f"{origin}{name}={shown(value)} is not a group of settings; write its settings below {name}")
    elif name in GROUPS and GROUPS[name].is_optional:
        yield name, Given(None, origin)


def _merged(*layers: Layer) -> Layer:
    """Return what layers give together; a later one wins. A group that is null is not one that has settings."""
    merged: Layer = {}
    for layer in layers:
        for name, given in layer.items():
            others = merged if name in GROUPS else merged.keys() & GROUPS.keys()  # a setting is below null groups only
            for other in [other for other in others if other.startswith(f"{name}.") or name.startswith(f"{other}.")]:
                del merged[other]
            merged[name] = given
    return merged


def _typed(name: str, given: Given) -> Any:
    """Return the value of one setting in its type. Raise ConfigError if it does not suit."""
    if name in GROUPS:
        return given.value
    with _origins({name: given}):
        return convert(name, LEAVES[name].hint, given.value)


def _build(kind: type, prefix: str, base: Any, given: Layer) -> Any:
    """Return the group of settings that begin with `prefix`. What is not given is as in `base`, or has its default."""
    values, missing = {}, []
    for field in fields(kind):
        name, default = f"{prefix}{field.name}", default_of(field, base)
        if name in given:
            values[field.name] = given[name].value
        elif name in GROUPS and (default is MISSING or any(other.startswith(f"{name}.") for other in given)):
            below = None if default is MISSING else default
            values[field.name] = _build(GROUPS[name].kind, f"{name}.", below, given)
        elif default is MISSING:
            missing.append(name)
        else:
            values[field.name] = default
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not set; give a --config that sets what has no default")
    with _origins(given):
        return kind(**values)


@contextmanager
def _origins(given: Layer) -> Iterator[None]:
    """Put the origin of the setting that an error begins with before its message."""
    try:
        yield
    except ConfigError as error:
        message = in_option_names(str(error))
        found = re.match(r"[\w.]+", message)
        origin = given[found[0]].origin if found and found[0] in given else ""
        raise ConfigError(f"{origin}{message}") from error
