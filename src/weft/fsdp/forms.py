"""Construction of a group's parameters: the full ones, for gathered weights, and the sharded ones."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from weft.fsdp.parameter import ShardedParameter, Unsharded
from weft.fsdp.scaled import mark_scaled
from weft.memory.buffer import FlatBuffer


def forms_of(group: Any, members: Sequence[Unsharded]) -> tuple[ShardedParameter, ...]:
    """Return the records of the parameters of `group`, each with a full and a sharded parameter. These are views of the
    group's full and main weights, and have the attributes of the original parameters `members`."""
    recipe = group.recipe
    views = FlatBuffer(group.layout, group.mesh, group.plan.whole, group.full.local).views()
    full = [
        # `.data`: views with a separate version counter, so that autograd does not see a refill as a change.
        nn.Parameter(each.parallel.full(view.data) if each.parallel else view.data, requires_grad=group.trainable)
        for view, each in zip(views, members)
    ]
    mark_scaled(full, recipe)
    sharded = [
        nn.Parameter(tensor, requires_grad=group.trainable)
        for tensor in group.main_weight.dtensors([each.parallel for each in members])
    ]
    for each, one, other in zip(members, full, sharded):
        vars(one).update(vars(each.value))
        vars(other).update(vars(each.value))
        other._post_accumulate_grad_hooks = each.value._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if recipe.main_grad != recipe.main:
            other.grad_dtype = recipe.main_grad
    myself = weakref.ref(group)
    return tuple(
        ShardedParameter(number, each.slot, extent, each.parallel, one, other, myself)
        for number, (each, extent, one, other) in enumerate(zip(members, group.layout.extents, full, sharded))
    )
