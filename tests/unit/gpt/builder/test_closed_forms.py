"""The parameters of a tensor rank in closed form, beside a model that is built on the meta device."""

import pytest
import torch

from gpt.builder.closed_forms import coded_parameters_of_rank, parameters_of_rank
from gpt.builder.fp8_blocks import convert_blocks
from gpt.model.transformer import GPT
from gpt.settings.training import Fp8Settings, TrainSettings
from gpt.shape.config import ModelConfig
from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.tensor.token_layout import ReplicatedTokens
from zero.fp8.kernels import Device
from zero.fp8.scaling import scaled_weights

LLAMA = {"positions": "rope", "norm": "rms", "mlp": "swiglu", "mlp_width": 24, "biases": False, "tied_head": False}


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, LLAMA, {"num_kv_heads": 4}, {"num_kv_heads": 2, "qk_norm": True}, LLAMA | {"num_kv_heads": 1, "head_dim": 6}],
    ids=str,
)
def test_a_rank_has_the_parameters_of_a_model_that_is_built(options: dict, tensor_size: int):
    config = ModelConfig(num_layers=3, hidden_size=32, num_heads=8, seq_length=16, vocab_size=300, **options)
    with torch.device("meta"):
        gpt = GPT(config, ReplicatedTokens(Axis("tensor", tensor_size, 0, CommLog())))
    assert parameters_of_rank(config, tensor_size) == sum(param.numel() for param in gpt.parameters())
    train = TrainSettings(matmul="fp8", fp8=Fp8Settings(keep_last=1))
    convert_blocks(gpt, train, Device("cpu"))
    in_fp8 = sum(param.numel() for _, param, _ in scaled_weights(gpt))
    assert coded_parameters_of_rank(config, train, tensor_size) == in_fp8
