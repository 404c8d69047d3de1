"""The table of the keys of DeepSpeed's JSON configuration, read from `keys.yaml` beside this file, and their old names.

Each row says which settings the key sets, why it is not needed here, or which of its values are refused and what to do
instead.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpt.deepspeed.key import TYPES, Key, unchanged

TABLE = Path(__file__).with_name("keys.yaml")

CONVERSIONS: dict[str | None, Callable[[Any], Any]] = {
    None: unchanged,
    "size_or_null": lambda size: size if size > 0 else None,
    "limit_or_infinity": lambda norm: norm or math.inf,
    "online_or_disabled": lambda is_on: "online" if is_on else "disabled",
}


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield (dotted name, key) of every row of a section; several names may share a row."""
    for names, row in section.items():
        for name in names.split(", "):
            if isinstance(row.get("type"), str):  # a section may have a key of this name, which is a row
                yield prefix + name, _key(row)
            else:
                yield from _flatten(row, f"{prefix}{name}.")


def _key(row: Mapping[str, Any]) -> Key:
    note, accepted = row.get("needless", row.get("note", "")), row.get("accepted")
    settings = (row["sets"],) if "sets" in row else tuple(row.get("read_for", ()))
    if not settings and "refusal" in row:
        note, accepted = "is off", accepted or ()
    convert = CONVERSIONS[row.get("convert")] if "sets" in row else None
    return Key(TYPES[row["type"]], settings, convert, note, accepted, row.get("refusal", ""))


KEYS = dict(_flatten(yaml.safe_load(TABLE.read_text())))

# Sections in which only `enabled` is read.
ONLY_ENABLED_IS_READ = {name for name, key in KEYS.items() if key.type is TYPES["any"]}


def _cpu_or_none(is_offloaded: bool) -> str:
    return "cpu" if is_offloaded else "none"


# Names in other versions of DeepSpeed: {other name: (current name, conversion of the value)}.
OTHER_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zero_optimization": ("zero_optimization.stage", int),  # true, false
    "allgather_size": ("zero_optimization.allgather_bucket_size", unchanged),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", _cpu_or_none),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", _cpu_or_none),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param.device", _cpu_or_none),
    "zero_optimization.cpu_offload_use_pin_memory": ("zero_optimization.offload_optimizer.pin_memory", unchanged),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        unchanged,
    ),
    **{name.replace("stage3_", ""): (name, unchanged) for name in KEYS if name.startswith("zero_optimization.stage3_")},
    **{name.replace("bf16.", "bfloat16.", 1): (name, unchanged) for name in KEYS if name.startswith("bf16.")},
    "fp32_allreduce": ("communication_data_type", lambda is_fp32: "fp32" if is_fp32 else None),
    "optimizer.params.max_grad_norm": ("gradient_clipping", unchanged),
}
