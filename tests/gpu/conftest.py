"""Tests in this folder carry `pytestmark = pytest.mark.gpu` and run with `scripts/test.sh -m gpu -n 0 tests/gpu`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    return torch.device("cuda", torch.cuda.current_device())
