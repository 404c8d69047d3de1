"""Reads the YAML and JSON files that users write: an error names the file and the line.

Beyond what the formats require, a key may not appear twice, files are UTF-8, and values are nested at most
`MAX_DEPTH` deep: the parsers are recursive. Files have at most 1 MiB, and at most `MAX_VALUES` values, where an alias
counts as what it stands for. Of YAML 1.1, words such as `yes`, octal and base-60 numbers, dates, tags and merges of
keys are left out: they are read as something else than they seem to be, or grow without a limit.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from parallel.validation.errors import ConfigError
from parallel.validation.fields import shown
from parallel.validation.files import SETTINGS_BYTES, read_limited

MAX_DEPTH = 50
MAX_VALUES = 20_000  # of a YAML file, as they are without aliases
MAX_KEY = 200  # characters
SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
PREFIX = "tag:yaml.org,2002:"
# Of scalars without quotes: the type, the pattern, and the characters with which it may begin.
SCALARS = (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9](?:_?[0-9])*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9](?:_?[0-9])*(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
)


class Section(dict[str, Any]):
    """A mapping of a YAML file, with the number of the line of each key."""

    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    """A loader that is strict, and notes lines. Its parser is written in Python: libyaml's would exhaust the stack."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}
    depth = num_values = 0

    def __init__(self, stream: str):
        super().__init__(stream)
        self.sizes: dict[int, int] = {}  # the numbers of values in the nodes of anchors

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if self.depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, f"nested more than {MAX_DEPTH} deep", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(None, None, f"the tag {event.tag} is not supported", event.start_mark)
        before = self.num_values
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self.num_values += self.sizes.get(id(node), 1)
        else:
            self.num_values += 1
            self.sizes[id(node)] = self.num_values - before
        if self.num_values > MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"more than {MAX_VALUES} values", event.start_mark)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.Node:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key is not a single word", key.start_mark)
            if key.tag == f"{PREFIX}merge":
                raise yaml.MarkedYAMLError(None, None, "keys cannot be merged by <<, write them out", key.start_mark)
            if len(key.value) > MAX_KEY:
                raise yaml.MarkedYAMLError(None, None, f"a key of more than {MAX_KEY} characters", key.start_mark)
            if key.value in names:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value} is here twice", key.start_mark)
            names.add(key.value)
        return node

    def construct_section(self, node: yaml.MappingNode) -> Any:
        section = Section()
        yield section
        section.lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
        section.update({key.value: self.construct_object(value, deep=True) for key, value in node.value})

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """Return a number, which is infinite only if it is written as .inf."""
        value: float = self.construct_yaml_float(node)
        if math.isinf(value) and "inf" not in node.value.lower():
            raise yaml.MarkedYAMLError(None, None, f"{node.value} is too large for a number", node.start_mark)
        return value

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Return a text, in which two escapes may stand for one character, as in JSON."""
        text: str = self.construct_yaml_str(node)
        return SURROGATE_PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each text that the loader, or another one, would read as something else."""


for _type, _pattern, _first in SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{PREFIX}{_type}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{PREFIX}map", _Loader.construct_section)
_Loader.add_constructor(f"{PREFIX}float", _Loader.construct_number)
_Loader.add_constructor(f"{PREFIX}str", _Loader.construct_text)


def read_text(path: Path, name: str) -> str:
    """Return the text of a file. Raise ConfigError, which begins with `name`, if it is not a file of UTF-8."""
    try:
        content = read_limited(path, SETTINGS_BYTES)
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} cannot be read ({reason}); give another file") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}, line {line} is not UTF-8; save the file in UTF-8") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text. Raise ConfigError, which begins with `name`, if it is not well-formed."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: {one_line(error.problem or error.context)}; correct it") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(f"{name}, line {line}: U+{ord(text[error.position]):04X} is not text; remove it") from error
    except ValueError as error:  # Python refuses to convert thousands of digits
        raise ConfigError(f"{name} contains a number with too many digits; shorten it") from error


def to_yaml(value: Any) -> str:
    """Return the YAML of a value, which `parse_yaml` reads as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_section(path: Path, name: str) -> Section:
    """Return the content of a YAML file. Raise ConfigError if it cannot be read or contains no section of keys."""
    content = parse_yaml(read_text(path, name), name)
    if not isinstance(content, Section) or not content:
        raise ConfigError(f"{name} contains no section of names and values; correct it or give another file")
    return content


def read_json(path: Path, name: str) -> Any:
    """Return the content of a JSON file. Raise ConfigError if it cannot be read or has a key twice in an object."""
    text = read_text(path, name)
    check_depth(text, name)

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise ConfigError(f"{name} has the key {key} twice; remove one")
            keys.add(key)
        return dict(pairs)

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ConfigError(f"{name} has the number {shown(digits)}, which is too large; correct it")
        return value

    try:
        return json.loads(text, object_pairs_hook=without_duplicates, parse_float=number)
    except ConfigError:  # a ValueError, as json's own
        raise
    except ValueError as error:
        raise ConfigError(f"{name} is not a JSON file: {one_line(error)}; correct it or give another") from error


def check_depth(text: str, name: str) -> None:
    """Raise ConfigError if the brackets of a JSON text are nested too deep for a recursive parser."""
    depth = 0
    for token in re.finditer(r'"(?:\\.|[^"\\])*(?:"|\Z)|[\[\]{}]', text, re.DOTALL):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            line = text[: token.start()].count("\n") + 1
            raise ConfigError(f"{name}, line {line}: nested more than {MAX_DEPTH} deep; correct it")


def one_line(message: object) -> str:
    """Return a message without line breaks."""
    return " ".join(str(message).split())
