"""Sentences of the paper beside what dry runs and closed forms say, and its trillion parameters (section 9)."""

import statistics
from dataclasses import dataclass
from itertools import pairwise

from lab.pages.markdown import table
from lab.paper.experiments import CONFIGS, Experiment, parsed
from lab.paper.results import CLUSTER, Part, Result, line_of, results
from lab.paper.throughput import turing_nlg
from lab.planner.depth import DEEPER
from zero.formulas.memory import formula

TOLERANCE = 0.05  # within which a number is right
BERT_MINUTES, BERT_PARAMETERS, DAYS_OF_SECTION_9 = 67, 330e6, 140


@dataclass(frozen=True)
class Claim:
    """A sentence, what the paper prints, what is found, and the verdict: right, off by how much, or not reproduced."""

    section: str
    sentence: str
    printed: str
    found: str
    verdict: str

    @classmethod
    def of_number(cls, section: str, sentence: str, printed: float, found: float, unit: str = "") -> "Claim":
        error = found / printed - 1
        verdict = "right" if abs(error) <= TOLERANCE else f"off by {error:+.0%}"
        return cls(section, sentence, f"{printed:g}{unit}", f"{found:.3g}{unit}", verdict)

    @classmethod
    def of_fact(cls, section: str, sentence: str, printed: str, found: str, holds: bool) -> "Claim":
        return cls(section, sentence, printed, found, "right" if holds else "not reproduced")


def by_name(figure: str) -> dict[str, Result]:
    return {r.experiment.name: r for r in results(figure)}


def rate_of(result: Result) -> float:
    return result.tflops or 0.0


def of_throughput() -> list[Claim]:
    """Return the sentences of sections 1 and 10.2 to 10.4 and 10.6."""
    sizes, scaling, alone = by_name("figure2"), by_name("figure3"), by_name("figure4")
    mean = statistics.mean(rate_of(sizes[f"{name}b-zero-400"]) for name in (8, 20, 40, 60, 80, 100))
    baselines = {name: result for name, result in sizes.items() if result.experiment.is_baseline}
    ratios = [rate_of(sizes[f"{name.split('-')[0]}-zero-400"]) / rate_of(one) for name, one in baselines.items()]
    totals = [rate_of(result) * result.experiment.num_gpus / 1e3 for result in scaling.values()]
    doublings = [later / earlier for earlier, later in pairwise(totals)]
    without = [rate_of(result) for result in alone.values() if not result.experiment.is_baseline]
    largest, ddp = alone["13b-zero-128"], alone["1.38b-baseline-128"]
    return [
        Claim.of_number("1", "100B on 400 GPUs: over 38 TFLOPs a GPU", 38, rate_of(sizes["100b-zero-400"])),
        Claim.of_number("10.2", "8B to 100B on average, 400 GPUs: 15 PFLOPs", 15, mean * 0.4),
        Claim.of_fact("10.2", "over 30% of the peak", "> 30%", *_above(100 * mean / CLUSTER.peak_half_tflops, 30, "%")),
        Claim.of_number("10.2", "up to 10 times the baseline's speed", 10, max(ratios)),
        Claim.of_fact("10.2", "170B trains on 400 GPUs", "fits", *_fits(sizes["170b-zero-400"])),
        Claim.of_fact("10.3", "twice the GPUs more than double 60B: 64 to 128", "> 2", *_above(doublings[0], 2)),
        Claim.of_fact("10.3", "the same, 128 to 256", "> 2", *_above(doublings[1], 2)),
        Claim.of_fact("10.4", "13B trains without tensor parallelism, 128 GPUs", "fits", *_fits(largest)),
        Claim.of_number("10.4", "1.5B to 13B on average: over 40 TFLOPs a GPU", 40, statistics.mean(without)),
        Claim.of_fact("10.4", "without ZeRO, 1.4B: less than 20 TFLOPs", "< 20", *_below(rate_of(ddp), 20)),
        Claim.of_number("10.6", "Turing-NLG, 17B: TFLOPs a GPU", 41.4, rate_of(turing_nlg())),
    ]


def of_memory() -> list[Claim]:
    """Return the sentences of sections 6.1, 8 and 10.5."""
    cached, speed = by_name("figure7"), by_name("figure8")
    checkpoint = 125 / 2 * 32 * 1024 * 8192 * 2 / 1e9  # one input of two layers
    peak = {name: result.estimate.device_peak_bytes for name, result in cached.items()}
    change = {size: peak[f"{size}b-c5-400"] / peak[f"{size}b-c4-400"] - 1 for size in (40, 100)}
    gather = 100 / 12  # percent: one gather of what a block sends twelve times
    others_fit = [name for name in ("c1", "c2", "c3", "c4") if speed[f"170b-{name}-400"].fits]
    needs_c5 = speed["170b-c5-400"].fits and not others_fit
    slower = rate_of(speed["60b-c5-128"]) / rate_of(speed["60b-c4-128"]) - 1
    return [
        Claim.of_number("6.1", "checkpoints of 100B, batch 32, every second layer", 33, checkpoint, " GB"),
        Claim.of_number("6.1", "the same divided over 16 ranks by P_a", 2, checkpoint / 16, " GB"),
        Claim.of_fact("8", "P_a adds less than 10% to the tensor traffic", "< 10%", *_below(gather, 10, "%")),
        Claim.of_fact("10.5", "40B: C5 caches as much as C4", "0%", f"{change[40]:+.0%}", change[40] > -TOLERANCE),
        Claim.of_fact("10.5", "100B: C5 caches less than C4", "less", f"{change[100]:+.0%}", change[100] < -TOLERANCE),
        Claim.of_fact("10.5", "60B: C5 is slower than C4", "-9%", f"{slower:+.0%}", slower < -TOLERANCE),
        Claim.of_fact("10.5", "170B fits with C5 alone", "C5", ", ".join([*others_fit, "C5"]), needs_c5),
    ]


def _fits(result: Result) -> tuple[str, bool]:
    return f"{result.estimate.device_peak_bytes / 1e9:.1f} GB" + ("" if result.fits else ", OOM"), result.fits


def _above(value: float, limit: float, unit: str = "") -> tuple[str, bool]:
    return f"{value:.3g}{unit}", value > limit


def _below(value: float, limit: float, unit: str = "") -> tuple[str, bool]:
    return f"{value:.3g}{unit}", value < limit


def claims() -> Part:
    found = [*of_throughput(), *of_memory()]
    rows = [(one.section, one.sentence, one.printed, one.found, one.verdict) for one in found]
    counts = [sum(one.verdict.startswith(word) for one in found) for word in ("right", "off", "not reproduced")]
    status = "of {} sentences {} right, {} off, {} not reproduced".format(len(found), *counts)
    return status, table(["section", "sentence", "paper", "here", ""], rows)


def section_9() -> Part:
    """Return the two runs of a trillion parameters on 1024 GPUs, and the paper's estimate of the time."""
    rows, tokens_per_second = [], []
    for name, title in (("1t-tensor16", "64-way data, 16-way tensor"), ("1t-data1024", "data alone")):
        settings = parsed(CONFIGS / f"{name}.yaml", 1024)
        print(f"section9 {name}", flush=True)
        model, batch = settings.model, settings.train.global_batch_size
        row = {"layers": str(model.num_layers), "hidden": str(model.hidden_size), "total_batch": str(batch)}
        result = Result(Experiment("section9", {"model": "1T", "gpus": "1024"} | row), line_of(settings, depths=DEEPER))
        found = result.estimate
        data_size = 1024 // settings.parallel.tensor_size
        states = formula(settings.zero.policy, found.parameters / settings.parallel.tensor_size, data_size).total
        tokens_per_second.append(batch * model.seq_length / found.seconds)
        figures = f"{states / 1e9:.1f}", *_fits(result)[:1], f"{found.seconds:.0f}", f"{rate_of(result):.1f}"
        rows.append([title, f"{model.num_layers} x {model.hidden_size}", batch, *figures])
    days = BERT_MINUTES / 60 / 24 * 1e12 / BERT_PARAMETERS
    tokens = [rate * DAYS_OF_SECTION_9 * 86400 / 1e9 for rate in tokens_per_second]
    headings = ["1T on 1024 GPUs", "layers x hidden", "batch", "states, GB", "peak, GB", "step, s", "TFLOPs a GPU"]
    lines = table(headings, rows)
    lines.append(
        f"\nThe paper: 16 GB of model states a GPU, and {DAYS_OF_SECTION_9} days for a trillion parameters, which are "
        f"the {BERT_MINUTES} minutes of Bert-Large on as many GPUs times the ratio of parameters: {days:.0f} days. In "
        f"{DAYS_OF_SECTION_9} days the two dry runs read {tokens[0]:.0f} and {tokens[1]:.0f} billion tokens, so the "
        "time of a training is that of its tokens, of which the paper names none."
    )
    fit = all("OOM" not in str(row[4]) for row in rows)
    status = f"{'right' if fit else 'not reproduced'}: 1T fits on 1024 GPUs; 140 days are right as arithmetic alone"
    return status, lines
