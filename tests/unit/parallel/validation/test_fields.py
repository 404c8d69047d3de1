"""Types and ranges of fields: what is accepted, what is refused, and how it is explained."""

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest

from parallel.validation.errors import ConfigError, exit_on_config_error
from parallel.validation.fields import NonNegative, PathLength, Positive, Range, checked, shown


@checked
class Tree:
    """Fields of all types that settings have."""

    steps: Positive = 1
    offset: int = 0
    lr: Annotated[float, Range(0, 1)] = 0.5
    clip: Annotated[float, Range(above=0, allows_inf=True)] = 1.0
    beta: Annotated[float, Range(0, below=1)] = 0.9
    limit: Positive | None = None
    numel: Positive | Literal["auto"] | None = "auto"
    decay: Literal["cosine", "linear"] = "cosine"
    overlap: bool = True
    folder: str = "runs"
    path: str | list[str] = "a"
    split: tuple[float, float] = (0.5, 0.5)
    ranks: tuple[NonNegative, ...] = (0,)
    ratio: float = 0.0
    mode: Literal[True, "auto", 2] = "auto"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "Tree.steps=0 is below 1; choose an integer of 1 or more"),
        ({"steps": 5.0}, "Tree.steps=5.0 is a number with a decimal point; choose an integer of 1 or more"),
        ({"steps": True}, "Tree.steps=true is true or false; choose an integer of 1 or more"),
        ({"steps": 10**5000}, "Tree.steps=2**16609... is above 9223372036854775807; choose an integer of 1 or more"),
        ({"offset": -(2**63)}, "Tree.offset=-9223372036854775808 is below -9223372036854775807; choose an integer"),
        ({"steps": {"a": 1}}, "Tree.steps={'a': 1} is a section; choose an integer"),
        ({"ratio": -1.1e30}, "Tree.ratio=-1.1e+30 is below -1e+30; choose a number"),
        ({"mode": 1}, "Tree.mode=1 is unknown; choose true, auto or 2"),
        ({"mode": 2.0}, "Tree.mode=2.0 is a number with a decimal point; choose true, auto or 2"),
        ({"lr": math.nan}, "Tree.lr=.nan is not a number; choose a number from 0 to 1"),
        ({"lr": "fast"}, "Tree.lr=fast is a text; choose a number from 0 to 1"),
        ({"clip": 0}, "Tree.clip=0 is not above 0; choose a number above 0, or .inf"),
        ({"clip": 1e31}, "Tree.clip=1e+31 is above 1e+30; choose a number above 0, or .inf"),
        ({"beta": 1}, "Tree.beta=1 is not below 1; choose a number of 0 or more and below 1"),
        ({"numel": "all"}, "Tree.numel=all is unknown; choose an integer of 1 or more, auto or null"),
        ({"decay": "wsd"}, "Tree.decay=wsd is unknown; choose cosine or linear"),
        ({"overlap": 1}, "Tree.overlap=1 is an integer; choose true or false"),
        ({"folder": ""}, "Tree.folder= is empty; choose a text"),
        ({"folder": "a\0b"}, "Tree.folder='a\\x00b' has a character that is not text; choose a text"),
        ({"path": ["a", 5]}, "Tree.path=['a', 5] contains 5, an integer; choose a text or a list, each element a text"),
        ({"split": [1]}, "Tree.split=[1] has 1 elements, not 2; choose a list of 2, each a number"),
        ({"split": (1, math.nan)}, "Tree.split=[1, nan] contains .nan, which is not a number; choose a list of 2"),
        ({"ranks": [-1]}, "Tree.ranks=[-1] contains -1, which is below 0; choose a list, each element an integer"),
        ({"folder": ["x" * 10**6]}, "Tree.folder=['xxxxxxxxxxxx...xxxxxxxxxxxxx'] is a list; choose a text"),
    ],
)
def test_a_value_that_does_not_suit_its_field_is_refused_in_one_line(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as raised:
        Tree(**values)
    assert str(raised.value).startswith(message)
    assert str(raised.value).isprintable()


def test_values_get_the_types_of_their_fields():
    tree = Tree(lr=1, clip=math.inf, split=[1, 0.5], ranks=[3], path=["a"], limit=2**63 - 1)
    assert tree == Tree(lr=1.0, clip=math.inf, split=(1.0, 0.5), ranks=(3,), path=["a"], limit=2**63 - 1)
    assert [type(value) for value in (tree.lr, *tree.split)] == [float] * 3
    assert replace(tree, numel=None).numel is None
    for limit in (1e30, -1e30):
        assert Tree(ratio=limit).ratio == limit
    assert Tree(offset=-(2**63) + 1).offset == -(2**63) + 1
    assert (Tree(mode=True).mode, Tree(mode=2).mode, Tree(path=[]).path) == (True, 2, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10**59, "1" + "0" * 59),
        (10**60, "2**199..."),
        (-(10**60), "-2**199..."),
        (1e6, "1e+06"),
        (999999.0, "999999.0"),
        (1234567.0, "1234567.0"),
        (math.inf, ".inf"),
        (-math.inf, "-.inf"),
        (math.nan, ".nan"),
        ("a  b", "a b"),
        ("a\tb", "'a\\tb'"),
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 57 + "..."),
    ],
)
def test_a_value_is_shown_as_in_yaml_in_one_short_line(value: object, expected: str):
    assert shown(value) == expected


@pytest.mark.parametrize(
    ("path", "is_accepted"),
    [
        ("a" * 255, True),
        ("a" * 256, False),
        (f"runs/{'é' * 127}", True),
        (f"runs/{'é' * 128}/a", False),
        ("12345678/" * 333 + "abc", True),
        ("12345678/" * 333 + "abcd", False),
    ],
)
def test_a_path_has_names_and_a_length_that_the_system_takes(path: str, is_accepted: bool):
    expected = None if is_accepted else "is longer than 3000 bytes, or has a name of more than 255"
    assert PathLength().problem(path) == expected


def test_a_printed_error_has_no_characters_that_control_a_terminal(capsys):
    with pytest.raises(SystemExit) as ended, exit_on_config_error():
        raise ConfigError("a\x1b[2Jb\x07c\u202ed\udc80é 日本\tz\r")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a\\x1b[2Jb\\x07c\\u202ed\\udc80é 日本\tz\\r\n"
