"""The command that compares corpora with their checksums."""

from pathlib import Path

import pytest

from data.check import check_corpus, main
from data.prepare import main as prepare


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("one two three " * 9)
    prefix = str(tmp_path / "corpus")
    prepare(["--source", str(tmp_path / "a.txt"), "--output", prefix, "--train_vocab_size", "257", "--workers", "1"])
    return prefix


def test_a_corpus_is_described_with_the_files_that_were_compared(corpus: str, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    main([corpus])
    line = f"{corpus}: 1 sequences, 127 tokens; equal to their checksums: .bin .idx .tokenizer.json"
    assert capsys.readouterr().out == f"{line}\n"


def test_a_corpus_without_checksums_says_so(counting_corpus: str):
    assert check_corpus(counting_corpus).endswith("equal to their checksums: none are recorded")


def test_the_first_damaged_corpus_ends_the_command_with_one_line(corpus: str, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    file = Path(f"{corpus}.bin")
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main([corpus, corpus])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("data.check: ")
    assert f"{file} is damaged" in printed.err
    assert printed.err.count("\n") == 1
