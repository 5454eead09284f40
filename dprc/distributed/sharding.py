"""Sharded models (FSDP2): each process holds some rows of every parameter.

A *part* of the model (a transformer block) is gathered whole while it computes; what lies outside
the parts (embeddings, the last norm, the head) is one more part, gathered from the first time one
of its modules is called until the optimizer steps.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from dprc.distributed.borders import add_borders
from dprc.distributed.group import Group, facts_of_model
from dprc.distributed.replication import refuse_other_model
from dprc.errors import PrivacyError
from dprc.precision import work_dtype
from dprc.processes import OneProcess
from dprc.schedules import Totals

_GATHER = "_dprc_gather"


def shard(
    model: nn.Module,
    *,
    parts: Sequence[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
) -> "Sharded":
    """Let all processes train one model, of which each holds a share of every parameter.

    Args:
        model: The same in all processes, bare, on the device of the process, and with its LoRA
            adapters; it is sharded in place, so the optimizer is to be made afterwards.
        parts: Modules that are gathered one at a time, in the order in which they are called. The
            elements of the model's lists of modules (transformer blocks) when None.
        param_dtype: What gathered parameters are rounded to, such as bfloat16; None keeps theirs.
            Shards, sums and the optimizer's state stay in the type of the parameters.

    Returns:
        What ``PrivacyEngine`` takes as ``processes``.

    Raises:
        PrivacyError: There is no process group; the model is wrapped or sharded already, or
            differs between processes; a parameter is in two parts.

    Guarantee: The noise of an entry of a parameter is that of a run in one process: it depends
        neither on who holds it nor on how many processes there are.
    """
    group = Group()
    OneProcess().check(model, "two_pass")
    group.agree(facts_of_model(model))
    chosen = _blocks(model) if parts is None else list(parts)
    _refuse_shared(model, chosen)
    device = next(model.parameters()).device.type
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (group.world_size,)),
        # Sums for plain training; those of an engine are its own, never rounded.
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
    }
    for module in chosen:
        fully_shard(module, reshard_after_forward=True, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    return Sharded(model, chosen)


class Sharded(Group):
    """Processes with a share of every parameter each; made by ``shard``.

    Args:
        model: Sharded.
        parts: Of it, sharded, without what lies outside.
    """

    in_step = True

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._model, self._parts = model, list(parts)
        self._left_fn: Callable[[Sequence[nn.Parameter]], None] | None = None
        for number, part in enumerate(self._parts):
            trained = [p for p in part.parameters() if p.requires_grad]
            add_borders(part, partial(self._leave, trained))
            # Said, not left to the order of the last forward pass: that is forgotten after the
            # first of two backward passes, and differs where a pass begins below the head.
            before = self._parts[max(number - 1, 0)]
            _fsdp(part).set_modules_to_backward_prefetch([_fsdp(before)])
        _fsdp(model).set_modules_to_backward_prefetch([_fsdp(model)])
        self._gather_outside()

    # --- what an engine asks --------------------------------------------------------------------

    def any_in_step(self, flag: bool) -> bool:
        """Whether any process has the flag."""
        return self.largest([flag])[0] > 0

    def whole(self, value: Any) -> Any:
        """Gather the rows of all processes, on the CPU of process 0; others get no rows."""
        if not isinstance(value, DTensor):
            return value
        gathered = value.full_tensor()
        return gathered.cpu() if self.rank == 0 else gathered.new_empty(0)

    def own(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this process's rows of a whole tensor."""
        if not isinstance(like, DTensor):
            return value
        first, rows = own_rows(like.shape, self.rank, self.world_size)
        return sharded_like(like, value[first : first + rows].to(like.device))

    def check(self, model: nn.Module, schedule: str) -> None:
        """Refuse another model, another kind of sharding, or the schedule that keeps everything."""
        refuse_other_model(model, self._model, "shard")
        if schedule != "two_pass":
            raise PrivacyError(
                f'schedule: {schedule!r} keeps what sharding saves. Use schedule="two_pass", or '
                "dprc.distributed.replicate()."
            )
        self.rest()
        for name, parameter in model.named_parameters():
            refuse_other_sharding(name, parameter, self.world_size)

    def refuse_unequal(self, named: Mapping[str, torch.Tensor]) -> None:
        """Accept them: each row has one process, from which all others gather it."""

    def make_totals(self, parameters: Sequence[torch.Tensor]) -> Totals:
        """Return the empty sums of a logical batch."""
        return ShardedTotals(parameters, self)

    def attach(self, left_fn: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Keep what lies outside the parts gathered for all backward passes of a step."""
        self._left_fn = left_fn
        _fsdp(self._model).set_reshard_after_backward(False, recurse=False)

    def detach(self) -> None:
        """Give the model back, sharded."""
        self._left_fn = None
        _fsdp(self._model).set_reshard_after_backward(True, recurse=False)
        self.rest()

    def rest(self) -> None:
        """Let go of what is gathered."""
        _fsdp(self._model).reshard()

    # --- internals ------------------------------------------------------------------------------

    def _leave(self, trained: Sequence[nn.Parameter]) -> None:
        if self._left_fn is not None:
            self._left_fn(trained)

    def _gather_outside(self) -> None:
        """Gather what lies outside the parts whichever of its modules is called first.

        A loss may call backbone and head one by one, past the model's own forward.
        """
        model: Any = self._model
        setattr(model, _GATHER, _no_forward)
        register_fsdp_forward_method(model, _GATHER)
        inside = {id(module) for part in self._parts for module in part.modules()}

        def gather(module: nn.Module, *_: Any) -> None:
            own = module._parameters.values()
            if any(isinstance(parameter, DTensor) for parameter in own):
                getattr(model, _GATHER)()

        for module in self._model.modules():
            if id(module) not in inside and module is not self._model:
                module.register_forward_pre_hook(gather, prepend=True)
        # The model must come first once, so that it is the root of its parts.
        with torch.no_grad():
            getattr(model, _GATHER)()
        self.rest()


class ShardedTotals(Totals):
    """Clipped sums, of which each process keeps its share of rows, in full precision.

    The sum of a part's parameters is added up over processes as soon as the backward pass has left
    it, and let go: the whole model's never exist at once.

    Args:
        parameters: Sharded.
        group: Of all processes.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: Sharded) -> None:
        self._sharded = [_dtensor(parameter) for parameter in parameters]
        super().__init__([_whole_without_memory(each) for each in self._sharded])
        self._group = group
        self._own: dict[int, torch.Tensor] = {}

    def reduce(self, parameters: Sequence[int]) -> None:
        """Add up over processes what there is of some parameters, and keep this one's rows."""
        totals = [super(ShardedTotals, self).pop(parameter) for parameter in parameters]
        shares = _reduce_scattered(totals, self._group.world_size) if totals else []
        for parameter, share in zip(parameters, shares, strict=True):
            own = share[: self._sharded[parameter].to_local().shape[0]]
            if parameter in self._own:
                self._own[parameter] += own
            else:
                self._own[parameter] = own.clone()  # alone, without the rows of padding

    def finish_batch(self) -> None:
        """Add up what no part's border has: all processes alike, whoever has some."""
        there = [int(number in self._totals) for number in range(len(self._sharded))]
        for parameter, any_has in enumerate(self._group.largest(there)):
            if any_has:  # one by one: an embedding is large enough alone
                self.reduce([parameter])

    def pop(self, parameter: int) -> torch.Tensor:
        """Take this process's rows of a parameter's sum over all processes out."""
        own = self._own.pop(parameter, None)
        if own is not None:
            return own
        like = self._sharded[parameter]
        return torch.zeros_like(like.to_local(), dtype=work_dtype(like.dtype))

    def part(self, parameter: int) -> tuple[int, torch.Size]:
        """Return which rows ``pop`` gives."""
        shape = self._sharded[parameter].shape
        first, _ = own_rows(shape, self._group.rank, self._group.world_size)
        return first * shape[1:].numel(), shape

    def as_gradient(self, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """Return rows in the form of a sharded parameter's ``.grad``."""
        return sharded_like(self._sharded[parameter], value)


def own_rows(shape: torch.Size, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first row of a process, and how many it has: the last ones may have none."""
    each = -(-shape[0] // world_size)
    first = min(rank * each, shape[0])
    return first, min(each, shape[0] - first)


def sharded_like(like: DTensor, rows: torch.Tensor) -> DTensor:
    """Return a tensor that is laid out as another one, of the rows of each process."""
    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def refuse_other_sharding(name: str, parameter: torch.Tensor, world_size: int) -> None:
    """Refuse a parameter that is not cut into rows, once, over all processes."""
    if not isinstance(parameter, DTensor):
        raise PrivacyError(
            f"{name}: is not sharded: it came after dprc.distributed.shard(), or was replaced. "
            "Build the whole model first."
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    rows = len(placements) == 1 and type(placements[0]) is Shard and placements[0].dim == 0
    if mesh.ndim != 1 or mesh.size() != world_size or not rows:
        raise PrivacyError(
            f"{name}: is laid out as {tuple(map(str, placements))} over {mesh.ndim} mesh "
            f"dimension(s) of {mesh.size()} processes. Tensor, pipeline and hybrid (HSDP) "
            "parallelism are not supported: leave the model plain and let dprc.distributed.shard() "
            f"cut it into rows over all {world_size} processes."
        )


def _dtensor(parameter: torch.Tensor) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise PrivacyError("a parameter of a sharded model is gathered; call engine.step() first")
    return parameter


def _fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise PrivacyError(f"{type(module).__name__}: lost its sharding after shard()")
    return module


def _whole_without_memory(parameter: DTensor) -> torch.Tensor:
    """Return a tensor of the whole parameter's shape, type and device, of one entry in memory."""
    return parameter.to_local().new_zeros(()).expand(parameter.shape)


def _reduce_scattered(totals: Sequence[torch.Tensor], world_size: int) -> list[torch.Tensor]:
    """Sum over processes, all at once; return this one's rows of each, zeros behind the last."""
    if len({total.dtype for total in totals}) > 1:
        return [own for total in totals for own in _reduce_scattered([total], world_size)]
    shapes, cut = [], []
    for total in totals:
        rows = -(-total.shape[0] // world_size)
        padding = rows * world_size - total.shape[0]
        if padding:
            total = torch.cat([total, total.new_zeros(padding, *total.shape[1:])])
        shapes.append((rows, *total.shape[1:]))
        cut.append(total.reshape(world_size, -1))  # a line for each process
    lines = cut[0] if len(cut) == 1 else torch.cat(cut, dim=1)
    own = lines.new_empty(lines.shape[1])
    # Newer versions of torch have another name for it.
    scatter = getattr(distributed, "reduce_scatter_single", None)
    (scatter or distributed.reduce_scatter_tensor)(own, lines.reshape(-1))
    each = torch.split(own, [line.shape[1] for line in cut])
    return [rows.view(shape) for rows, shape in zip(each, shapes, strict=True)]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost lists of modules."""
    found: list[nn.Module] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{p}.") for p in lists):
            lists.append(path)
            found += [each for each in module if any(True for _ in each.parameters())]
    return list(dict.fromkeys(found))


def _refuse_shared(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Refuse a parameter that two parts have, or a part and what lies outside."""
    owner: dict[int, tuple[str, str]] = {}
    prefixes = {id(module): path for path, module in model.named_modules()}
    paths = [prefixes.get(id(part)) for part in parts]
    for part, path in zip(parts, paths, strict=True):
        if path is None or part is model:
            raise PrivacyError(f"parts: {type(part).__name__} is not a module inside the model")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((path for path in paths if path and name.startswith(f"{path}.")), "")
        first, known = owner.setdefault(id(parameter), (name, inside))
        if known != inside:
            raise PrivacyError(
                f"{name}: is the same parameter as {first}, and they are in different parts of the "
                "model. Name parts= so that both are in one, or outside all."
            )


def _no_forward() -> None:
    """Stand in for a forward pass that only gathers."""
