"""The order of samples is as recorded: a run that resumes with a newer version goes on with the data that is left."""

import json

import pytest

from data.blend import BlendOrder, open_samples
from tests.recordings import assert_recorded


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_samples_of_two_epochs_are_as_recorded(counting_corpus: str, packing: str):
    apart = {"stream": (False, True), "best_fit": (True,)}[packing]
    lines = []
    for masks_documents in apart:
        options = {"seq_length": 8, "seed": 5, "packing": packing, "masks_documents": masks_documents}
        for part, number in {"train": 80, "validation": 12, "test": 4}.items():
            samples = open_samples(counting_corpus, part, split=[0.7, 0.2, 0.1], **options)
            lines += [f"{part}, documents apart {masks_documents}: {samples.tokens_per_sample:.6g} tokens a sample"]
            lines += [f"{sample}: {samples[sample].tolist()}" for sample in range(number)]
    assert_recorded(f"samples-{packing}", *lines)


def test_the_order_of_a_blend_is_as_recorded():
    lines = []
    for weights in ([0.7, 0.2, 0.1], [1.0, 1.0], [5.0, 1.0, 3.0, 0.01]):
        order = BlendOrder(weights)
        samples = [*range(40), *range(1020, 1030), 100_000]
        lines += [f"{weights}: {json.dumps([order.locate(sample) for sample in samples])}"]
        lines += [f"before: {[order.counts_before(sample).tolist() for sample in samples]}"]
    assert_recorded("blend", *lines)
