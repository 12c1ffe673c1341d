"""Decode steps as CUDA graphs: one launch per step instead of some three hundred.

A graph is fixed in its sizes, so a step is padded to the next power of two of rows and of table width. A
padding row computes a token at position 0 of the pad block, which belongs to nobody.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from engine_stub.model import torch_steps
from engine_stub.model.torch_steps import Step, Tensor
from engine_stub.scheduler.plan import StepItem
from engine_stub.scheduler.sequence import GREEDY, NO_IDS

MAX_GRAPHS = 24
"""Graphs kept; the one that wasn't used for longest goes first."""
SMALLEST_WIDTH = 16

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Record a computation: how to run it again, and the tensor that it fills."""


class _Graph(msgspec.Struct, frozen=True):
    step: Step
    replay: Replay
    logits: Tensor


class DecodeGraphs:
    """Runs decode steps by replay. `run` computes a step's logits; block `pad_block` of the pool is spare."""

    def __init__(
        self,
        run: Callable[[Step], Tensor],
        *,
        block_size: int,
        pad_block: int,
        device: Any,
        capture: Capture | None = None,
    ) -> None:
        self._run = run
        self._block_size = block_size
        self._pad_block = pad_block
        self._device = device
        self._capture = capture or cuda_capture()
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()

    def forward(self, items: Sequence[StepItem]) -> Tensor:
        """Logits `[items, vocab]` of items of one token each, all of which want theirs. Valid until the next call."""
        rows = _power_of_two(len(items), 1)
        width = _power_of_two(max(-(-item.end // self._block_size) for item in items), SMALLEST_WIDTH)
        padding = [self._padding()] * (rows - len(items))
        fresh = torch_steps.of_items([*items, *padding], self._block_size, 1, "cpu", table_width=width)
        graph = self._graphs.get((rows, width))
        if graph is None:
            graph = self._graphs[rows, width] = self._record(fresh)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end((rows, width))
            torch_steps.overwrite(graph.step, fresh)
        graph.replay()
        return graph.logits[: len(items)]

    def _record(self, fresh: Step) -> _Graph:
        step = torch_steps.to_device(fresh, self._device)
        # The graph must cover all contexts of its width, not only this step's.
        tiles = [msgspec.structs.replace(step.tiles[0], longest=step.tables.shape[1] * self._block_size)]
        step = msgspec.structs.replace(step, tiles=tiles)
        replay, logits = self._capture(lambda: self._run(step))
        return _Graph(step, replay, logits)

    def _padding(self) -> StepItem:
        return StepItem("", [0], 0, [self._pad_block], True, False, GREEDY, None, None, NO_IDS, (), ())


def cuda_capture() -> Capture:
    """Capture by CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        # Compiles kernels and fills library caches outside of the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = compute()
        return graph.replay, logits

    return capture


def _power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
