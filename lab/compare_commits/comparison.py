"""Differences between two runs of one case, in words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

NUMBERS = "loss", "grad_norm", "validation_loss"
MOST_MESSAGES = 3  # that are named, of those which one run has sent more often than the other
EQUAL = "equal"


@dataclass(frozen=True)
class Measured:
    """A run: the records of its steps, hashes of its weights, and what each rank has sent and issued."""

    steps: Sequence[Mapping[str, Any]]
    weights: Mapping[str, str]
    messages: Sequence[Mapping[str, int]]
    operations: Sequence[int | None]  # of one step


@dataclass(frozen=True)
class Refused:
    """A run that has failed, with the line that says why."""

    line: str


@dataclass(frozen=True)
class Row:
    """The line of a case in the table."""

    case: str
    bits: str
    messages: str = ""
    operations: str = ""

    @property
    def is_equal(self) -> bool:
        return self.bits == EQUAL and self.messages.startswith(EQUAL)

    def cells(self) -> tuple[str, str, str, str]:
        return self.case, self.bits, self.messages, self.operations


def compare(case: str, before: Measured | Refused, after: Measured | Refused) -> Row:
    refusals = {name: run.line for name, run in (("BEFORE", before), ("AFTER", after)) if isinstance(run, Refused)}
    if isinstance(before, Refused) or isinstance(after, Refused):
        return Row(case, "; ".join(f"refused by {name}: {line}" for name, line in refusals.items()))
    return Row(case, bits(before, after), messages(before.messages, after.messages), operations(before, after))


def bits(before: Measured, after: Measured) -> str:
    """Return the first difference of a number in metrics.jsonl, then of the weights; `EQUAL` if there is none."""
    missing: Mapping[str, Any] = {}
    for old, new in zip_longest(before.steps, after.steps, fillvalue=missing):
        for name in NUMBERS:
            was, now = old.get(name), new.get(name)
            if was != now:
                by = f" ({now - was:+.1e})" if was is not None and now is not None else ""
                return f"step {old.get('step', new.get('step'))}: {name} {was}, now {now}{by}"
    weights = before.weights.keys() | after.weights.keys()
    others = sorted(name for name in weights if before.weights.get(name) != after.weights.get(name))
    return f"{len(others)} of {len(weights)} weights at the end, such as {others[0]}" if others else EQUAL


def messages(before: Sequence[Mapping[str, int]], after: Sequence[Mapping[str, int]]) -> str:
    """Return what the first rank that differs sends more often and less often; `EQUAL` and the number if none does."""
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        change = Counter(new)
        change.subtract(old)
        changed = [f"{number:+d} {message}" for message, number in sorted(change.items()) if number]
        if changed:
            more = len(changed) - MOST_MESSAGES
            return f"rank {rank}: " + "; ".join(changed[:MOST_MESSAGES]) + (f"; {more} others" if more > 0 else "")
    return f"{EQUAL}: {sum(sum(sent.values()) for sent in after):,}"


def operations(before: Measured, after: Measured) -> str:
    """Return the host operations of a step on the first rank that differs, or on the first one."""
    pairs = list(zip(before.operations, after.operations, strict=True))
    was, now = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    return f"{was}" if was == now else f"{was}, now {now}"
