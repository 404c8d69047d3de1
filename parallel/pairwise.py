"""Collectives over gloo, made of messages between two ranks, and the buffers that these are received in."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

Allocate = Callable[[Tensor, int], Tensor]  # (like, numel) -> uninitialized (numel,), dtype and device of `like`

# The exchanges under way in each group: what waits for one, its messages until then, and their time limit. Gloo forgets
# the buffer of a message with the last reference to its `Work`, and the connection, which is the group's, breaks when
# the other rank's part arrives. So a group keeps its messages, even if an engine that has launched them is dropped.
_Exchange = tuple[weakref.ref[Callable[[], object]], list[dist.Work], timedelta]
_UNDER_WAY: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Exchange]] = weakref.WeakKeyDictionary()


def new_buffer(like: Tensor, numel: int) -> Tensor:
    """Return an uninitialized tensor (numel,) of the dtype and device of `like`."""
    return like.new_empty(numel)


class ReceiveBuffers:
    """One buffer per dtype and concurrent message, each as long as the longest message that it has received.

    A new allocation for each message would take as long as sending it, because the kernel has to map new pages.
    `allocate` returns a new buffer; where memory is tracked, it also tags the buffer.
    """

    def __init__(self, allocate: Allocate = new_buffer) -> None:
        self._allocate = allocate
        self._free: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)  # ascending by length

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer (n,) of the dtype of `like`, with n >= like.numel(). Give it back with `put_back`."""
        free = self._free[like.dtype]
        if free and free[-1].numel() >= like.numel():
            return free.pop()
        if free:
            # No free buffer is long enough. The shortest one is freed before the new one is allocated, so that the
            # number of buffers does not grow and the two do not exist at the same time.
            free.pop(0)
        return self._allocate(like, like.numel())

    def prepare(self, like: Tensor) -> None:
        """Have a buffer for `take`, which then allocates nothing: memory stays with the stream that allocates it."""
        self.put_back(self.take(like))

    def put_back(self, buffer: Tensor) -> None:
        """Return a buffer whose message has been read."""
        free = self._free[buffer.dtype]
        free.append(buffer)
        free.sort(key=Tensor.numel)

    def clear(self) -> None:
        """Free the buffers that are not in use; later messages allocate new ones."""
        self._free.clear()

    @property
    def num_bytes(self) -> int:
        """The bytes of the buffers that are not in use. Between two steps this is all of them."""
        return sum(b.numel() * b.element_size() for free in self._free.values() for b in free)


class PairwiseMessages:
    """Collectives of the ranks of a group: a method launches messages, and returns what waits for them.

    `received` are the buffers of reduce-scatters. A wait of `timeout` raises RuntimeError; 0: the group's own limit.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        allocate: Allocate = new_buffer,
        timeout: timedelta = timedelta(0),
    ) -> None:
        self._group, self._timeout, self.received = group, timeout, ReceiveBuffers(allocate)
        self._rank, self._size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)

    def all_gather(self, shard: Tensor, out: Tensor) -> Callable[[], object]:
        """Gather by messages that are received in place.

        gloo's own all-gather receives into a new buffer and copies it, which takes four times as long.
        """
        shards = out.view(-1).chunk(self._size)
        shards[self._rank].copy_(shard.view(-1))  # returns early if both are the same memory
        return self.exchange([shard.view(-1)] * self._size, shards)

    def reduce_scatter(self, full: Tensor, out: Tensor) -> Callable[[], object]:
        """Reduce and scatter by an exchange of shards and a local sum.

        gloo's own reduce-scatter sends as many bytes as an all-reduce, which is twice as many.
        """
        buffer = self.received.take(full)
        received = buffer[: full.numel()]
        sent, terms = full.view(-1).chunk(self._size), received.chunk(self._size)
        terms[self._rank].copy_(sent[self._rank])
        # `out` may be part of `full`, which the exchange reads. So the exchange writes a buffer, and only the sum,
        # after it, writes `out`.
        wait = self.exchange(sent, terms)

        def wait_and_sum() -> None:
            wait()
            # The buffer is put back after the sum has read it: the next message may overwrite it at once.
            sum_ranks(received.view(self._size, -1), out.view(-1))
            self.received.put_back(buffer)

        return wait_and_sum

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], object]:
        """Send `sent[k]` to every other rank k and fill `received[k]` with what rank k sends.

        Messages between two ranks are matched in the order in which they are launched, so all ranks must launch their
        exchanges in the same order. An empty message is not sent, and both ranks know it.
        """
        group, peers = self._group, [rank for rank in range(self._size) if rank != self._rank]
        assert group is not None  # a group of one rank exchanges nothing
        under_way = _UNDER_WAY.setdefault(group, [])
        # Dropped ones are completed here: a finalizer would wait inside the garbage collector, in the middle of a call.
        _complete(exchange for exchange in under_way if exchange[0]() is None)
        under_way[:] = [exchange for exchange in under_way if exchange[1]]
        messages = [dist.P2POp(dist.irecv, received[p], group=group, group_peer=p) for p in peers if len(received[p])]
        messages += [dist.P2POp(dist.isend, sent[p], group=group, group_peer=p) for p in peers if len(sent[p])]
        works = dist.batch_isend_irecv(messages) if messages else []
        wait = partial(_wait, works, self._timeout)
        under_way.append((weakref.ref(wait), works, self._timeout))
        return wait


def complete_all() -> None:
    """Wait for the messages under way in all groups. Raises RuntimeError if a connection is lost."""
    for under_way in list(_UNDER_WAY.values()):
        _complete(under_way)


def _complete(exchanges: Iterable[_Exchange]) -> None:
    for _, works, timeout in exchanges:
        _wait(works, timeout)


def _wait(works: list[dist.Work], timeout: timedelta) -> None:
    while works:
        works.pop().wait(timeout)


def sum_ranks(terms: Tensor, out: Tensor) -> None:
    """Sum (size, n) over the first dim into (n,), in the order of ranks; half types in fp32, rounded once."""
    if len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)  # the same bits as torch.sum, several times faster
    else:
        torch.sum(terms, dim=0, out=out)
