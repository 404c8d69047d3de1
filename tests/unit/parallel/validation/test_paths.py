"""Paths of settings, in which ~ and variables stand for what they stand for in a shell."""

import pytest

from parallel.validation.errors import ConfigError
from parallel.validation.fields import FilePath, convert

UNKNOWN = "folder=.* has a user or a variable that is not known; choose a text that is a path"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~/runs", "/home/me/runs"),
        ("$HOME/runs", "/home/me/runs"),
        ("0.5:${HOME}/a~b", "0.5:/home/me/a~b"),
        ("3:~/corpus", "3:/home/me/corpus"),
        ("a$/b", "a$/b"),
        ("~nobody-of-this-name/runs", None),
        ("${NO_VARIABLE}/runs", None),
        ("runs/$NO_VARIABLE", None),
    ],
)
def test_home_and_variables_are_replaced_or_refused(monkeypatch: pytest.MonkeyPatch, path: str, expected: str | None):
    monkeypatch.setenv("HOME", "/home/me")
    if expected is not None:
        assert convert("folder", FilePath, path) == expected
    else:
        with pytest.raises(ConfigError, match=UNKNOWN):
            convert("folder", FilePath, path)
