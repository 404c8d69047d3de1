"""The closed forms of activations and of the largest models, against the paper's sentences and its Table 2."""

import csv

import pytest

from lab.paper.memory import largest_model
from tests.source_files import ROOT
from zero.activations.choice import partition_volume
from zero.core.partition.stage import STAGES

PAPER = ROOT / "docs/paper"
COLUMNS = {"baseline_B_paper": 0, "Pos_B_paper": 1, "Posg_B_paper": 2, "Posgp_B_paper": 3}


def table_2() -> list[tuple[int, int, int, str]]:
    """Return (model-parallel degree, data-parallel degree, stage, printed billions) of the 20 theoretical cells."""
    with (PAPER / "table2_max_model_billion.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(int(row["mp"]), int(row["dp"]), stage, row[name]) for row in rows for name, stage in COLUMNS.items()]
    assert len(found) == 20
    return found


@pytest.mark.parametrize(("mp", "dp", "stage", "printed"), table_2())
def test_table_2(mp: int, dp: int, stage: int, printed: str):
    """The paper rounds the first row, to a tenth, and multiplies it; it calls 512 billion half a trillion."""
    first_row = round(largest_model(STAGES[stage], 32e9, dp) / 1e9, 1)
    found = largest_model(STAGES[stage], 32e9, dp, mp) / 1e9
    assert found == pytest.approx(mp * first_row, rel=0.01)
    if printed.endswith("T"):
        assert round(found / 1024, 1) == float(printed.removesuffix("T"))
    else:
        assert mp * first_row == pytest.approx(float(printed))


def checkpoint_bytes(b: int, s: int, h: int, L: int, k: int = 1, N_m: int = 1) -> float:
    """Return the bytes of one input in fp16 of every k layers, of which each rank keeps 1/N_m with P_a."""
    return 2 * partition_volume(b, s, h, L, k) / N_m


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ((32, 1024, 1600, 48), 60e9 / 12),  # section 3.2: a twelfth of about 60 GB of activations
        ((32, 1024, 8192, 125, 2), 33e9),  # section 6.1: 100B, batch 32, a checkpoint every two layers
        ((32, 1024, 8192, 125, 2, 16), 2e9),  # with P_a on 16 model-parallel ranks
    ],
)
def test_the_bytes_of_checkpoints_are_those_of_sections_3_and_6(arguments: tuple[int, ...], printed: float):
    assert checkpoint_bytes(*arguments) == pytest.approx(printed, rel=0.06)
