"""Files that a program has damaged and sealed again: each way in which they can be impossible is named."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.validation.errors import ConfigError
from tests.unit.gpt.checkpoint.runs import change_header
from zero.checkpoint.layout_file import DESCRIPTION, check_description, describe_layout, layout_of
from zero.checkpoint.schema import check, parse_json
from zero.checkpoint.tensor_file import MAX_DIMS, TensorFile, write_tensors

GOOD = {
    "data_size": 2,
    "tensor_size": 1,
    "split_dims": {"a": 1},
    "buffers": [
        {"numel": 24, "bucket_numel": 12, "num_shards": 2, "spans": {"a": [[2, 3], 0], "b": [[8], 10]}},
        {"numel": 8, "bucket_numel": 8, "num_shards": 2, "spans": {"c": [[], 7]}},
    ],
}
FILE_BYTES = [400, 300]


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the good description with one other value."""
    description = copy.deepcopy(GOOD)
    place: Any = description
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return description


def test_a_good_description_is_that_of_its_layout():
    check(GOOD, DESCRIPTION, "layout.json")
    check_description(GOOD, FILE_BYTES, "layout.json")
    for buffer in GOOD["buffers"]:
        assert describe_layout(layout_of(buffer)) == buffer


def test_a_buffer_may_fill_its_files():
    """The sizes at which the checks are about to refuse."""
    check_description(GOOD, [100, 0], "layout.json")
    full = changed(("buffers", 0), GOOD["buffers"][0] | {"numel": 692, "bucket_numel": 346})
    check_description(full, FILE_BYTES, "layout.json")
    check_description(changed(("buffers", 0, "spans"), {"a": [[4, 6], 0]}), FILE_BYTES, "layout.json")
    check_description(changed(("buffers", 0, "spans"), {"a": [[1] * MAX_DIMS, 0]}), FILE_BYTES, "layout.json")


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("data_size",), 3, "it names 2 files, its 3 ranks wrote as many"),
        (("buffers", 0, "numel"), 1000, "its buffers have 1008 elements, its files 700 bytes"),
        (("buffers", 0, "num_shards"), 3, "in buffer 0, 3 shards are more than the 2 data-parallel ranks"),
        (("buffers", 0, "bucket_numel"), 0, "in buffer 0, 24 elements in buckets of 0 cannot be cut into 2 equal"),
        (("buffers", 0, "bucket_numel"), 26, "in buffer 0, 24 elements in buckets of 26 cannot be cut into 2 equal"),
        (("buffers", 0, "bucket_numel"), 11, "in buffer 0, 24 elements in buckets of 11 cannot be cut into 2 equal"),
        (("buffers", 1, "numel"), 9, "in buffer 1, 9 elements in buckets of 8 cannot be cut into 2 equal"),
        (("buffers", 0, "bucket_numel"), 2, "in buffer 0, 12 buckets do not fit into a file of 400 bytes"),
        (("buffers", 0, "spans", "b"), [[1] * (MAX_DIMS + 1), 10], f"a parameter has more than {MAX_DIMS} dims"),
        (("buffers", 0, "spans", "b"), [[8], 5], "'b' begins at 5, before the parameter before it ends at 6"),
        (("buffers", 0, "spans", "b"), [[15], 10], "'the end' begins at 24, before the parameter before it ends at 25"),
        (("buffers", 1, "spans"), {"a": [[1], 0]}, "two buffers have a parameter of the same name"),
        (("split_dims",), {"a": 2}, "'a' has no dim 2 to be split along"),
        (("split_dims",), {"d": 0}, "'d' has no dim 0 to be split along"),
    ],
)
def test_an_impossible_description_is_refused_with_the_reason(path: tuple[Any, ...], value: Any, problem: str):
    description = changed(path, value)
    check(description, DESCRIPTION, "layout.json")
    with pytest.raises(ConfigError, match=rf"^layout.json is damaged: .*{problem}"):
        check_description(description, FILE_BYTES, "layout.json")


@pytest.mark.parametrize(
    ("text", "schema", "problem"),
    [
        ("{", {}, "it is not JSON ("),
        ("[" * 100_000, [], "it is not JSON ("),
        ('{"a": {}}', {"a": {"b": int}}, "a.b is missing"),
        ('{"a": {"b": true}}', {"a": {"b": int}}, "a.b is True, a value of type int is needed"),
        ('{"a": [1, -1]}', {"a": [range(3)]}, "a[1] is -1, an integer from 0 to 2 is needed"),
        ('{"a": [1, 3]}', {str: [range(3)]}, "a[1] is 3, an integer from 0 to 2 is needed"),
        ("[1]", {str: int}, "the content is [1], an object is needed"),
        ("{}", [int], "the content is {}, a list is needed"),
        ("[1]", (int, int), "the content is [1], a list of 2 is needed"),
        ('[1, "a"]', (int, int), "[1] is 'a', a value of type int is needed"),
        ("[]", {"a", "b"}, "the content is [], one of a, b is needed"),
        ('"c"', {"a", "b"}, "the content is 'c', one of a, b is needed"),
        ("NaN", float, "the content is nan, a finite number is needed"),
        ("1" + "0" * 400, float, "a finite number is needed"),
        ('"1"', float, "the content is '1', a finite number is needed"),
        (f'"{"x" * 100}"', int, f"the content is '{'x' * 59}..., a value of type int is needed"),
        (f'"{"x" * 58}"', int, f"the content is '{'x' * 58}', a value of type int is needed"),
    ],
)
def test_json_that_does_not_fit_is_refused_with_the_place_and_the_need(text: str, schema: Any, problem: str):
    with pytest.raises(ConfigError) as refused:
        parse_json(text.encode(), schema, "file.json")
    assert str(refused.value).startswith("file.json is damaged: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "F31"}, r"b.dtype is 'F31', one of .*F32.* is needed"),
        ({"shape": [2.0]}, r"b.shape\[0\] is 2.0, an integer from 0 to \d+ is needed"),
        ({"shape": [2**63]}, r"b.shape\[0\] is 9223372036854775808, an integer from 0 to 9223372036854775807 is"),
        ({"shape": [1] * (MAX_DIMS + 1)}, "'b' has the shape"),
        ({"shape": [0, 2**62]}, r"'b' has the shape \[0, 4611686018427387904\]"),
        ({"shape": [3]}, "'b' has the offsets 12 and 20, and its 12 bytes begin at 12"),
        ({"data_offsets": [11, 19]}, "'b' has the offsets 11 and 19, and its 8 bytes begin at 12"),
        ({"data_offsets": [12]}, r"b.data_offsets is \[12\], a list of 2 is needed"),
        ({"data_offsets": [12, 24], "shape": [3]}, r"it has \d+ bytes, its tensors end at \d+"),
    ],
)
def test_a_header_that_is_impossible_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], problem: str):
    file = tmp_path / "tensors"
    write_tensors(file, {"a": torch.zeros(3), "b": torch.zeros(2)})
    assert TensorFile(file).tensor("b").shape == (2,)
    change_header(file, lambda header: header["b"].update(shape=[1, 2, 1]))
    assert TensorFile(file).tensor("b").shape == (1, 2, 1)
    change_header(file, lambda header: header["b"].update({"shape": [2]} | changes))
    with pytest.raises(ConfigError, match=rf"tensors is damaged: .*{problem}"):
        TensorFile(file)


@pytest.mark.parametrize("num_bytes", [0, 2**62, 2**64 - 1])
def test_a_length_of_the_header_that_is_impossible_is_refused(tmp_path: Path, num_bytes: int):
    file = tmp_path / "tensors"
    write_tensors(file, {"a": torch.zeros(3)})
    content = file.read_bytes()
    file.write_bytes(num_bytes.to_bytes(8, "little") + content[8:])
    expected = f"its header would have {num_bytes} of its {len(content)} bytes"
    with pytest.raises(ConfigError, match=rf"tensors is damaged: {expected}"):
        TensorFile(file)


def test_a_file_that_becomes_shorter_while_it_is_read_is_damaged(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.arange(1000.0)}, {})
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 400)
    with pytest.raises(ConfigError, match=r"a\.safetensors is damaged: it is 400 bytes too short"):
        file.load("x", torch.empty(1000))
