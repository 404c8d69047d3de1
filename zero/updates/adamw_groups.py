"""Groups with update="adamw" of zero's optimizers, which a list of optimizers has replaced."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parallel.validation.errors import ConfigError
from zero.core.step.given import Given
from zero.core.step.parameter_groups import Groups
from zero.updates.cautious_adamw import CautiousAdamW
from zero.updates.skippable import SkippableOptimizer

OF_ADAMW = {"betas", "eps", "fused", "amsgrad", "maximize"}
OF_BOTH = {"lr", "weight_decay", "cautious_decay"}


def without_adamw_groups(given: Given) -> Iterator[Given]:
    """Iterate over optimizers in place of one whose groups may have update="adamw"; each group keeps its number.

    Raises ConfigError for another value of `update`.
    """
    kind = given.optimizer_class
    if not (isinstance(kind, type) and issubclass(kind, SkippableOptimizer)) or given.instance is not None:
        yield given  # what it calls `update` is its own affair
        return
    of_adamw = []
    for number, group in zip(given.numbers, given.groups, strict=True):
        update = group.get("update", kind.__name__)
        if update != "adamw" and str(update).replace("_", "").lower() != kind.__name__.lower():
            raise ConfigError(f"a group has update={update!r}; choose 'adamw', or leave it out")
        of_adamw += [number] if update == "adamw" else []
    warnings.warn(
        'update="adamw" in a group is deprecated; give two optimizers: ZeroOptimizer(model, '
        f"[{kind.__name__}(matrices, ...), CautiousAdamW(rest, ...)])",
        FutureWarning,
        stacklevel=4,  # the caller of `ZeroOptimizer`
    )
    own = [number for number in given.numbers if number not in of_adamw]
    own_settings = {k: v for k, v in given.settings.items() if k not in OF_ADAMW or k in kind.own_defaults}
    of_method = given.settings.keys() - OF_ADAMW - OF_BOTH
    if not own:
        of_method &= kind.own_defaults.keys()  # AdamW refuses the others
    adam_settings = {k: v for k, v in given.settings.items() if k not in of_method}
    if own:
        yield replace(given, settings=own_settings, groups=_of(given, own), numbers=own)
    if of_adamw:
        yield Given(CautiousAdamW, adam_settings, _of(given, of_adamw), of_adamw)


def _of(given: Given, numbers: Sequence[int]) -> Groups:
    return [{key: value for key, value in given.groups[number].items() if key != "update"} for number in numbers]
