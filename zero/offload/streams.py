"""Work beside the computation. The one place that chooses streams: a CPU has none, and does everything at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallel.mesh import Handle


class SideStream:
    """A CUDA stream of its own, which runs what is queued in order: copies to the host and back, gathers behind them.

    Memory goes from stream to stream by waiting, never by `record_stream`: what is queued here comes after all that
    the computation had queued by then, and the computation waits for `queued()` before it reads or frees it.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched in here runs beside what the computation queues from now on."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def queued(self) -> Handle:
        """For the computation, or the stream that is current then, to wait for all that has been launched so far."""
        if self._stream is None:
            return Handle()
        event, device = self._stream.record_event(), self._stream.device
        return Handle(lambda: torch.cuda.current_stream(device).wait_event(event))

    def landed(self) -> Handle:
        """For the host to wait for all that has been launched beside so far."""
        return Handle() if self._stream is None else Handle(self._stream.record_event().synchronize)
