"""The hidden folder in which a corpus is prepared."""

from pathlib import Path

from data.staging import staging_folder


def test_nothing_is_written_through_a_link_that_has_the_name_of_the_staging_folder(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / ".corpus.unfinished").symlink_to(tmp_path / "disk")
    with staging_folder(tmp_path / "corpus", "plan") as (folder, _):
        (folder / "corpus.bin").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["disk"]
