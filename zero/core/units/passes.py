"""The passes of a training step: which one is running, and who is told where it begins and ends.

forward            a module begins to run, and no backward is running it again
backward           the first gradient arrives | the outermost call of autograd ends
nested backward    inside a backward autograd is entered again, as by a reentrant checkpoint
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel.autograd_internals import (
    NO_GRAPH_TASK,
    call_at_end_of_backward,
    current_graph_task,
    is_nested_backward,
    will_accumulate,
)
from zero.core.buckets.gradients import GradientReducer
from zero.core.buckets.guard import take_grad
from zero.core.protocols.extension import Extensions
from zero.core.protocols.orders import Round


class PassListener(Protocol):
    """An observer of the passes."""

    def begin_forward(self, is_whole: bool) -> None: ...

    def begin_backward(self) -> None: ...

    def end_nested_backward(self) -> None: ...

    def end_backward(self) -> None: ...

    def end_abandoned_calls(self) -> None: ...


class Passes:
    """The passes of a step, as hooks in them see them: whoever notices one calls this, and all listeners are told.

    A reentrant checkpoint runs a backward of its own inside the outer one, and its gradients may be the first that
    arrive. All of these are one backward, which ends with the outer one. If no hook runs in the outer one itself, its
    end is not noticed before `finalize`. Autograd does not report the end of a backward that raises either:

    raised in            leaves                                          until
    a forward            units that were prefetched or are kept for      the end of the next backward
                         their backward, and counts of open calls
    a forward, also one  all units that were running, if the exception   `finalize`, and the next forward of the engine
    in a backward        is no `Exception`: torch then calls no hook
    a backward, also     the units that it has unsharded                 `finalize`: the next forward, a step,
    a nested one                                                         `zero_grad`, or a normal exit from `accumulate`
                         its gradients; if it was to reduce them,        `zero_grad`
                         a step or another backward raises before that
    `accumulate()`       nothing of its own                              -
    """

    def __init__(self, reducer: GradientReducer, extensions: Extensions):
        self._reducer, self._extensions = reducer, extensions
        self._params = reducer.params
        self._listeners: list[PassListener] = []
        self._tasks: set[int] = set()  # autograd's numbers of the outer backward and of those inside it
        self._num_nested_running = 0
        self._outer: int | None = None  # None: only hooks in nested ones have run yet
        self.accumulates = False  # the running backward accumulates gradients, as far as is known
        self._is_last_microbatch = True
        self._awaits_backward = False  # a forward has run since the last backward

    def join(self, listener: PassListener) -> None:
        """Tell `listener` of all passes from now on."""
        self._listeners.append(listener)

    def end(self) -> None:
        """Tell nobody of passes any more: the engine ends."""
        self._listeners.clear()

    def watch_gradients(self) -> list[RemovableHandle]:
        """Take each gradient as soon as autograd has accumulated it; return the handles of the hooks."""
        # A weak reference: the garbage collector does not follow references of such hooks, and would never free this.
        accept = weakref.WeakMethod(self._accept)

        def on_gradient(param: nn.Parameter) -> None:
            if (alive := accept()) is not None:
                alive(param)

        return [param.register_post_accumulate_grad_hook(on_gradient) for param in self._params]

    def begin_forward(self, is_whole: bool = True) -> None:
        """Begin a forward of the whole model or of a part; not one that a backward runs again."""
        self.finalize()
        self._extensions.on_round(Round.FORWARD)
        for listener in self._listeners:
            listener.begin_forward(is_whole)
        self._awaits_backward |= torch.is_grad_enabled()

    def begin_read(self) -> None:
        """Let the next gathers be those of a read of parameters, outside of all passes."""
        self._extensions.on_round(Round.READ)

    def enter_backward(self) -> None:
        """Begin the backward, unless it has begun already: each hook inside a backward calls this first."""
        task = current_graph_task()
        if task in self._tasks:
            return
        if is_nested_backward():
            if not self._tasks:
                self._begin_backward()
            self._num_nested_running += 1
            self._tasks.add(task)
            self._reducer.mark_ready_at_end()
            call_at_end_of_backward(self._end_nested_backward)
            return
        if not self._encloses_ended_backwards:
            self._begin_backward()
        self._outer = task
        self._tasks.add(task)
        call_at_end_of_backward(self._end_backward)

    def finalize(self) -> None:
        """End a backward whose end no hook has seen, and one that raised but for its gradients. None may be running."""
        for listener in self._listeners:
            listener.end_abandoned_calls()
        if self._encloses_ended_backwards:
            self._end_backward()
        elif self._tasks:  # it raised
            self._end_tasks()
            self.accumulates = False

    @property
    def _encloses_ended_backwards(self) -> bool:
        """True if nested backwards have ended, and no hook has seen the backward around them."""
        return bool(self._tasks) and self._outer is None and not self._num_nested_running

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let the backwards inside this context be followed by others of the same step."""
        was_last, self._is_last_microbatch = self._is_last_microbatch, False
        self._awaits_backward = False
        try:
            yield
            self.finalize()
            # This rank's micro-batch reached no parameter, but other ranks' may have: take part in their reduction.
            if self._awaits_backward and self._reducer.reduces(is_last=False):
                self._reducer.begin(is_last=False)
                self._reducer.end()
        finally:
            self._is_last_microbatch = was_last

    def _accept(self, param: nn.Parameter) -> None:
        # First: the gradient of a backward that fails must not stay in `param.grad`, or it is added to the next.
        grad = take_grad(param)
        self.enter_backward()
        if not self.accumulates:  # only a backward inside the running one accumulates gradients
            self._begin_accumulation()
        # Nothing is resharded here: with frozen weights this runs before the input's gradient has read the parameters.
        self._reducer.accept(param, grad)

    def _begin_backward(self) -> None:
        self._tasks.clear()  # those of a backward that raised
        self._outer, self._num_nested_running = None, 0
        self.accumulates = False
        for listener in self._listeners:
            listener.begin_backward()
        # A backward that only differentiates by inputs, as `torch.autograd.grad` does, accumulates no gradients.
        if any(map(will_accumulate, self._params)):
            self._begin_accumulation()

    def _begin_accumulation(self) -> None:
        self.accumulates, self._awaits_backward = True, False
        self._reducer.begin(self._is_last_microbatch)

    def _end_nested_backward(self) -> None:
        self._num_nested_running -= 1
        for listener in self._listeners:
            listener.end_nested_backward()

    def _end_tasks(self) -> None:
        self._tasks.clear()
        self._outer, self._num_nested_running = None, 0
        for listener in self._listeners:
            listener.end_backward()

    def _end_backward(self) -> None:
        self._end_tasks()  # first: the memory of their units is free for the reductions that are still to be launched
        if self.accumulates:
            self.accumulates = False
            self._reducer.end()


def is_in_backward() -> bool:
    """Return whether a backward is running: what runs forward now runs it again."""
    return current_graph_task() != NO_GRAPH_TASK
