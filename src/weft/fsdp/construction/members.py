"""The parameters that one `fully_shard` call shards. Those of nested units and ignored ones are not among them.

Parameters with equal mesh, dtypes, quantization and `requires_grad` form one group. A tied parameter that already
belongs to another unit stays in that unit, which then also registers the parameter's tensors in the modules of this
call.
"""

from typing import Any

import torch
from torch import nn

from weft.comm.groups import group_of
from weft.dtensor.uneven import UnevenDTensor, local_of
from weft.fsdp.autograd import retire
from weft.fsdp.composition import refuse_foreign
from weft.fsdp.construction.arguments import Request
from weft.fsdp.construction.first_values import bring_buffers, materialize
from weft.fsdp.construction.parameters import checked_parameter, cutting_of, dequantize_parameters, recipe_of
from weft.fsdp.group import ParameterGroup
from weft.fsdp.module import FSDPModule, kind_of
from weft.fsdp.parameter import Slot, Unsharded, record_of
from weft.fsdp.plan import GroupPlan
from weft.fsdp.precision import keeps_dtype
from weft.fsdp.runtime.start import equalize, rest
from weft.fsdp.unit import Unit
from weft.layout.layout import plan_layout
from weft.memory.buffer import sharded_axes
from weft.mesh import ranks_over
from weft.weak import alive


class Members:
    """The parameters that `fully_shard` shards in one call. `owners`: their modules, each with its name prefix."""

    def __init__(self, request: Request) -> None:
        """Collect and check the parameters; dequantize those that are quantized."""
        self._request = request
        self.owners = _owners(request.modules)
        differing = [module for module in self.owners if getattr(module, "differs_between_ranks", False)]
        self._differing = {inner for module in differing for inner in module.modules()}
        found = {p: slot for p, slot in _owned_parameters(self.owners).items() if p not in request.ignored}
        self._found = dequantize_parameters(found, request.policy)
        _refuse_sparse(self.owners, self._found)
        _refuse_shared_memory(self.owners, self._found)
        self._tied = [(p, slot, record) for p, slot in self._found.items() if (record := record_of(p)) is not None]
        self._check_tied()
        self._own = [self._member(p, slot) for p, slot in self._found.items() if record_of(p) is None]
        self._members: list[list[Unsharded]] = []

    def _member(self, parameter: nn.Parameter, slot: Slot) -> Unsharded:
        """Return how to shard a parameter that belongs to no other unit. Raises ValueError if it cannot be sharded."""
        request, name = self._request, slot.name
        choice, mesh, replicas = request.choice_of(parameter)
        where = f"parameter {name!r} of {kind_of(request.modules[0])}"
        parallel = checked_parameter(parameter, mesh, request.device, where, replicas)
        if parallel is None and any(owner() in self._differing for owner, _ in slot.owners):
            raise ValueError(
                f"{where} differs between ranks: other ranks hold other experts, but norms, checkpoints and a mesh "
                f"of these ranks would treat them as equal. Call experts.spread(mesh of these ranks) before fully_shard"
            )
        recipe = recipe_of(parameter, name, slot.owners, parallel, request.policy, request.device)
        reshard = request.reshard_after_forward
        if recipe.gathered.itemsize == 1 and isinstance(reshard, int) and not isinstance(reshard, bool):
            raise ValueError(
                f"reshard_after_forward={reshard}: shards of weights that remain quantized, such as {where}, cannot be "
                'gathered again; choose True or False, or compute="dequantize"'
            )
        cutting = cutting_of(parameter, name, choice, recipe.quantization)
        return Unsharded(parameter, parameter, slot, mesh, parallel, recipe, cutting)

    def _check_tied(self) -> None:
        """Raise ValueError if the unit that owns a tied parameter encloses this one, or has another dtype or format."""
        modules, policy, kind = self._request.modules, self._request.policy, kind_of(self._request.modules[0])
        for parameter, slot, tied in self._tied:
            if any(one in other.modules() for other in alive(tied.unit.modules) for one in modules):
                raise ValueError(
                    f"parameter {slot.name!r} of {kind} is already sharded, by a module around it: "
                    "call fully_shard bottom-up, children first"
                )
            asked = policy.resolve(parameter.dtype, keep=keeps_dtype(parameter)).compute
            narrow, computes = tied.group.recipe.quantization, tied.group.recipe.compute
            accepts = policy.quantize or (lambda name, parameter: False)
            if narrow != policy.param_quantization and (narrow is not None or accepts(slot.name, parameter)):
                differ = f"with param_quantization={narrow}, but this unit's is {policy.param_quantization}"
                fix = "exclude it from both with `quantize`"
            elif asked != computes:
                differ = f"that computes in {computes}, but this unit computes in {asked}"
                fix = "shard both modules in one call, fully_shard([...])"
            else:
                continue
            raise ValueError(
                f"parameter {slot.name!r} of {kind} is shared with {tied.name!r} of {tied.unit.kind}, a unit {differ}: "
                f"a shared parameter is gathered once. Use the same mp_policy for both units, or {fix}"
            )

    def groups(self) -> list[ParameterGroup]:
        """Fill meta tensors (`materialize`), and move CPU buffers to the device. Return the parameter groups, those of
        tensor-parallel slices first."""
        request, device = self._request, self._request.device
        for mesh in dict.fromkeys([request.mesh, *(each.mesh for each in self._own)]):
            here = {each.original: each.slot for each in self._own if each.mesh == mesh}
            real = materialize(self.owners, here, device, [group_of(mesh, axis) for axis in range(mesh.ndim)])
            for each in self._own:
                each.value = real.get(each.original, each.value)
        bring_buffers(self.owners, device)
        kinds: dict[Any, list[Unsharded]] = {}
        for each in sorted(self._own, key=lambda each: not (each.parallel and each.parallel.is_spread)):
            key = (each.mesh, each.original.dtype, each.recipe, each.original.requires_grad)
            kinds.setdefault(key, []).append(each)
        self._members, groups = [*kinds.values()], []
        for members in self._members:
            mesh, recipe = members[0].mesh, members[0].recipe
            placements = request.placements_on(mesh)
            layout = plan_layout(
                [tuple(local_of(each.value).shape) for each in members],
                ranks_over(mesh, sharded_axes(placements.optimizer)),
                itemsize=recipe.smallest_itemsize,
                granularities=[each.cutting[0] for each in members],
                dims=[each.cutting[1] for each in members],
            )
            plan = GroupPlan(layout, mesh, placements, recipe, device, request.offload)
            groups.append(ParameterGroup(plan, members))
        return groups

    def register(self, unit: Unit) -> None:
        """Replace the original parameters with the sharded ones of `unit`, which was made from `groups()`. Broadcast
        their values from the first replica to the others."""
        for group, members in zip(unit.groups, self._members):
            for record, member in zip(group.parameters, members):
                record.stands_for(member.original)
                retire(member.original)
            equalize(group)
            rest(group)
        unit.register()
        for _, mine, record in self._tied:
            record.slot.share(mine.owners)
            unit.tied.setdefault(record.unit, mine.name)
        for owner in self.owners:
            if any(parameter is not None for parameter in owner._parameters.values()):
                owner.register_load_state_dict_pre_hook(_copy_assigned)


def _owners(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """Return `modules` and their submodules outside of nested units, with their name prefixes."""
    names: dict[nn.Module, str] = {}
    seen: set[nn.Module] = {module for one in modules for module in one.modules() if isinstance(module, FSDPModule)}
    for path, module in (place for one in modules for place in one.named_modules(seen)):
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'the module itself'} is a {type(module).__name__} of torch.jit, whose parameters cannot be "
                f"replaced: shard the original module, and use torch.compile"
            )
        refuse_foreign(module, path)
        names[module] = f"{path}." if path else ""
    return names


def _owned_parameters(owners: dict[nn.Module, str]) -> dict[nn.Parameter, Slot]:
    """Return the parameters of `owners`, each with all modules and attribute names that share it."""
    slots: dict[nn.Parameter, Slot] = {}
    for module, prefix in owners.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, Slot(prefix + name, parameter)).add(module, name)
    return slots


def _refuse_sparse(owners: dict[nn.Module, str], found: dict[nn.Parameter, Slot]) -> None:
    """Raise ValueError for trainable embeddings with sparse gradients: flat gradient buffers are dense."""
    for module, prefix in owners.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            weight = module._parameters.get("weight")
            if weight in found and weight.requires_grad:
                where = prefix.removesuffix(".") or "the module itself"
                raise ValueError(
                    f"{type(module).__name__}(sparse=True), {where}: gradients of sharded parameters are dense; build "
                    "it with sparse=False, or name its weight in ignored_params"
                )


def _refuse_shared_memory(owners: dict[nn.Module, str], found: dict[nn.Parameter, Slot]) -> None:
    """Raise ValueError for a trainable parameter that shares memory with another parameter or a buffer: the shards are
    copies, so the other tensor would keep its initial values. Tensors without a `_span` are not compared."""
    places = [(_span(p), f"parameter {slot.name!r}", p.requires_grad) for p, slot in found.items()]
    for module, prefix in owners.items():
        buffers = module._buffers.items()
        places += [(_span(b), f"buffer {prefix + name!r}", False) for name, b in buffers if b is not None]
    known = sorted((*span, name, trains) for span, name, trains in places if span is not None)
    farthest: dict[tuple[str, bool], tuple[int, str]] = {}  # by (device, trains): the tensor that ends last
    for device, start, end, name, trains in known:
        for kind in {True, not trains}:  # frozen tensors may share memory with each other
            other_end, other = farthest.get((device, kind), (0, ""))
            if start < other_end:
                raise ValueError(
                    f"{other} shares memory with {name}, and one of them is trained: sharding copies the parameter, so "
                    "the other would keep its initial values. Register one nn.Parameter in both places, or clone() the "
                    "other tensor, or compute it from the parameter in forward"
                )
        farthest[device, trains] = max(farthest.get((device, trains), (0, "")), (end, name))


def _span(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """Return the device, the start and the end address of `tensor`, or None if it is not a plain dense tensor with
    memory. (In gaps between elements, other tensors may lie.)"""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided:
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    if reach > tensor.numel():
        return None
    start = tensor.data_ptr()  # 0 if the memory was freed, as by `untyped_storage().resize_(0)`
    return None if not start else (str(tensor.device), start, start + reach * tensor.itemsize)


def _copy_assigned(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *given: Any) -> None:
    """Let `load_state_dict(assign=True)` copy plain tensors and DTensors into sharded parameters: each rank copies its
    part before `module` assigns the rest, such as buffers. Collective for DTensors. Raises ValueError for values of
    another dtype, because a flat buffer keeps its dtype."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, UnevenDTensor) or not isinstance(value, torch.Tensor):
            continue
        if value.shape != parameter.shape:  # torch reports wrong shapes
            continue
        if value.dtype != parameter.dtype:
            raise ValueError(
                f"load_state_dict(assign=True): {prefix + name!r} is {value.dtype}, but the sharded parameter is "
                f"{parameter.dtype} and cannot change: leave out assign, so that the values are cast, or cast the "
                f"state dict, or convert the module before fully_shard"
            )
        if value is not parameter:
            with torch.no_grad():
                parameter.copy_(value)
        state_dict[prefix + name] = parameter
