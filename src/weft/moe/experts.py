"""The expert MLPs of one rank, computed together with grouped matrix products."""

import logging
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.dtensor.tensor_parallel import EXPERT
from weft.fsdp.gradients.direct import local_part
from weft.fsdp.gradients.products import is_scaled
from weft.moe.kinds import ACTS, CLAMP, GATED, Clamp
from weft.moe.mlp import activated
from weft.moe.parts import PARTS, part
from weft.moe.recompute import recomputed
from weft.moe.require import require, require_size
from weft.moe.source import INITIAL_STD, WeightSource

BACKENDS = ("grouped_mm", "loop")
ALIGNMENT_BYTES = 16
"""`torch.nn.functional.grouped_mm` requires strides that are multiples of this number of bytes."""

BIAS = "_bias"
"""The suffix of the names of biases, after the name of the projection."""

log = logging.getLogger(__name__)


class GroupedExperts(nn.Module):
    """The MLPs of this rank's experts, with one 3-D parameter per projection.

    Args:
        num_local_experts: the number of experts on this rank.
        hidden_size: the width of rows.
        intermediate_size: the inner width of each expert.
        act: the kind of MLP (see `weft.moe.mlp`).
        clamp: the constants of "clamped_swiglu".
        bias: whether each projection has a bias for every expert.
        backend: "grouped_mm" multiplies the rows of all experts in one call. "loop", the reference, makes one call per
            expert; the host waits for the `offsets` of `forward`. In three cases "grouped_mm" runs the loop and logs
            a warning: (1) The dtype is wider than fp32. (2) The size in bytes of `hidden_size` or of
            `intermediate_size` elements is not a multiple of 16. (3) `grouped_mm` leaves the gradients of experts
            without rows uninitialized, as on some GPUs.
        first_expert: the global number of the first expert on this rank. The initial weights of an expert depend on its
            global number, so they are the same on any rank.
        source: the source of the initial weights.
    """

    graph_scopes: ClassVar = {"forward": ("experts", None)}
    has_fixed_rows = False
    """Whether an expert gets the same number of rows in every call."""
    recomputes = False
    """Whether backward recomputes `forward`."""
    multiplied_parameters: ClassVar = ("gate_proj", "up_proj", "down_proj")
    """The names of the parameters that are weights of matrix products. These products support quantized weights. The
    other parameters are biases."""
    differs_between_ranks = False
    """Whether other ranks hold other experts of the same layer. `fully_shard` then requires `spread`."""
    fills_slices = True
    """Whether `reset_parameters` can fill only the local part of a DTensor. The values are the same as if it filled the
    whole tensor."""

    def __init__(
        self,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "silu",
        clamp: Clamp = CLAMP,
        bias: bool = False,
        backend: str = "grouped_mm",
        first_expert: int = 0,
        source: WeightSource | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_local_experts": num_local_experts, "hidden_size": hidden_size}
        for name, size in {**sizes, "intermediate_size": intermediate_size}.items():
            require_size(name, size)
        require("backend", backend, backend in BACKENDS, "'grouped_mm' or 'loop'")
        require("act", act, act in ACTS, " or ".join(map(repr, ACTS)))
        self.backend = backend
        self.act = act
        self.clamp = clamp
        self.first_expert = first_expert
        self.source = source or WeightSource()
        if act in GATED:
            self.gate_proj = nn.Parameter(torch.empty(num_local_experts, hidden_size, intermediate_size))
        self.up_proj = nn.Parameter(torch.empty(num_local_experts, hidden_size, intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, intermediate_size, hidden_size))
        if bias:
            for name, weight in list(self.named_parameters()):
                self.register_parameter(name + BIAS, nn.Parameter(weight.new_empty(weight.shape[0], weight.shape[2])))
        self.reset_parameters()

    def graph_refused(self, scope: str) -> str | None:
        """Return why `weft.Graphs` cannot capture this module's scope `scope` in a CUDA graph, or None if it can."""
        return (
            None
            if self.has_fixed_rows
            else "the number of rows of an expert changes between calls; set pad_to_capacity"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial weights, and biases of zero."""
        for name, weight in self.named_parameters(recurse=False):
            if name.endswith(BIAS):
                nn.init.zeros_(local_part(weight))
                continue
            how = vars(self).get(PARTS, {}).get(name)
            for number, expert in enumerate(local_part(weight), start=self.first_expert):
                source = self.source / str(number) / name
                if how is None or not how.is_cut:
                    source.normal_(expert, INITIAL_STD)
                    continue
                whole = expert.new_empty([*weight.shape[1:]])  # this rank keeps some columns of it
                source.normal_(whole, INITIAL_STD)
                expert.copy_(whole.narrow(how.dim - 1, *how.spans[0]))

    def spread(self, mesh: DeviceMesh) -> None:
        """Turn the parameters into DTensors that hold all experts, sharded over `mesh`.

        Call it before `fully_shard`. Gradient norms, optimizers and checkpoints then see each expert once, by its
        global number.

        `mesh`: a 1-D mesh of the ranks over which the experts are spread. With tensor parallelism inside experts, a 2-D
        mesh whose last axis is the tensor-parallel axis. Raises ValueError for a parameter (such as one of a
        parametrization) whose first dimension is not the number of experts on this rank.
        """
        count = self.up_proj.shape[0]
        for full_name, weight in list(self.named_parameters()):  # `parametrize` moves parameters to child modules
            if not weight.dim() or weight.shape[0] != count:
                raise ValueError(
                    f"{full_name} of {count} experts on this rank has shape {[*weight.shape]}: its first dimension "
                    "must be that of the experts, because each rank keeps the slices of its own experts"
                )
            inside, _, name = full_name.rpartition(".")
            beyond = weight.placements if isinstance(weight, DTensor) else ()
            spread = DTensor.from_local(local_part(weight.detach()), mesh, [Shard(0), *beyond], run_check=False)
            parameter = nn.Parameter(spread, requires_grad=weight.requires_grad)
            vars(parameter).update(vars(weight))
            setattr(parameter, EXPERT, True)
            self.get_submodule(inside).register_parameter(name, parameter)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Apply each expert to its rows; [rows, hidden] -> [rows, hidden]. The rows must be sorted by expert.

        `offsets`: [local experts] int32, the index after each expert's last row.
        """
        return recomputed(self._computed, rows, offsets) if self.recomputes else self._computed(rows, offsets)

    def _computed(self, rows: Tensor, offsets: Tensor) -> Tensor:
        names = (*self._parameters, *getattr(self, "parametrizations", ()))
        weights = {name: local_part(part(self, name)) for name in names}
        # Autocast does not cast for grouped_mm. In other products it leaves fp64 as it is.
        if torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows = rows.to(dtype)
            weights = {name: weight if is_scaled(weight) else weight.to(dtype) for name, weight in weights.items()}
        multiply = _loop
        if self.backend == "grouped_mm" and self._fits(rows, weights["up_proj"].shape):
            multiply = _grouped if len(rows) or is_scaled(weights["up_proj"]) else _nothing
        owner = _owners(rows, offsets) if "up_proj" + BIAS in weights else None

        def project(name: str, rows: Tensor) -> Tensor:
            output = multiply(rows, weights[name], offsets)
            return output if owner is None else output + weights[name + BIAS][owner]

        gate = project("gate_proj", rows) if self.act in GATED else None
        output = project("down_proj", activated(self.act, gate, project("up_proj", rows), self.clamp))
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)  # an expanded gradient has strides that grouped_mm refuses
        return output

    def _fits(self, rows: Tensor, shape: torch.Size) -> bool:
        if rows.dtype.itemsize > torch.float32.itemsize:
            _log_once(
                f"experts in {rows.dtype} run one after another: grouped_mm does not support dtypes wider than "
                f"torch.float32"
            )
            return False
        widths = {"hidden_size": shape[1], "intermediate_size": shape[2]}
        odd = [f"{name}={width}" for name, width in widths.items() if width * rows.itemsize % ALIGNMENT_BYTES]
        if odd:
            _log_once(
                f"experts with {' and '.join(odd)} in {rows.dtype} run one after another: "
                f"grouped_mm needs multiples of {ALIGNMENT_BYTES // rows.itemsize}"
            )
            return False
        if rows.is_cuda and not torch.compiler.is_compiling() and not leaves_zeros(rows.device, rows.dtype):
            _log_once(
                f"experts in {rows.dtype} run one after another: on {rows.device} torch's grouped_mm does not write "
                f"the gradients of experts without rows"
            )
            return False
        return True

    def extra_repr(self) -> str:
        experts, hidden_size, intermediate_size = self.up_proj.shape
        return f"{experts}, {hidden_size}, {intermediate_size}, act={self.act!r}, backend={self.backend!r}"


@cache
@torch.no_grad()
def leaves_zeros(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `grouped_mm` writes zeros to the gradients of experts without rows. The first call for a device
    and dtype runs a small product to find out."""
    side = 64
    rows = torch.ones(side, side, device=device, dtype=dtype)
    offsets = torch.tensor([0, side, side], dtype=torch.int32, device=device)
    dirt = torch.full((len(offsets), side, side), torch.nan, device=device, dtype=dtype)
    del dirt  # so that the allocator reuses this memory, full of NaN, for the product
    gradients = torch._grouped_mm(rows.t(), rows, offsets)
    return not gradients[0].count_nonzero() + gradients[2].count_nonzero()


def _grouped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:  # compilers know the operator in bf16 only
        return _outside_of_graphs(rows, weight, offsets)
    return F.grouped_mm(rows.contiguous(), weight, offs=offsets)


@torch.compiler.disable
def _outside_of_graphs(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return _grouped(rows, weight, offsets)


def _owners(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the expert of each row, [rows] int64."""
    numbers = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
    return torch.searchsorted(offsets, numbers, right=True)


def _nothing(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return an empty product for zero rows, without reading the offsets from the device."""
    return rows @ weight[0]


def _loop(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    products = [rows[start:end] @ expert for start, end, expert in zip(starts, ends, weight.unbind())]
    # `grouped_mm` also returns a row for each input row after the rows of the last expert.
    room = rows.new_zeros(len(rows) - ends[-1], weight.shape[-1])
    return torch.cat([*products, room])


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        log.warning(message)
