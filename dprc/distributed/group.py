"""What the processes of a job say to each other, apart from sums of gradients."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.utils._pytree import tree_flatten

from dprc.errors import PrivacyError

_Value = TypeVar("_Value")
_SHOWN = 80  # characters of a value in a message
# Not told in messages, which end in logs: whoever knows the seed knows the noise.
_SECRET = ("privacy_seed",)
_CHUNK = 2**20


class Group:
    """All processes of torch's default process group.

    Attributes:
        rank: Which of them this is, from 0.
        world_size: How many there are.

    Raises:
        PrivacyError: There is none.
    """

    def __init__(self) -> None:
        if not distributed.is_available() or not distributed.is_initialized():
            raise PrivacyError(
                "torch.distributed: has no process group. Call dprc.distributed.start() first, "
                "under torchrun."
            )
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse, in all processes, what is not the same in all."""
        everyone = self._gather({name: repr(value) for name, value in facts.items()})
        for name in dict.fromkeys(name for each in everyone for name in each):
            values = [each.get(name, "missing") for each in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    error = PrivacyError(
                        f"{name}: differs between processes"
                        f"{_difference(name, values[0], value, rank)}. Start all processes with "
                        "the same settings, model and data."
                    )
                    raise self._told(error)

    def from_first(self, value: _Value) -> _Value:
        """Return what process 0 has."""
        values: list[Any] = [value if self.rank == 0 else None]
        distributed.broadcast_object_list(values, src=0)
        result: _Value = values[0]
        return result

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over the processes."""
        return self._reduced(numbers, distributed.ReduceOp.SUM)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return maxima over the processes."""
        return self._reduced(numbers, distributed.ReduceOp.MAX)

    def led(self, action_fn: Callable[[], _Value]) -> _Value:
        """Let process 0 act; return what comes of it, or raise its error, in all."""
        answer: tuple[Any, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                answer = (action_fn(), None)
            except Exception as error:
                answer = (None, error)
        value, failed = self.from_first(answer)
        if failed is not None:
            raise self._told(failed)
        result: _Value = value
        return result

    def whole(self, value: Any) -> Any:
        """Return the value, which is whole."""
        return value

    def own(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which is for this process as it is."""
        return value

    def check_dataset(self, dataset: Any, facts: Mapping[str, object]) -> None:
        """Refuse a dataset that is not the same, and whole, in all processes.

        Its length is compared, and its first and last item where reading them twice gives the same.

        Raises:
            PrivacyError: It differs: each process has a share of its own, for one.
        """
        size = len(dataset)
        items = {}
        for name, index in (("first", 0), ("last", size - 1)):
            if size > 0:
                once, again = (digest(dataset[index]) for _ in range(2))
                items[f"{name} item"] = once if once == again else "random"
        try:
            self.agree({"number of items": size, **items})
        except PrivacyError as error:
            refusal = PrivacyError(
                f"dataset: {error} Give each process the whole dataset: the loader deals out "
                "shares itself, so a dataset split by rank would be split twice."
            )
            raise self._told(refusal) from None
        self.agree(facts)

    def _told(self, error: Exception) -> Exception:
        """Mark an error that all processes have, so that one of them is enough to print it."""
        error.told_by_another = self.rank > 0  # type: ignore[attr-defined]
        return error

    def _gather(self, value: _Value) -> list[_Value]:
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def _reduced(self, numbers: Sequence[float], how: Any) -> list[float]:
        backend = distributed.get_backend()
        device = "cuda" if "nccl" in backend and "gloo" not in backend else "cpu"
        # Counts are exact in it, up to 2**53.
        values = torch.tensor(list(numbers), dtype=torch.float64, device=device)
        distributed.all_reduce(values, op=how)
        result: list[float] = values.tolist()
        return result


def _difference(name: str, first: str, other: str, rank: int) -> str:
    if name in _SECRET or max(len(first), len(other)) > _SHOWN:
        return ""
    return f": {first} in process 0, {other} in process {rank}"


def facts_of_model(model: nn.Module) -> dict[str, object]:
    """Return what must be the same of a model in all processes: names, shapes, values, devices.

    A GPU of another kind draws other numbers from the same seed, as a CPU does: replicas would add
    other noise to the same sum, and shards might share some.
    """
    facts: dict[str, object] = {}
    for device in dict.fromkeys(parameter.device for parameter in model.parameters()):
        facts[f"kind of device {len(facts)}"] = kind_of_device(device)
    for name, parameter in model.named_parameters():
        facts[f"parameter {name}"] = (
            tuple(parameter.shape),
            str(parameter.dtype),
            "trained" if parameter.requires_grad else "frozen",
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        facts[f"initial value of {name}"] = checksum(tensor)
    return facts


def kind_of_device(device: torch.device) -> str:
    """Return what decides which numbers a device draws from a seed."""
    if device.type != "cuda":
        return device.type
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} of {about.multi_processor_count} multiprocessors"


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that tells tensors of other values apart, made where the tensor is."""
    total = 0
    for number, chunk in enumerate(torch.split(_bits(tensor), _CHUNK)):
        places = torch.arange(1, len(chunk) + 1, device=chunk.device)
        # Wraps around, which is all right: it does so alike everywhere.
        total += (number + 1) * int((chunk.to(torch.int64) * places).sum())
    return total % 2**64


def bit_sum(tensor: torch.Tensor) -> int:
    """Return a number below 2**52 that changes where tensors part by chance; one pass over it."""
    chunks = torch.split(_bits(tensor), _CHUNK)
    return int(torch.stack([chunk.sum(dtype=torch.int64) for chunk in chunks]).sum()) % 2**52


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as integers."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(kinds[flat.itemsize])


def digest(item: Any) -> str:
    """Return a hash of an item of a dataset: tensors, arrays and plain values, nested.

    Of anything else the type alone, for it may be written in another way in each process.
    """
    leaves, structure = tree_flatten(item)
    hashed = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            leaf = (str(leaf.dtype), tuple(leaf.shape), checksum(leaf))
        elif hasattr(leaf, "tobytes"):
            leaf = leaf.tobytes()
        elif not isinstance(leaf, (str, bytes, int, float, type(None))):
            leaf = type(leaf).__name__
        hashed.update(repr(leaf).encode())
    return hashed.hexdigest()[:16]
