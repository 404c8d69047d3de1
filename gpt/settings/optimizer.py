"""Settings of the optimizer."""

from dataclasses import field
from typing import Annotated, Literal

from parallel.validation.errors import ConfigError
from parallel.validation.fields import Positive, Range, checked

BelowOne = Annotated[float, Range(0, below=1)]


@checked
class MuonSettings:
    """Muon, which updates the matrices inside of the blocks. Embeddings, norms and biases are updated by AdamW."""

    iteration: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    """Polynomials of the iteration that makes a matrix of updates orthogonal. newton_schulz: the same one in all steps;
    polar_express: the best one for what the steps before it have left (Amsel et al., 2025)."""
    iterates_on: Literal["matrix", "gram"] = "matrix"
    """What an iteration multiplies in each step. matrix: the matrix, and a Gram matrix made of it; gram: Gram matrices
    for several steps in a row, and then the matrix, which takes fewer FLOPs if a side is more than 1.5 times the other
    (Dao AI Lab, 2026); other matrices stay as with matrix. It changes rounding only, and a run may resume with the
    other one."""
    ns_steps: Annotated[int, Range(1, 99)] = 5
    """Steps of this iteration."""
    ns_dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Data type of this iteration, and of the messages by which matrices reach the ranks that compute them."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), which makes updates as
    large as those of AdamW; original: sqrt(max(1, rows / columns))."""
    lr_factor: Annotated[float, Range(above=0, at_most=1e4)] = 1.0
    """Further factor of the learning rate of all matrices."""
    row_beta: BelowOne | None = None
    """Decay rate of the second moment of rows, by which NorMuon divides them (Li et al., 2025: 0.95); null: none."""
    per_head: bool = False
    """Take the rows of q, k and v that belong to one head as a matrix; false: those of all heads together."""
    joins_parts: bool = True
    """Put the parts of a matrix that tensor ranks have together; false: make each part orthogonal by itself, which
    sends nothing along the tensor axis, and gives updates that depend on the tensor size."""


@checked
class SoapSettings:
    """SOAP, which updates the matrices inside of the blocks. Embeddings, norms and biases are updated by AdamW."""

    shampoo_beta: BelowOne = 0.95
    """Decay rate of the preconditioners."""
    refresh_every: Positive = 10
    """Steps between two refinements of the preconditioners' eigenbases, each of which takes a QR decomposition."""
    lr_factor: Annotated[float, Range(above=0, at_most=1e4)] = 1.0
    """Factor of the learning rate of all matrices."""


@checked
class OptimizerSettings:
    """The optimizer; weight decay is for matrices and embeddings only, gradients are clipped by global norm."""

    lr: Annotated[float, Range(0, 1000)] = 3e-4
    """Highest learning rate of the run; the settings of `schedule` say how it rises and falls."""
    weight_decay: Annotated[float, Range(0, 1000)] = 0.1
    """Decoupled weight decay, applied to parameters with two or more dimensions."""
    cautious_decay: bool = False
    """Apply it only to the elements that their update brings nearer to zero (Chen et al., 2025); not with sgd."""
    clip_norm: Annotated[float, Range(above=0, allows_inf=True)] = 1.0
    """Largest global norm of the gradients; they are scaled down to it if their norm is larger. .inf: no clipping."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Annotated[float, Range(1e-30, 1)] = 1e-8
    """Number added to the square root of the second moment, against division by zero."""
    implementation: Literal["torch", "apex"] = "torch"
    """torch: torch's fused AdamW, which never makes the host wait for the device; apex: NVIDIA apex's FusedAdam, on
    GPUs without offloaded optimizer states. A run may resume with the other one."""
    name: Literal["adamw", "adamw8bit", "adamw_bf16", "muon", "soap", "sgd"] = "adamw"
    """adamw: AdamW for all parameters; adamw8bit: AdamW with moments of 8 bits, and of fp32 for norms and biases;
    adamw_bf16: the same with moments in bf16, rounded at random; muon: Muon for the matrices inside of the blocks, and
    AdamW for the rest; soap: SOAP and AdamW in the same way; sgd: SGD with momentum."""
    momentum: BelowOne = 0.95
    """Decay rate of the momentum of muon and sgd."""
    nesterov: bool = True
    """Use Nesterov momentum in muon and sgd."""
    embedding_lr_factor: Annotated[float, Range(above=0, at_most=1e4)] = 1.0
    """Factor of the learning rate of the token embedding, which is also the head if model.tied_head."""
    muon: MuonSettings = field(default_factory=MuonSettings)
    """The settings of muon."""
    soap: SoapSettings = field(default_factory=SoapSettings)
    """The settings of soap."""

    def __post_init__(self) -> None:
        if self.implementation == "apex" and (self.name != "adamw" or self.cautious_decay):
            raise ConfigError(
                f"OptimizerSettings.implementation=apex has AdamW only, and name={self.name}, "
                f"cautious_decay={self.cautious_decay}; choose implementation=torch, or name=adamw with "
                "cautious_decay=false"
            )
        if self.name == "sgd" and self.cautious_decay:
            raise ConfigError(
                "OptimizerSettings.cautious_decay=true needs decoupled weight decay, which name=sgd does not have; "
                "choose another optimizer, or cautious_decay=false"
            )
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ConfigError("OptimizerSettings.momentum=0.0 has no Nesterov momentum; choose nesterov=false")
