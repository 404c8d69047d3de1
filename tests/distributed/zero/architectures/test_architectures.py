"""Every architecture of transformers that can be built small trains in stage 3 as in one process.

Run one of them with `scripts/test.sh -m full -k "[llama]"`.
"""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.distributed.zero.architectures.outcomes import NOT_BUILT
from tests.distributed.zero.architectures.two_ranks import compare, why_not_built
from tests.ranks import run_ranks

# float64: see ADAM in two_ranks.py for how rounding errors of 1e-16 grow.
TOLERANCE = 1e-10
TRAINED = [name for name in CONFIG_MAPPING_NAMES if name not in NOT_BUILT]


@pytest.mark.full
@pytest.mark.parametrize("model_type", TRAINED)
def test_stage_3_trains_as_one_process(model_type):
    differences, num_trained = run_ranks(2, compare, model_type)[0]
    assert num_trained > 0
    assert {name: difference for name, difference in differences.items() if not difference < TOLERANCE} == {}


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(NOT_BUILT))
def test_an_architecture_that_is_left_out_cannot_be_built(model_type):
    assert run_ranks(1, why_not_built, model_type, init_process_group=False) != [None]


def test_the_tables_of_outcomes_name_model_types():
    assert set(CONFIG_MAPPING_NAMES) >= NOT_BUILT
    assert len(TRAINED) >= 120
