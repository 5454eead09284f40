"""Bytes that live at once: a dispatch mode that follows every storage from birth to death.

It sees what operators return, on real tensors and on fake ones (which have shapes and no memory)
alike. It does not see scratch that a kernel takes and gives back inside one operator, memory of
numpy, or what an allocator rounds up.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dprc.noise import Position, Stream

aten = torch.ops.aten
# Marks a fake truth value that is taken for true somewhere.
_SOME = "dprc_some_are_true"
# What torch wraps around a dispatch mode.
_WRAPPERS = ("torch/_dynamo/eval_frame.py", "torch/_compile.py")


@dataclass
class Storage:
    """One block of memory.

    Attributes:
        num_bytes: Its size.
        operator: What made it; None where it was there before.
        shape: Of the first tensor seen on it.
        phase: In which it was made.
        label: What it is for; None if nobody said.
        born: Number of the operator that made it.
        died: Number of the operator after which it was gone; None while it lives.
    """

    num_bytes: int
    operator: str | None
    shape: tuple[int, ...]
    phase: str
    label: str | None
    born: int
    died: int | None = None


@dataclass
class Peak:
    """The moment with the most live bytes.

    Attributes:
        num_bytes: How many.
        phase: Where.
        operator: What allocated last.
        alive: The storages of that moment.
    """

    num_bytes: int
    phase: str
    operator: str
    alive: list[Storage] = field(repr=False)


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes while it is entered.

    Args:
        phase_fn: Names the phase at any moment.
        record_operators: Keep (operator, output shapes) of each operator in ``operators``.

    Attributes:
        storages: All that were seen, dead and alive.
        operators: What ran, if it is recorded.
        peak_by_phase: Most bytes that lived when something was allocated in a phase.
    """

    def __init__(
        self, phase_fn: Callable[[], str] = lambda: "", *, record_operators: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase_fn = phase_fn
        self._record = record_operators
        self.operators: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        self._known: dict[int, Storage] = {}  # by the address of the storage's implementation
        self.storages: list[Storage] = []
        self._count = 0
        self._live = 0
        self._peak = (0, 0, "", "")  # bytes, operator number, phase, operator
        self.peak_by_phase: dict[str, int] = {}
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper costs more than what is measured

    def hold(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Count tensors that are there already; name what is counted already anew."""
        for tensor in tensors:
            self._see(tensor, None).label = label

    def peak(self) -> Peak:
        """Return the moment with the most live bytes so far."""
        num_bytes, moment, phase, operator = self._peak
        alive = [
            storage
            for storage in self.storages
            if storage.born <= moment and (storage.died is None or storage.died > moment)
        ]
        return Peak(num_bytes, phase, operator, alive)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count new storages as nothing: for memory that the real run takes elsewhere."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked often, by Python code alone
        if func is aten.add.Tensor and _in_place_outside_of_simulations(*args):
            func = aten.add_.Tensor
        output = answer(func, args, kwargs)
        self._count += 1
        leaves = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._see(tensor, func)
        if self._record and not self._paused:
            self.operators.append((str(func), tuple(tuple(t.shape) for t in made)))
        return output

    def _see(self, tensor: torch.Tensor, func: Any) -> Storage:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._known:
            return self._known[key]
        operator = None if func is None else str(func)
        size = 0 if self._paused else memory.nbytes()
        storage = Storage(size, operator, tuple(tensor.shape), self._phase_fn(), None, self._count)
        self._known[key] = storage
        self.storages.append(storage)
        weakref.finalize(memory, self._forget, key, storage).atexit = False
        self._live += storage.num_bytes
        if self._live > self.peak_by_phase.get(storage.phase, 0):
            self.peak_by_phase[storage.phase] = self._live
        if self._live > self._peak[0]:
            self._peak = (self._live, self._count, storage.phase, operator or "")
        return storage

    def _forget(self, key: int, storage: Storage) -> None:
        if self._known.get(key) is storage:
            del self._known[key]
        storage.died = self._count + 1
        self._live -= storage.num_bytes


def _in_place_outside_of_simulations(first: Any, second: Any, *_: Any) -> bool:
    """Tell whether autograd adds two gradients that meet, in place if the tensors were plain.

    It does where nobody else holds the first one, but never while a dispatch mode is active.
    """
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    if frame.f_code.co_name != "_engine_run_backward":
        return False
    # Besides autograd's buffer, the call itself holds the tensor three times and its storage once.
    memory = first.untyped_storage()
    held: int = first._use_count()  # type: ignore[attr-defined]
    return held <= 4 and torch._C._storage_Use_Count(memory._cdata) <= 2


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; what depends on values that a fake tensor lacks is answered for the worst.

    The values asked for in a training step are: is a sample excluded, does it reach another's rows
    (no), is any clip factor not 1 (yes), how many were clipped (none), which ids differ (all),
    which rows of an embedding lie in a block (all). Two fake tensors are equal where they are the
    same memory.
    """
    first = args[0] if args else None
    if isinstance(first, FakeTensor):
        if func in _ANSWERS:
            return _ANSWERS[func](*args, **kwargs)
        if func in _VIEWS:
            # As the fake mode does in the end, without its bookkeeping: a third of the time.
            with in_kernel_invocation_manager(first.fake_mode):
                return FakeTensor(first.fake_mode, func(*args, **kwargs), first.fake_device)
    output = func(*args, **kwargs)
    if func is aten.ne.Scalar or (func is aten.any.default and hasattr(first, _SOME)):
        setattr(output, _SOME, True)
    return output


def _scalar(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return hasattr(tensor, _SOME)
    return 1.0 if tensor.is_floating_point() else 0


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    def place(tensor: torch.Tensor) -> Any:
        memory = tensor.untyped_storage()._cdata
        return memory, tensor.storage_offset(), tensor.shape, tensor.stride()

    return bool(place(first) == place(second))


def _unique(
    tensor: torch.Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[torch.Tensor, ...]:
    distinct = torch.empty_like(tensor).flatten()
    others = [torch.empty_like(tensor, dtype=torch.long) for _ in range(2)]
    absent = tensor.new_empty(0, dtype=torch.long)
    return (
        distinct,
        others[0] if inverse else absent,
        others[1].flatten() if counts else absent,
    )


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    # Laid out by dimension, as the real operator does.
    return torch.empty(tensor.dim(), tensor.numel(), dtype=torch.long, device=tensor.device).t()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten._unique2.default: _unique,
    aten.nonzero.default: _nonzero,
}


# Views and in effect views, whose output has the dtype and device of their first argument.
_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass(frozen=True)
class ShapesOnlyStream(Stream):
    """A random stream without numbers, for fake tensors.

    Args:
        meter: Where the numbers count; None where they are not to be counted (numpy makes them on
            a CPU, outside of torch's allocator).
    """

    meter: MemoryMeter | None = None
    counted: bool = True

    def normal(
        self,
        shape: tuple[int, ...],
        position: Position,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return a tensor of the shape that the numbers would have."""
        del position
        if self.counted or self.meter is None:
            return torch.empty(shape, device=device, dtype=dtype)
        with self.meter.paused():
            return torch.empty(shape, device=device, dtype=dtype)

    def add_normal_(
        self,
        total: torch.Tensor,
        position: Position,
        *,
        deviation: float,
        part: tuple[int, torch.Size] | None = None,
    ) -> None:
        """Take the memory that noise takes: none on a CPU, where numpy adds it in chunks."""
        if self.counted:
            drawn = self.normal(
                tuple(total.shape), position, device=total.device, dtype=total.dtype
            )
            total.add_(drawn, alpha=deviation)
