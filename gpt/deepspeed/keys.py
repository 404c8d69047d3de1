"""The table of the keys of DeepSpeed's JSON configuration, read from `keys.yaml` beside this file, and their old names.

Each row says which settings the key sets, why it is not needed here, or which of its values are refused and what to do
instead.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TABLE = Path(__file__).with_name("keys.yaml")
LARGEST = 1e300  # larger numbers overflow in the products of the rules; NaN is not below it


def unchanged(value: Any) -> Any:
    """Return the value itself."""
    return value


class ValueType(NamedTuple):
    """The type of a key's value: its description in error messages, the values that have it, and their conversion."""

    description: str
    has: Callable[[Any], bool]
    convert: Callable[[Any], Any] = unchanged


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST


def _is_integer(value: Any, least: float = -LARGEST) -> bool:
    return _is_number(value) and value == int(value) >= least  # may be written as 5e8, as is usual in such files


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


TYPES = {
    "bool": ValueType("true or false", lambda value: isinstance(value, bool)),
    "integer": ValueType("an integer", _is_integer, int),
    "count": ValueType("an integer of 0 or more", lambda value: _is_integer(value, 0), int),
    "positive": ValueType("an integer of 1 or more", lambda value: _is_integer(value, 1), int),
    "number": ValueType("a number", _is_number),
    "pair": ValueType("a list of two numbers", _is_pair),
    "text": ValueType("a string", lambda value: isinstance(value, str)),
    "any": ValueType("anything", lambda value: True),
}


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's configuration, and what it means for this project.

    A key with `settings` and `convert` sets one setting to the converted value. A key with `settings` but without
    `convert` is read by a rule that combines several keys (`gpt/deepspeed/rules.py`). A key without `settings` is
    accepted and changes nothing. `note` is printed beside the key in the table of a file's keys. Values that are not in
    `accepted` are refused, with the reason and the remedy in `refusal`; None accepts every value of the type.
    """

    type: ValueType
    settings: tuple[str, ...]
    convert: Callable[[Any], Any] | None
    note: str
    accepted: Sequence[Any] | None
    refusal: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Key":
        """Return the key that a row of the table describes."""
        note, accepted = row.get("needless", row.get("note", "")), row.get("accepted")
        settings = (row["sets"],) if "sets" in row else tuple(row.get("read_for", ()))
        if not settings and "refusal" in row:
            note, accepted = "is off", accepted or ()
        convert = CONVERSIONS[row.get("convert")] if "sets" in row else None
        return cls(TYPES[row["type"]], settings, convert, note, accepted, row.get("refusal", ""))

    def reason_for_refusal(self, value: Any) -> str:
        """Return why the value is refused and what to do instead, or an empty string if it is accepted."""
        if not self.type.has(value):
            return f"is not {self.type.description}"
        is_off = not value or (isinstance(value, dict) and value.get("enabled") is False)
        is_accepted = self.accepted is None or self.type.convert(value) in self.accepted
        return "" if is_accepted or (is_off and self.type is TYPES["any"]) else self.refusal


def as_text(value: Any) -> str:
    """Return the value as error messages and tables show it: integral numbers without a fraction, the rest as JSON."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


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
                yield prefix + name, Key.of(row)
            else:
                yield from _flatten(row, f"{prefix}{name}.")


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
