"""The closed forms of activations and of the largest models, against the paper's sentences and its Table 2."""

import csv
from pathlib import Path

import pytest

from lab.paper.tables import largest_model
from zero.activations.choice import partition_volume
from zero.partition.stage import STAGES

PAPER = Path(__file__).resolve().parents[4] / "docs/paper"
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


FP16_BYTES = 2


def transformer_parameters(h: int, L: int) -> float:
    """Return 12 L h^2, without embeddings (section 3.1)."""
    return 12 * L * h**2


def activation_bytes(b: int, s: int, h: int, L: int) -> float:
    """Return the bytes of about 12 h b s L elements, if all are kept (section 3.2, footnote 3)."""
    return 12 * FP16_BYTES * b * s * h * L


def checkpoint_bytes(b: int, s: int, h: int, L: int, k: int = 1, N_m: int = 1) -> float:
    """Return the bytes of one input of every k layers, of which each rank keeps 1/N_m with P_a (sections 3.2, 6.1)."""
    return FP16_BYTES * partition_volume(b, s, h, L, k) / N_m


def fused_buffer_bytes(num_parameters: float) -> float:
    """Return the bytes of all gradients in one fp32 buffer, which C_B replaces by a constant (section 3.2)."""
    return 4 * num_parameters


def test_the_sentences_of_section_3():
    assert transformer_parameters(1600, 48) == pytest.approx(1.5e9, rel=0.02)
    assert activation_bytes(32, 1024, 1600, 48) == pytest.approx(60e9, rel=0.02)
    assert checkpoint_bytes(32, 1024, 1600, 48) == pytest.approx(60e9 / 12, rel=0.02)
    assert fused_buffer_bytes(1.5e9) == 6e9


def test_the_sentences_of_section_6():
    """100B, batch 32, 16 model-parallel ranks: 33 GB of checkpoints every two layers, about 2 GB with P_a."""
    assert checkpoint_bytes(32, 1024, 8192, 125, k=2) == pytest.approx(33e9, rel=0.03)
    assert checkpoint_bytes(32, 1024, 8192, 125, k=2, N_m=16) == pytest.approx(2e9, rel=0.06)
