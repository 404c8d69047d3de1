"""Settings that are made at random: what is accepted is what was written, and all else ends in one line.

Three fuzzers, for YAML files, options and DeepSpeed's JSON files. Half of the inputs are trees of settings with a few
values, names or characters changed, because most random text does not get beyond the first character of a parser.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from gpt.deepspeed.keys import KEYS
from gpt.settings.parser import DEEPSPEED_CONFIG, GROUPS, LEAVES, parse_settings
from gpt.settings.settings import Settings
from parallel.validation.errors import ConfigError
from tests.fuzz import fuzzed, run_examples

BASE: dict[str, Any] = {
    "data": {"path": "nowhere"},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 300},
}
INLINE = f"--config={yaml.safe_dump(BASE, default_flow_style=True, width=math.inf).strip()}"

integers = st.sampled_from([0, 1, 2, 3, 8, -1, 2**31, 2**63 - 1, 2**63, 10**30, 10**400]) | st.integers()
floats = st.sampled_from([0.5, 1e-8, 1e30, 5e-324, math.nan, math.inf, -math.inf]) | st.floats()
texts = st.sampled_from(["", "auto", "none", "null", "a", "1:a", "/", "..", "~", "cpu", "host", "fp16"]) | st.text()
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars, lambda below: st.lists(below, max_size=4) | st.dictionaries(texts, below, max_size=3), max_leaves=6
)
names = st.sampled_from(sorted(LEAVES.keys() - {DEEPSPEED_CONFIG})) | st.sampled_from(sorted(GROUPS)) | texts
keys = st.sampled_from(sorted(KEYS)) | texts


def parsed(arguments: list[str]) -> Settings | None:
    """Return the settings; None if they are refused, in one line of reasonable length."""
    try:
        return parse_settings(arguments, num_ranks=2)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable(), message
    assert 10 < len(message) < 3000, message
    return None


def nested(pairs: list[tuple[str, Any]], tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with values put in by dotted names."""
    for name, value in pairs:
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            if not isinstance(branch.get(parent), dict):
                branch[parent] = {}
            branch = branch[parent]
        branch[last] = value
    return tree


def damaged(content: str, changes: list[tuple[int, str]]) -> str:
    """Return the content with some of its characters replaced by other text."""
    for place, text in changes:
        place %= len(content) + 1
        content = content[:place] + text + content[place + 1 :]
    return content


def same(taken: Any, written: Any) -> bool:
    """Return True if a setting has the value that was written."""
    if isinstance(taken, (list, tuple)) and isinstance(written, (list, tuple)):
        return len(taken) == len(written) and all(map(same, taken, written))
    if isinstance(written, dict):
        return all(same(getattr(taken, name), value) for name, value in written.items())
    return type(written)(taken) == written if isinstance(taken, float) and written is not None else taken == written


def check_taken(settings: Settings, tree: Any) -> None:
    """Check that each leaf of a tree is in the settings, and that they are equal when they are written and read."""
    for group, written in tree.items():
        assert written is None or same(getattr(settings, group), {k: v for k, v in written.items() if v is not None})
    assert settings_of_file(settings.to_yaml()) == settings


def settings_of_file(content: str | bytes, *options: str) -> Settings | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file")
        file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        return parsed([f"--config={file}", *options])


changes = st.lists(st.tuples(st.integers(0), st.sampled_from("\t\n :-[]{}&*!|>'\"%@#,?\\0aé\0") | st.text(max_size=3)))


@fuzzed(60, 4000)
def test_a_file_of_settings_is_taken_as_it_is_or_refused(num_examples: int):
    def check(pairs: list[tuple[str, Any]], changed: list[tuple[int, str]], is_flow: bool) -> None:
        tree = nested(pairs, json.loads(json.dumps(BASE)))
        try:
            content = yaml.safe_dump(tree, default_flow_style=is_flow, allow_unicode=True)
        except (RecursionError, ValueError):  # 10**400 has more digits than Python writes
            return
        settings = settings_of_file(damaged(content, changed))
        if settings is not None and not changed:
            check_taken(settings, tree)

    run_examples(num_examples, check, st.lists(st.tuples(names, values), max_size=3), changes, st.booleans())


@fuzzed(30, 1000)
def test_a_file_of_any_bytes_is_refused_or_taken(num_examples: int):
    run_examples(num_examples, lambda content: settings_of_file(content, INLINE), st.binary())
    run_examples(num_examples, lambda content: settings_of_file(content, INLINE), st.text())


@fuzzed(60, 3000)
def test_options_are_taken_as_they_are_or_refused(num_examples: int):
    def check(pairs: list[tuple[str, str | Any]], words: list[str]) -> None:
        options = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in pairs]
        options = [option for option in options if option not in ("--help", "-h")]
        settings = parsed([INLINE, *options, *(word for word in words if word not in ("--help", "-h"))])
        if settings is not None:
            assert settings_of_file(settings.to_yaml()) == settings

    run_examples(num_examples, check, st.lists(st.tuples(names, values), max_size=3), st.lists(texts, max_size=1))


@fuzzed(60, 2000)
def test_a_configuration_of_deepspeed_is_translated_or_refused(num_examples: int):
    def check(pairs: list[tuple[str, Any]], changed: list[tuple[int, str]]) -> None:
        content = damaged(json.dumps(nested(pairs, {"train_batch_size": 8})), changed)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "ds_config.json")
            file.write_bytes(content.encode(errors="surrogatepass"))
            parsed([INLINE, f"--{DEEPSPEED_CONFIG}={file}"])

    run_examples(num_examples, check, st.lists(st.tuples(keys, values), max_size=4), changes)
