"""Files of settings that are not as they should be: one line with the file and the line."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt.formats.config_files import parse_yaml, read_json, read_section, to_yaml
from parallel.validation.errors import ConfigError

DEEP = 10**5
# Ten values, and four times ten aliases of the line before.
LAUGHS = b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1) if i else b"1"] * 10)) for i in range(5))


def assert_refused(read: Callable[[Path, str], object], path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read(path, path.name)
    assert str(raised.value).startswith(f"{path.name}{message}")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", ", line 3: the key a is here twice; correct it"),
        (b"a: 1\nb: {c: \xff}\n", ", line 2 is not UTF-8; save the file in UTF-8"),
        (b"a: 1\nb: \x00\n", ", line 2: U+0000 is not text; remove it"),
        (b"a: " + b"[" * DEEP, ", line 1: nested more than 50 deep; correct it"),
        (b"a: [1, 2\nb: 3\n", ", line 2: expected ',' or ']', but got ':'; correct it"),
        (b"a: *b\n", ", line 1: found undefined alias 'b'; correct it"),
        (b"? [a, b]\n: 1\n", ", line 1: a key is not a single word; correct it"),
        (b"a: !!python/object/apply:os.system [ls]\n", ", line 1: the tag tag:yaml.org,2002:python/object/apply:os.sy"),
        (b"a: 1\n---\na: 2\n", ", line 2: but found another document; correct it"),
        (b"a: " + b"1" * 5000, " contains a number with too many digits; shorten it"),
        (b"a: &a\n  b: *a\n", ", line 1: found unconstructable recursive node; correct it"),
        (b"a: &a {x: 1}\nb: {<<: *a}\n", ", line 2: keys cannot be merged by <<, write them out; correct it"),
        (LAUGHS, ", line 5: more than 20000 values; correct it"),
        (b"a: [" + b"1," * 20_000 + b"]", ", line 1: more than 20000 values; correct it"),
        (b"k" * 201 + b"x: 1", ", line 1: a key of more than 200 characters; correct it"),
        (b"#" * (1 << 20) + b"\n", " cannot be read (it has more than 1,048,576 bytes); give another file"),
        (b"a: 1\nb: 1e309\n", ", line 2: 1e309 is too large for a number; correct it"),
        (b"- a\n", " contains no section of names and values; correct it or give another file"),
        (b"", " contains no section of names and values; correct it or give another file"),
    ],
)
def test_a_yaml_file_with_a_mistake_is_refused_by_name_and_line(tmp_path: Path, content: bytes, message: str):
    assert_refused(read_section, tmp_path / "c.yaml", content, message)


def test_an_endless_file_is_refused():
    for read in (read_section, read_json):
        with pytest.raises(ConfigError, match=r"^zero cannot be read .it has more than 1,048,576 bytes"):
            read(Path("/dev/zero"), "zero")


def test_a_string_of_escaped_quotes_without_an_end_is_searched_once(tmp_path: Path):
    content = b'"' + b'\\"' * 400_000
    assert_refused(read_json, tmp_path / "c.json", content, " is not a JSON file: Unterminated string")


def test_an_emoji_may_be_escaped_as_in_json():
    assert (
        parse_yaml('a: "\\ud83d\\ude00!"', "") == {"a": "\N{GRINNING FACE}!"} == json.loads('{"a": "\\ud83d\\ude00!"}')
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' * DEEP, ", line 1: nested more than 50 deep; correct it"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', " has the key c twice; remove one"),
        (b'{"a": \xff}', ", line 1 is not UTF-8; save the file in UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", " is not a JSON file: Exceeds the limit"),
        (b'{"a": [-1e309]}', " has the number -1e309, which is too large; correct it"),
        (b'{"a": 1', " is not a JSON file: Expecting ',' delimiter: line 1"),
        (b"", " is not a JSON file: Expecting value: line 1"),
    ],
)
def test_a_json_file_with_a_mistake_is_refused_by_name(tmp_path: Path, content: bytes, message: str):
    assert_refused(read_json, tmp_path / "c.json", content, message)


@pytest.mark.parametrize(("read", "begin"), [(read_section, b"a: "), (read_json, b"")])
def test_values_may_be_nested_50_deep_and_no_deeper(tmp_path: Path, read: Callable[[Path, str], object], begin: bytes):
    depth = 50 if not begin else 49  # the section of the key is one
    path = tmp_path / "c"
    path.write_bytes(begin + b"[" * depth + b"]" * depth)
    read(path, path.name)
    assert_refused(read, path, begin + b"[" * (depth + 1) + b"]" * (depth + 1), ", line 1: nested more than 50 deep")


def test_only_open_brackets_outside_of_texts_count_as_nested(tmp_path: Path):
    path = tmp_path / "c.json"
    value = [["[", "{", '\\"[', "\n["], {"a": {}}, "a"] * 60
    path.write_text(json.dumps(value))
    assert read_json(path, path.name) == value
    for begin, end, siblings in ("[", "]", "[], []"), ('{"a": ', "}", "{}, {}"):
        below, too_deep = (f"[{siblings}, {begin * depth}1{end * depth}]" for depth in (49, 50))
        path.write_text(below)
        assert read_json(path, path.name) == json.loads(below)
        assert_refused(read_json, path, too_deep.encode(), ", line 1: nested more than 50 deep")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.yaml", "No such file or directory"),
        (".", "Is a directory"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, reason: str):
    with pytest.raises(ConfigError, match=rf"^it cannot be read \({reason}\); give another file$"):
        read_section(tmp_path / name, "it")


def test_scalars_are_what_they_seem_to_be():
    values = {
        "1": 1, "-1_000": -1000, "1e3": 1000.0, "1.": 1.0, ".5": 0.5, "-.inf": -float("inf"), "true": True,
        "null": None,
        "010": "010", "0x10": "0x10", "1:30": "1:30", "yes": "yes", "off": "off", "2024-01-01": "2024-01-01", "": None,
        "1_": "1_", "'1'": "1", "[1, a]": [1, "a"],
    }  # fmt: skip
    assert {text: parse_yaml(text, "") for text in values} == values


def test_what_is_written_is_read_as_the_same_value():
    texts = ["3e-4", "1e5", "1_0", "-7", "08", "0x1F", "1:30", "yes", "null", "~", "", ".5", ".inf", "<<", "a: b", "#a"]
    for value in (*texts, 3e-4, 1e20, math.inf, -7, True, None, ["3e-4", 3e-4]):
        assert parse_yaml(to_yaml({"name": value}), "text") == {"name": value}


def test_a_section_knows_the_lines_of_its_keys(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("\ufeff# settings\na: 1\nb:\n  c: [1,\n    2]\n  d: x\n")
    section = read_section(path, "c.yaml")
    assert section == {"a": 1, "b": {"c": [1, 2], "d": "x"}}
    assert (section.lines, section["b"].lines) == ({"a": 2, "b": 3}, {"c": 4, "d": 6})
