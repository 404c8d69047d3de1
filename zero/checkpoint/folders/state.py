"""A model and its optimizer for `torch.distributed.checkpoint` (DCP), whose folders FSDP2 reads and writes too."""

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from zero.data_parallel import ZeroDataParallel
from zero.optimizer import ZeroOptimizer


class DistributedState:
    """The state dicts of a model and its optimizer, by the names of torch's `get_state_dict` (its protocol `Stateful`).

    Example::

        dcp.save({"app": DistributedState(model, optimizer)}, checkpoint_id="folder")  # and dcp.load

    All ranks make the same calls. No rank copies anything: the tensors are views of what it owns.
    """

    def __init__(self, model: ZeroDataParallel, optimizer: ZeroOptimizer | None = None):
        self._model, self._optimizers = model, () if optimizer is None else (optimizer,)

    def state_dict(self) -> dict[str, Any]:
        """Return {"model": {name: values}, "optim": {"state": ..., "param_groups": ...}}: views of what is owned.

        Raises ConfigError if the optimizer has states that are not one value for each element.
        """
        weights, states = get_state_dict(self._model, self._optimizers)
        return {"model": weights} | ({"optim": states} if self._optimizers else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the model use what was loaded into the tensors of `state_dict`, and take the groups' settings."""
        weights, states = state_dict["model"], state_dict.get("optim", {})
        set_state_dict(self._model, self._optimizers, model_state_dict=weights, optim_state_dict=states)
