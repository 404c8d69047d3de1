"""Calibration of two constants of configs/clusters/dgx-2.yaml, by least squares over three rows of Figure 2.

    python -m lab.paper.calibrate      prints the constants, to be copied into the file

The two rows of 1.5B determine `gemm_fraction`, because they mostly compute. The baseline of 60B determines
`node_fraction`, because it mostly waits for the network. No other row of the paper is used.
"""

from lab.measure.cluster import ClusterSpec
from lab.measure.fit import Constants, fitted, with_constants
from lab.paper.experiments import CLUSTER_FILE, experiments
from lab.planner.depth import extrapolate, shallow_runs

CALIBRATED = "1.5b-zero-400", "1.5b-baseline-400", "60b-baseline-384"  # rows of Figure 2
BEFORE = {"gemm_fraction": 0.5, "node_fraction": 0.5}


def calibrated(cluster: ClusterSpec) -> ClusterSpec:
    rows = [experiment for experiment in experiments("figure2") if experiment.name in CALIBRATED]
    runs = [shallow_runs(experiment.settings()) for experiment in rows]

    def errors(constants: Constants) -> list[float]:
        chosen, found = with_constants(cluster, constants), []
        for experiment, of_row in zip(rows, runs, strict=True):
            seconds = extrapolate(of_row, chosen).at(int(experiment.row["layers"])).seconds
            assert experiment.measured_tflops is not None
            found.append(experiment.tflops(seconds) / experiment.measured_tflops - 1)
        return found

    found = fitted(BEFORE, errors)
    for experiment, error in zip(rows, errors(found), strict=True):
        print(f"{experiment.name}: {error:+.1%}")
    return with_constants(cluster, found)


if __name__ == "__main__":
    chosen = calibrated(ClusterSpec.load(CLUSTER_FILE))
    for name in BEFORE:
        print(f"{name}: {getattr(chosen, name):.3f}")
