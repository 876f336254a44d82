"""The parameters that one `fully_shard` call shards: those that no unit below has, and what becomes of each.

parameter                                     becomes
--------------------------------------------  ------------------------------------------------------------------
of a unit below, or in `ignored_params`       nothing: it is left alone
that another unit has already                 tied: it stays theirs, and is registered here as well
on the meta device                            real, where its module can fill it, before it is cut
with equal mesh, dtypes and `requires_grad`   members of one group
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.groups import group_of
from weft.fsdp.composition import refuse_foreign
from weft.fsdp.construction.arguments import Request
from weft.fsdp.construction.assignment import copy_assigned
from weft.fsdp.construction.atomic import choice_of, granularity_of
from weft.fsdp.construction.first_values import bring_buffers, materialize
from weft.fsdp.construction.originals import retire
from weft.fsdp.construction.parameters import checked_parameter
from weft.fsdp.construction.quantized import demands, dequantize_parameters, recipe_of, uncut
from weft.fsdp.construction.start import equalize
from weft.fsdp.gradients.direct import home_of, register_owner
from weft.fsdp.group import ParameterGroup
from weft.fsdp.module import FSDPModule, kind_of
from weft.fsdp.plan import GroupPlan
from weft.fsdp.precision import Recipe, keeps_dtype
from weft.fsdp.slots import Slot
from weft.fsdp.unit import Unit


class Members:
    """What lies in `request.modules` outside of any unit below: `owners`, by name, and their parameters."""

    def __init__(self, request: Request) -> None:
        """Raises ValueError for what cannot be sharded; nothing is changed yet but parameters that came quantized."""
        self._request = request
        self.owners = _owners(request.modules)
        found = {p: slot for p, slot in _owned_parameters(self.owners).items() if id(p) not in request.ignored}
        self._found = dequantize_parameters(found, request.policy)
        _refuse_sparse(self.owners, self._found)
        self._tied = {parameter: home for parameter in self._found if (home := home_of(parameter)) is not None}
        self._refuse_outside_in()
        self._refuse_other_precision()
        self._own = {parameter: slot for parameter, slot in self._found.items() if parameter not in self._tied}
        asked = (request.choose, request.mesh, request.replicas)
        choices = {parameter: choice_of(parameter, *asked) for parameter in self._own}
        self._meshes = {parameter: request.checked_own_mesh(mesh) for parameter, (_, mesh, _) in choices.items()}
        kind = kind_of(request.modules[0])
        self._parallel = {
            parameter: checked_parameter(
                parameter,
                self._meshes[parameter],
                request.device,
                f"parameter {slot.name!r} of {kind}",
                choices[parameter][2],
            )
            for parameter, slot in self._own.items()
        }
        self._recipes = {
            p: recipe_of(p, slot.name, slot.owners, self._parallel[p], request.policy, request.device)
            for p, slot in self._own.items()
        }
        self._cutting = {
            p: uncut(p, slot.name, granularity_of(p, slot.name, choices[p][0]), self._recipes[p].quantization)
            for p, slot in self._own.items()
        }
        self._real: dict[nn.Parameter, Any] = {}
        self._members: list[list[nn.Parameter]] = []

    def _refuse_outside_in(self) -> None:
        """Raise for a parameter that a unit around the modules has; a unit beside them shares it."""
        modules = self._request.modules
        for parameter, (unit, *_) in self._tied.items():
            around = [one for ref in unit.modules if (one := ref()) is not None]
            if any(one in other.modules() for other in around for one in modules):
                raise ValueError(
                    f"parameter {self._found[parameter].name!r} of {kind_of(modules[0])} is sharded already, by a "
                    "module around it: call fully_shard bottom-up, children first"
                )

    def _refuse_other_precision(self) -> None:
        """Raise for a parameter of another unit that computes in another dtype: it is gathered once, in one dtype."""
        for parameter, (unit, group, number) in self._tied.items():
            asked = self._request.policy.resolve(parameter.dtype, keep=keeps_dtype(parameter)).compute
            policy, slot = self._request.policy, self._found[parameter]
            narrow = group.recipe.quantization
            if narrow != policy.param_quantization and (narrow is not None or demands(policy, slot.name, parameter)):
                raise ValueError(
                    f"parameter {slot.name!r} of {kind_of(self._request.modules[0])} is shared with "
                    f"{group.slots[number].name!r} of {unit.kind}, a unit with param_quantization={narrow}, and here "
                    f"mp_policy has {policy.param_quantization}: what is shared is gathered once. Give both units one "
                    "mp_policy, or let `quantize` leave it out of both"
                )
            if asked != group.recipe.compute:
                raise ValueError(
                    f"parameter {self._found[parameter].name!r} of {kind_of(self._request.modules[0])} is shared with "
                    f"{group.slots[number].name!r} of {unit.kind}, a unit that computes in {group.recipe.compute}, and "
                    f"here mp_policy asks for {asked}: what is shared is gathered once. Give both units one mp_policy, "
                    "or shard both modules in one call, fully_shard([...])"
                )

    def groups(self) -> list[ParameterGroup]:
        """Their parameter groups, with values for what was on the meta device."""
        self._materialize()
        kinds = self._by_kind()
        self._members = list(kinds.values())
        return [self._group(recipe, members) for (_, _, recipe, _), members in kinds.items()]

    def _materialize(self) -> None:
        device = self._request.device
        for mesh in dict.fromkeys([self._request.mesh, *self._meshes.values()]):
            here = {parameter: slot for parameter, slot in self._own.items() if self._meshes[parameter] == mesh}
            self._real |= materialize(self.owners, here, device, [group_of(mesh, axis) for axis in range(mesh.ndim)])
        bring_buffers(self.owners, device)

    def _by_kind(self) -> dict[tuple[DeviceMesh, torch.dtype, Recipe, bool], list[nn.Parameter]]:
        """What becomes one group each; those with tensor-parallel slices come first."""
        kinds: dict[tuple[DeviceMesh, torch.dtype, Recipe, bool], list[nn.Parameter]] = {}
        for parameter in sorted(self._own, key=lambda p: not ((tp := self._parallel[p]) and tp.is_spread)):
            recipe = self._recipes[parameter]
            key = (self._meshes[parameter], parameter.dtype, recipe, parameter.requires_grad)
            kinds.setdefault(key, []).append(parameter)
        return kinds

    def _group(self, recipe: Recipe, members: list[nn.Parameter]) -> ParameterGroup:
        request, mesh = self._request, self._meshes[members[0]]
        values = [self._real.get(p, p) for p in members]
        cutting = [self._cutting[p] for p in members]
        plan = GroupPlan.of(values, cutting, mesh, request.placements_on(mesh), recipe, request.device, request.offload)
        passing = [p in self._real for p in members]
        return ParameterGroup(
            plan, [self._own[p] for p in members], values, [self._parallel[p] for p in members], passing
        )

    def register(self, unit: Unit) -> None:
        """Put the sharded parameters of `unit`, which has the groups, in the place of the original ones."""
        for group, members in zip(unit.groups, self._members):
            register_owner(unit, group, [members])
            for original in members:
                retire(original)
            equalize(group)
        unit.register()
        for parameter, (other, group, number) in self._tied.items():
            mine = self._found[parameter]
            group.slots[number].share(mine.owners)
            unit.tied.setdefault(other, mine.name)
        for owner in self.owners:
            if any(parameter is not None for parameter in owner._parameters.values()):
                owner.register_load_state_dict_pre_hook(copy_assigned)


def _owners(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """The modules inside `modules`, outside of any unit below, with their names."""
    names: dict[nn.Module, str] = {}
    ahead = [(module, "") for module in reversed(modules)]
    while ahead:
        module, name = ahead.pop()
        if isinstance(module, FSDPModule) or module in names:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name.removesuffix('.') or 'the module itself'} is a {type(module).__name__} of torch.jit, whose "
                "parameters cannot be exchanged: shard the module that it was made from, and use torch.compile"
            )
        refuse_foreign(module, name)
        names[module] = name
        children = [(child, f"{name}{key}.") for key, child in module._modules.items() if child is not None]
        ahead.extend(reversed(children))
    return names


def _owned_parameters(owners: dict[nn.Module, str]) -> dict[nn.Parameter, Slot]:
    """The parameters that `owners` hold, each with every place that shares it."""
    slots: dict[nn.Parameter, Slot] = {}
    for module, prefix in owners.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slot = slots.setdefault(parameter, Slot(prefix + name, parameter))
                slot.owners.append((weakref.ref(module), name))
    return slots


def _refuse_sparse(owners: dict[nn.Module, str], found: dict[nn.Parameter, Slot]) -> None:
    """Raise for embeddings whose gradients would be sparse tensors: flat buffers of gradients are dense."""
    for module, prefix in owners.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            weight = module._parameters.get("weight")
            if weight is not None and weight in found and weight.requires_grad:
                where = prefix.removesuffix(".") or "the module itself"
                raise ValueError(
                    f"{type(module).__name__}(sparse=True), {where}: gradients of sharded parameters are dense; build "
                    "it with sparse=False, or name its weight in ignored_params"
                )
