"""The size of checkpoints of the paper's models, computed from shapes alone, without memory or ranks.

python -m lab.bench.checkpoint_size
"""

import json
from dataclasses import dataclass

import torch

from gpt.model.transformer import GPT
from gpt.shape.config import ModelConfig
from parallel.comm_log import CommLog
from parallel.mesh import Axis
from parallel.tensor.layers import split_dims
from parallel.tensor.token_layout import ReplicatedTokens
from zero.partition.layout import Layout
from zero.state.description import describe_layout
from zero.state.layout_file import with_seals
from zero.state.sealed_file import Seal
from zero.units.unit import assign_parameters, find_units

ADAM_TENSORS = 4  # for each piece of a parameter: weights, both moments and the step
BUCKET_NUMEL = 2**25


@dataclass(frozen=True)
class Case:
    name: str
    config: ModelConfig
    tensor_size: int
    num_ranks: int


CASES = [
    Case("170B, 212 x 8192, 16 x 25 ranks", ModelConfig(212, 8192, 64, 1024, 50257), 16, 400),
    Case("1T, 128 x 25600, 16 x 64 ranks", ModelConfig(128, 25600, 160, 1024, 50257), 16, 1024),
]


@dataclass(frozen=True)
class CheckpointSize:
    num_files: int
    layout_bytes: int
    num_tensors_a_file: int
    bytes_a_file: int


def measure(case: Case, *, is_by_unit: bool) -> CheckpointSize:
    """Compute the size of a checkpoint.

    If `is_by_unit`, every block has a flat buffer, as with partitioned parameters; otherwise the model has one.
    """
    with torch.device("meta"):
        axis = Axis("tensor", case.tensor_size, 0, CommLog())
        model = GPT(case.config, ReplicatedTokens(axis))
    shards = case.num_ranks // case.tensor_size
    units = assign_parameters(model, find_units(model) if is_by_unit else [""])
    layouts = [
        Layout.of({name: param.shape for name, param in params.items()}, shards, BUCKET_NUMEL)
        for params in units.values()
    ]
    description = {"split_dims": split_dims(model), "buffers": [describe_layout(layout) for layout in layouts]}
    num_pieces = max(
        sum(len(list(layout.spans_in(bucket.shard(rank)))) for layout in layouts for bucket in layout.buckets)
        for rank in (0, shards // 2, shards - 1)
    )
    owned_numel = sum(layout.numel for layout in layouts) // shards
    content = with_seals(description, [Seal("0" * 8, 12 * owned_numel)] * case.num_ranks)
    return CheckpointSize(
        case.num_ranks + 1, len(json.dumps(content, indent=1)), ADAM_TENSORS * num_pieces, 12 * owned_numel
    )


def main() -> None:
    print("| model | buffers | files | layout.json | tensors in a rank's file | a rank's file |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        for is_by_unit in (False, True):
            size = measure(case, is_by_unit=is_by_unit)
            print(
                f"| {case.name} | {'by block' if is_by_unit else 'one'} | {size.num_files:,} | "
                f"{size.layout_bytes / 1e3:,.0f} kB | {size.num_tensors_a_file:,} | {size.bytes_a_file / 1e9:.1f} GB |"
            )


if __name__ == "__main__":
    main()
