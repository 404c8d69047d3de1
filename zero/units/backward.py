"""The backward that is running, from its first gradient to its end, however often autograd enters itself in between."""

from collections.abc import Callable, Iterable

from torch import nn

from parallel.autograd_internals import (
    NO_GRAPH_TASK,
    call_at_end_of_backward,
    current_graph_task,
    is_nested_backward,
    will_accumulate,
)


class RunningBackward:
    """The outermost backward, as hooks inside it see it.

    A reentrant checkpoint runs a backward of its own inside the outer one, and its gradients may be the first that
    arrive. All of these are one backward, which ends with the outer one. If no hook runs in the outer one itself, its
    end is not noticed before `settle`.

    `on_begin()` is called when it begins and `on_end()` when it ends; `on_nested_begin()` and `on_nested_end()` when
    one inside it does. A backward that raises never ends. `params` are those that can get a gradient.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        on_begin: Callable[[], None],
        on_nested_begin: Callable[[], None],
        on_nested_end: Callable[[], None],
        on_end: Callable[[], None],
    ):
        self._params = list(params)
        self._on_begin, self._on_end = on_begin, on_end
        self._on_nested_begin, self._on_nested_end = on_nested_begin, on_nested_end
        self._tasks: set[int] = set()  # autograd's numbers of the outer one and of those inside it
        self._num_nested_running = 0
        self._outer: int | None = None  # None: only hooks in nested ones have run yet

    def enter(self) -> None:
        """Begin the backward, unless it has begun already: each hook inside a backward calls this first."""
        task = current_graph_task()
        if task in self._tasks:
            return
        if is_nested_backward():
            if not self._tasks:
                self._begin()
            self._num_nested_running += 1
            self._tasks.add(task)
            self._on_nested_begin()
            call_at_end_of_backward(self._leave_nested)
            return
        if self._outer is not None or self._num_nested_running or not self._tasks:  # else: it is the outer one
            self._begin()
        self._outer = task
        self._tasks.add(task)
        call_at_end_of_backward(self._leave)

    def accumulates(self) -> bool:
        """Return whether gradients of parameters are accumulated, beside those of a nested backward.

        A backward that only differentiates by inputs, as `torch.autograd.grad` does, accumulates none.
        """
        return any(map(will_accumulate, self._params))

    def settle(self) -> None:
        """End a backward whose end no hook has seen, and forget one that raised. No backward may be running."""
        if self._tasks and self._outer is None and not self._num_nested_running:
            self._leave()
        self._tasks.clear()

    def _begin(self) -> None:
        self._tasks.clear()  # those of a backward that raised
        self._outer, self._num_nested_running = None, 0
        self._on_begin()

    def _leave_nested(self) -> None:
        self._num_nested_running -= 1
        self._on_nested_end()

    def _leave(self) -> None:
        self._tasks.clear()
        self._outer = None
        self._on_end()


def is_in_backward() -> bool:
    """Return whether a backward is running: what runs forward now runs it again."""
    return current_graph_task() != NO_GRAPH_TASK
