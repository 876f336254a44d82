"""The parameters that one `fully_shard` call shards: all in its modules that belong to no nested unit.

parameter                                     treatment
--------------------------------------------  ------------------------------------------------------------------
in a nested unit, or in `ignored_params`      unchanged
shared with another unit                      tied: it remains that unit's, and is registered here as well
on the meta device                            materialized before it is sharded, if its module can initialize it
with equal mesh, dtypes and `requires_grad`   members of one group
"""

import weakref
from typing import Any

import torch
from torch import nn

from weft.comm.groups import group_of
from weft.fsdp.composition import refuse_foreign
from weft.fsdp.construction.arguments import Request
from weft.fsdp.construction.assignment import copy_assigned
from weft.fsdp.construction.atomic import choice_of, granularity_of
from weft.fsdp.construction.first_values import bring_buffers, materialize
from weft.fsdp.construction.parameters import checked_parameter
from weft.fsdp.construction.quantized import demands, dequantize_parameters, recipe_of, uncut
from weft.fsdp.group import ParameterGroup
from weft.fsdp.module import FSDPModule, kind_of
from weft.fsdp.originals import retire
from weft.fsdp.parameter import Slot, Unsharded, record_of
from weft.fsdp.plan import GroupPlan
from weft.fsdp.precision import keeps_dtype
from weft.fsdp.runtime.start import equalize, rest
from weft.fsdp.unit import Unit


class Members:
    """The modules in `request.modules` outside of nested units (`owners`, with names), and their parameters."""

    def __init__(self, request: Request) -> None:
        """Collect and check the parameters; dequantize those that are quantized. Raises ValueError for one that cannot
        be sharded."""
        self._request = request
        self.owners = _owners(request.modules)
        found = {p: slot for p, slot in _owned_parameters(self.owners).items() if id(p) not in request.ignored}
        self._found = dequantize_parameters(found, request.policy)
        _refuse_sparse(self.owners, self._found)
        self._tied = [(p, slot, record) for p, slot in self._found.items() if (record := record_of(p)) is not None]
        self._refuse_outside_in()
        self._refuse_other_precision()
        self._own = [self._member(p, slot) for p, slot in self._found.items() if record_of(p) is None]
        self._members: list[list[Unsharded]] = []

    def _member(self, parameter: nn.Parameter, slot: Slot) -> Unsharded:
        """Return how to shard a parameter that belongs to no other unit. Raises ValueError if it cannot be sharded."""
        request, name = self._request, slot.name
        choice, own_mesh, replicas = choice_of(parameter, request.choose, request.mesh, request.replicas)
        mesh = request.checked_own_mesh(own_mesh)
        where = f"parameter {name!r} of {kind_of(request.modules[0])}"
        parallel = checked_parameter(parameter, mesh, request.device, where, replicas)
        recipe = recipe_of(parameter, name, slot.owners, parallel, request.policy, request.device)
        cutting = uncut(parameter, name, granularity_of(parameter, name, choice), recipe.quantization)
        return Unsharded(parameter, parameter, slot, mesh, parallel, recipe, cutting)

    def _refuse_outside_in(self) -> None:
        """Raise ValueError for a parameter that an enclosing unit has already sharded."""
        modules = self._request.modules
        for _, slot, tied in self._tied:
            around = [one for ref in tied.unit.modules if (one := ref()) is not None]
            if any(one in other.modules() for other in around for one in modules):
                raise ValueError(
                    f"parameter {slot.name!r} of {kind_of(modules[0])} is already sharded, by a module around it: "
                    f"call fully_shard bottom-up, children first"
                )

    def _refuse_other_precision(self) -> None:
        """Raise ValueError for a parameter of another unit that is gathered in another dtype or quantization."""
        policy, kind = self._request.policy, kind_of(self._request.modules[0])
        for parameter, slot, tied in self._tied:
            asked = policy.resolve(parameter.dtype, keep=keeps_dtype(parameter)).compute
            narrow, computes = tied.group.recipe.quantization, tied.group.recipe.compute
            if narrow != policy.param_quantization and (narrow is not None or demands(policy, slot.name, parameter)):
                raise ValueError(
                    f"parameter {slot.name!r} of {kind} is shared with {tied.name!r} of {tied.unit.kind}, a unit with "
                    f"param_quantization={narrow}, but this unit's is {policy.param_quantization}: a shared parameter "
                    f"is gathered once. Use the same mp_policy for both units, or exclude it from both with `quantize`"
                )
            if asked != computes:
                raise ValueError(
                    f"parameter {slot.name!r} of {kind} is shared with {tied.name!r} of {tied.unit.kind}, a unit that "
                    f"computes in {computes}, but this unit computes in {asked}: a shared parameter is gathered once. "
                    f"Use the same mp_policy for both units, or shard both modules in one call, fully_shard([...])"
                )

    def groups(self) -> list[ParameterGroup]:
        """Materialize parameters on the meta device, and return the parameter groups."""
        self._materialize()
        self._members = self._by_kind()
        return [self._group(members) for members in self._members]

    def _materialize(self) -> None:
        device = self._request.device
        for mesh in dict.fromkeys([self._request.mesh, *(each.mesh for each in self._own)]):
            here = {each.original: each.slot for each in self._own if each.mesh == mesh}
            real = materialize(self.owners, here, device, [group_of(mesh, axis) for axis in range(mesh.ndim)])
            for each in self._own:
                each.value = real.get(each.original, each.value)
        bring_buffers(self.owners, device)

    def _by_kind(self) -> list[list[Unsharded]]:
        """Return the members of each group; groups with tensor-parallel slices come first."""
        kinds: dict[Any, list[Unsharded]] = {}
        for each in sorted(self._own, key=lambda each: not (each.parallel and each.parallel.is_spread)):
            key = (each.mesh, each.original.dtype, each.recipe, each.original.requires_grad)
            kinds.setdefault(key, []).append(each)
        return list(kinds.values())

    def _group(self, members: list[Unsharded]) -> ParameterGroup:
        request, mesh, recipe = self._request, members[0].mesh, members[0].recipe
        plan = GroupPlan.of(members, mesh, request.placements_on(mesh), recipe, request.device, request.offload)
        return ParameterGroup(plan, members)

    def register(self, unit: Unit) -> None:
        """Replace the original parameters with the sharded ones of `unit`, which was made from `groups()`."""
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
                owner.register_load_state_dict_pre_hook(copy_assigned)


def _owners(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """Return `modules` and their submodules outside of nested units, with their name prefixes."""
    names: dict[nn.Module, str] = {}
    ahead = [(module, "") for module in reversed(modules)]
    while ahead:
        module, name = ahead.pop()
        if isinstance(module, FSDPModule) or module in names:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name.removesuffix('.') or 'the module itself'} is a {type(module).__name__} of torch.jit, whose "
                f"parameters cannot be replaced: shard the original module, and use torch.compile"
            )
        refuse_foreign(module, name)
        names[module] = name
        children = [(child, f"{name}{key}.") for key, child in module._modules.items() if child is not None]
        ahead.extend(reversed(children))
    return names


def _owned_parameters(owners: dict[nn.Module, str]) -> dict[nn.Parameter, Slot]:
    """Return the parameters of `owners`, each with all modules and attribute names that share it."""
    slots: dict[nn.Parameter, Slot] = {}
    for module, prefix in owners.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slot = slots.setdefault(parameter, Slot(prefix + name, parameter))
                slot.owners.append((weakref.ref(module), name))
    return slots


def _refuse_sparse(owners: dict[nn.Module, str], found: dict[nn.Parameter, Slot]) -> None:
    """Raise ValueError for embeddings with sparse gradients: flat gradient buffers are dense."""
    for module, prefix in owners.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            weight = module._parameters.get("weight")
            if weight is not None and weight in found and weight.requires_grad:
                where = prefix.removesuffix(".") or "the module itself"
                raise ValueError(
                    f"{type(module).__name__}(sparse=True), {where}: gradients of sharded parameters are dense; build "
                    "it with sparse=False, or name its weight in ignored_params"
                )
