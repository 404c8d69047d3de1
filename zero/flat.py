"""The parameters of one unit in one flat buffer: what is owned stays, what is full comes and goes."""

from enum import Enum

from torch import Tensor, nn

from parallel.mesh import Axis, Handle
from zero.layout import Layout, cut
from zero.stage import Lifetime


class Residence(Enum):
    OWNED = "only this rank's shard is in memory; parameters read as NaN"
    ARRIVING = "the full buffer is allocated and other ranks' shards are on their way"
    FULL = "the full buffer holds every parameter, and the parameters point into it"


class FlatParameters:
    """Parameters of one dtype that are all trainable or all frozen. `gather` brings them, `release` lets them go.

    The full buffer is one storage for the whole run, resized between nothing and everything: what autograd saved
    during forward are views of that storage, and they must find the same weights there during backward.
    """

    def __init__(self, params: dict[str, nn.Parameter], axis: Axis, lifetime: Lifetime, window_numel: int):
        self.params, self.axis, self.lifetime = list(params.values()), axis, lifetime
        self.layout = Layout.of({name: p.shape for name, p in params.items()}, axis.size, window_numel)
        self.full = self.params[0].data.new_zeros(self.layout.numel)
        self._released = self.full.new_full((), float("nan"))
        self._arrivals: list[Handle] = []
        self._residence = Residence.FULL
        for param, span in zip(self.params, self.layout.spans, strict=True):
            span.view(self.full).copy_(param.data)
        self._point_params_at_full()
        self.owned = [cut(self.full, window.shard(axis.rank)) for window in self.layout.windows]
        if lifetime is Lifetime.TRANSIENT:
            self.owned = [shard.clone() for shard in self.owned]
        self.release()

    @property
    def is_trainable(self) -> bool:
        return self.params[0].requires_grad

    def start_gather(self) -> None:
        if self._residence is Residence.OWNED:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self._arrivals = [self._send(index) for index in range(len(self.owned))]
            self._residence = Residence.ARRIVING

    def gather(self) -> None:
        self.start_gather()
        if self._residence is Residence.ARRIVING:
            self._await_arrivals()
            self._point_params_at_full()
            self._residence = Residence.FULL

    def release(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT or self._residence is Residence.OWNED:
            return
        if self._residence is Residence.ARRIVING:
            self._await_arrivals()
        for param in self.params:
            param.data = self._released.expand(param.shape)  # a read of freed memory would end the process
        self.full.untyped_storage().resize_(0)
        self._residence = Residence.OWNED

    def publish(self, index: int) -> Handle:
        """Owners have new values: a full buffer that persists receives them, any other is stale and goes."""
        self.release()
        return self._send(index) if self.lifetime is Lifetime.PERSISTENT else Handle()

    def owned_pieces(self, index: int) -> list[tuple[nn.Parameter, range]]:
        """The parameters of which this rank owns a part in one window, and where in the owned shard that part lies."""
        owned = self.layout.windows[index].shard(self.axis.rank)
        param_of = dict(zip(self.layout.spans, self.params, strict=True))
        return [
            (param_of[span], range(part.start - owned.start, part.stop - owned.start))
            for span, part in self.layout.pieces(owned)
        ]

    def resident_tensors(self) -> list[Tensor]:
        """What this buffer occupies between steps; owned shards lie inside a full buffer that persists."""
        return [self.full] if self.lifetime is Lifetime.PERSISTENT else self.owned

    def _send(self, index: int) -> Handle:
        """Owners -> full buffer, one window; in place where the buffer persists."""
        return self.axis.all_gather(self.owned[index], out=cut(self.full, self.layout.windows[index].elements))

    def _await_arrivals(self) -> None:
        for arrival in self._arrivals:
            arrival.wait()

    def _point_params_at_full(self) -> None:
        for param, span in zip(self.params, self.layout.spans, strict=True):
            param.data = span.view(self.full)
