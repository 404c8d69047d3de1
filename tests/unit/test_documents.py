"""The commands in the documents: they parse, and what they name exists."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from gpt.settings.parser import GROUPS, LEAVES, parse_settings
from tests.documents import PAGES, blocks, inline_commands
from tests.source_files import ROOT

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [(block.page, command) for block in BLOCKS if block.language == "bash" for command in block.commands()] + [
    (page.name, command) for page in PAGES for command in inline_commands(page)
]
PROGRAMS = r"pretrain_gpt\.py|quickstart\.sh|launch/(torchrun\.sh|hostfile\.sh|slurm\.sbatch)"
# The programs whose arguments are settings, to the end of the line or of the array.
TAKES_SETTINGS = re.compile(rf"({PROGRAMS})([^)]*)")
OPTION = re.compile(r"--([a-z_]+\.[a-z_.]+)")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"runs"}


def test_every_block_of_bash_parses():
    for block in BLOCKS:
        if block.language == "bash":
            ended = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert ended.stderr == "", f"{block.page}, line {block.line}"


def test_every_block_with_commands_says_that_it_is_bash():
    begins = re.compile(r"^(\w+=\S+ )*(python3? |torchrun |bash |srun |sbatch |pip |scripts/\S+\.sh)", re.MULTILINE)
    found = [(block.page, block.line) for block in BLOCKS if block.language != "bash" and begins.search(block.text)]
    assert not found


def test_the_files_modules_and_settings_of_each_command_exist():
    missing = [
        (page, name) for page, command in COMMANDS for name in missing_names(shlex.split(command, comments=True))
    ]
    assert not missing


def missing_names(words: list[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        path = word.partition("=")[2] if word.startswith("--") else word
        names_a_file = path.partition("/")[0] in FOLDERS or re.fullmatch(r"\w+_gpt\.py|\w+\.md", path)
        if names_a_file and not list(ROOT.glob(path + "*")):  # what is written may get an ending
            yield path
        if word == "-m" and words[0] in ("python", "torchrun") and not find_spec(following):
            yield following
        option = OPTION.fullmatch(word.partition("=")[0])
        if option and option[1] not in LEAVES and option[1] not in GROUPS:
            yield option[1]


def test_the_settings_of_each_command_are_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for _, command in COMMANDS:
        found = TAKES_SETTINGS.search(command.partition(" # ")[0])
        if found and "--config" in found[3]:
            parse_settings(shlex.split(found[3]), num_ranks=2)
