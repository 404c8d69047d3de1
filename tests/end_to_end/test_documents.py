"""The Python programs in README and docs, each run as a user would paste it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_files import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = [
    (page.name, number, text)
    for page in PAGES
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
    if "start_world()" in text  # others are excerpts, which tests/distributed/zero/scenarios/test_examples.py runs
]


@pytest.mark.full
@pytest.mark.parametrize(("page", "number", "text"), PROGRAMS, ids=lambda value: str(value)[:20])
def test_a_program_in_the_documents_runs_and_runs_again(page: str, number: int, text: str, tmp_path: Path):
    """The second start resumes, if the program saves."""
    program = tmp_path / "program.py"
    program.write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for num_ranks in (2, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        ended = subprocess.run(
            [*command, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
