"""Where the backward pass of a loss may be cut in two.

All that a loss sends to the trained layers passes some tensors whole: the last hidden states, for
one. The gradients of two differently weighted sums of losses differ there, and above, by the weight
of each sample alone. So of two backward passes the second may start at such a tensor, and what lies
above (the loss, the head, frozen layers) is gone through once.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node

from dprc.graph import delivers, is_anchor, is_border, keeps_little

# Layers above the cut whose factors are kept, as book-keeping would: the head.
KEPT_LAYERS = 1


class Cut(NamedTuple):
    """An edge of the graph, and how it was come by.

    Attributes:
        edge: Where the second backward pass may start.
        way: The names of the nodes above, and the shape of the edge's gradient but for its sizes:
            the same for batches that went the same way through the model.
    """

    edge: GradientEdge
    way: tuple[str, ...]


def find_cut(losses: torch.Tensor, leading: tuple[int, ...]) -> Cut | None:
    """Find the lowest edge that the gradients of all layers but the kept ones pass.

    That its first axis is the samples is for the caller to check, once for each ``way``: a size may
    be that of the batch by chance.

    Args:
        losses: (B,), one for each sample.
        leading: Sizes that the first axis of the edge's gradient may have for its samples to be
            told apart.

    Returns:
        The cut; None if there is none below the losses themselves.
    """
    start = losses.grad_fn
    if start is None:
        return None
    found: Cut | None = None
    above: list[str] = []
    kept = 0
    missing = _edges_into(start)
    outputs: dict[Node, set[int]] = {}
    # Nodes that an edge leads to from those gone through. Gone through in topological order: when
    # one node alone is left, whatever lies below is reached through it.
    reached, ready = {start}, [start]
    while ready:
        node = ready.pop()
        onward = _after(node)
        if not onward:
            continue  # stays reached: what ends here passes nothing that lies below
        if len(reached) == 1 and node is not start:
            found = _cut(node, outputs[node], leading, above) or found
        kept += delivers(node) and not keeps_little(node)
        if kept > KEPT_LAYERS or is_border(node) or _runs_backward_inside(node):
            break
        reached.remove(node)
        above.append(node.name())
        for after, number in onward:
            reached.add(after)
            outputs.setdefault(after, set()).add(number)
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
    return found


def _edges_into(start: Node) -> Counter[Node]:
    """Count the edges into each node of the graph below one."""
    edges: Counter[Node] = Counter()
    pending = [start]
    while pending:
        for after, _ in _after(pending.pop()):
            if after not in edges:
                pending.append(after)
            edges[after] += 1
    return edges


def _after(node: Node) -> list[tuple[Node, int]]:
    return [
        (after, number)
        for after, number in node.next_functions
        if after is not None and not is_anchor(after)
    ]


def _cut(node: Node, outputs: set[int], leading: tuple[int, ...], above: list[str]) -> Cut | None:
    if len(outputs) != 1:
        return None
    (number,) = outputs
    shape = node._input_metadata[number].shape
    if len(shape) == 0 or shape[0] not in leading:
        return None
    return Cut(
        GradientEdge(node, number),
        (*above, node.name(), f"{len(shape)} axes", f"size {leading.index(shape[0])}"),
    )


def _runs_backward_inside(node: Node) -> bool:
    """Whether a node is a reentrant checkpoint, which must not be asked for single gradients."""
    return "Checkpoint" in node.name()
