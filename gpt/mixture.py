"""The mixture of corpora: the weights of the settings, from where the run of a checkpoint stands in each corpus."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from data.blend import BlendedSamples, Stretch
from gpt.checkpoint.layout import Progress
from gpt.settings.data import ScheduledWeights
from gpt.settings.schedule import consumed_samples_after
from gpt.settings.training import TrainSettings

logger = logging.getLogger(__name__)


def arrange(
    samples: BlendedSamples, schedule: Sequence[ScheduledWeights], train: TrainSettings, progress: Progress
) -> None:
    """Blend the samples from the progress on, with the weights that the schedule gives to each step.

    Where the mixture is another one than that of the progress, each corpus goes on where it stands, which is logged.
    """
    step, consumed = progress.step, progress.consumed_samples
    weights = next((change.weights for change in reversed(schedule) if change.step <= step), samples.weights)
    later = [
        (consumed_samples_after(train, change.step - step, consumed), change.weights)
        for change in schedule
        if step < change.step < train.steps
    ]
    samples.arrange(_first_stretch(samples, weights, progress), later)


def mixture_at(samples: BlendedSamples, sample: int) -> dict[str, Any]:
    """Return what a checkpoint says of the corpora if `sample` is the next one; see `MIXTURE`."""
    stretch = samples.stretch_of(sample)
    found = zip(samples.fingerprints, stretch.weights, stretch.taken, strict=True)
    corpora = [
        {"prefix": prefix, "fingerprint": fingerprint, "weight": weight, "taken": number}
        for (prefix, fingerprint), weight, number in found
    ]
    return {"first_sample": stretch.first_sample, "corpora": corpora}


def _first_stretch(samples: BlendedSamples, weights: tuple[float, ...], progress: Progress) -> Stretch:
    """Return the stretch that begins at the progress, or has begun before it if the mixture is the same."""
    present = samples.fingerprints
    if (mixture := progress.mixture) is None:  # of a run that begins, or of an earlier version
        samples.arrange(Stretch(0, samples.weights if progress.consumed_samples else weights, (0,) * len(present)))
        mixture = mixture_at(samples, 0)
    saved = mixture["corpora"]
    old_weights, taken = (tuple(corpus[key] for corpus in saved) for key in ("weight", "taken"))
    before, places = Stretch(mixture["first_sample"], old_weights, taken), _places(saved, present)
    is_same = places == list(range(len(before.weights)))
    if is_same and all(map(math.isclose, _shares(weights), _shares(before.weights))):
        return before
    stand = before.taken_before(progress.consumed_samples)
    first = Stretch(progress.consumed_samples, weights, tuple(0 if place is None else stand[place] for place in places))
    logger.warning(
        "the mixture of corpora has changed: %s",
        "; ".join(
            f"{prefix} has the weight {share:.4g} and goes on at its sample {number}"
            for (prefix, _), share, number in zip(present, _shares(weights), first.taken, strict=True)
        ),
    )
    for place in set(range(len(saved))).difference(place for place in places if place is not None):
        logger.warning("%s is not read any more, after %d of its samples", saved[place]["prefix"], stand[place])
    return first


def _places(saved: list[dict[str, Any]], present: list[tuple[str, str]]) -> list[int | None]:
    """Return which saved corpus each present one is: that of the same contents, or else of the same prefix."""
    left, places = dict(enumerate(saved)), list[int | None]()
    contents = {fingerprint for _, fingerprint in present}
    for prefix, fingerprint in present:
        same = [place for place, corpus in left.items() if corpus["fingerprint"] == fingerprint]
        replaced = [place for place, corpus in left.items() if corpus["prefix"] == prefix]
        replaced = [place for place in replaced if left[place]["fingerprint"] not in contents]  # else it has moved
        if replaced and not same:
            logger.warning("%s has other contents than in the checkpoint: from here on, samples are others", prefix)
        place = next(iter(same + replaced), None)
        places.append(place)
        if place is not None:
            del left[place]
    return places


def _shares(weights: Sequence[float]) -> list[float]:
    return [weight / math.fsum(weights) for weight in weights]
