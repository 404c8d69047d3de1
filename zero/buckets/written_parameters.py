"""Parameters that are written in place between steps, such as by `load_state_dict`: their master weights follow."""

from collections.abc import Iterable, Sequence

from parallel.memory_kinds import TensorKind, allocating
from zero.buckets.bucket import Bucket, take_changed
from zero.buckets.flat import FlatParameters
from zero.memory.placement import Offload, Placement


class WrittenParameters:
    """Compares parameters with the master weights of one optimizer, if they may have been written since its last step.

    This is so if they have new versions, or if their `.data` has ever been read. The values are compared on the device
    of the master weights, and the host does not know the result.
    """

    def __init__(self, flats: Sequence[FlatParameters], offload: Offload):
        self._flats, self._offload = flats, offload
        self._versions: dict[FlatParameters, list[object]] = {}  # when master weights and parameters were equal

    def take(self, placement: Placement, buckets: Iterable[Bucket]) -> None:
        """Give the master weights of those buckets, which are placed alike, the values of written parameters.

        The caller has made the computation wait for all updates. So a copy of master weights to the accelerator has
        ended when their parameters are read, and they may be overwritten.
        """
        written = {b for flat in self._flats if self._may_be_written(flat) for b in flat.buckets}
        outdated = [bucket for bucket in buckets if bucket in written and bucket.master_may_be_outdated]
        owned = self._offload.read_from(placement, (bucket.params.owned for bucket in outdated))
        for bucket, values in zip(outdated, owned, strict=True):
            with allocating(TensorKind.OTHER, on_host=placement is Placement.HOST):
                take_changed(bucket.master, values)

    def restart(self) -> None:
        """Expect master weights and parameters to be equal now, as after an update."""
        self._versions = {flat: flat.versions() for flat in self._flats if _may_be_outdated(flat)}

    def _may_be_written(self, flat: FlatParameters) -> bool:
        return _may_be_outdated(flat) and self._versions.get(flat) != flat.versions()


def _may_be_outdated(flat: FlatParameters) -> bool:
    return any(bucket.master_may_be_outdated for bucket in flat.buckets)
