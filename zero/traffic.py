"""Bytes that data parallelism sends per rank and step (paper, section 7), in closed form."""

from zero.stage import Lifetime, ZeroStage


def step_bytes(answers: ZeroStage, parameter_bytes: float, data_size: int, num_micro_batches: int = 1) -> float:
    """With Psi = `parameter_bytes`, of all parameters: 2 Psi (N-1)/N in stages 0 to 2 and 3 Psi (N-1)/N in stage 3.

    More micro-batches cost nothing where full gradients persist, a reduction each where they are transient, and two
    gathers each where full parameters are.
    """
    num_reductions = num_micro_batches if answers.full_grads is Lifetime.TRANSIENT else 1
    num_gathers = 2 * num_micro_batches if answers.full_params is Lifetime.TRANSIENT else 1
    return (num_reductions + num_gathers) * parameter_bytes * (data_size - 1) / data_size
