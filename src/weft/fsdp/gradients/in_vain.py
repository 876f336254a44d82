"""Detects hooks and optimizers on the gradient of a sharded parameter that autograd would never run.

attached by                                          error
---------------------------------------------------  -----------------------------------------------------------------
`register_hook`, `register_multi_grad_hook`,         at `fully_shard` and when a pass begins: autograd computes the
torch's `_apply_optimizer_in_backward`               gradient of the gathered parameter, a different tensor
`register_post_accumulate_grad_hook`                 none: it runs with the reduced gradient
"""

from torch import nn

_HOOK_NEVER_RUNS = (
    "a hook on its gradient (register_hook, register_multi_grad_hook) would never run, since autograd computes the "
    "gradient of the gathered weights. Use register_post_accumulate_grad_hook after fully_shard: it finds the "
    "reduced gradient in parameter.grad, and may change it"
)

IN_BACKWARD = "_in_backward_optimizers"
"""The attribute in which torch's `_apply_optimizer_in_backward` stores the optimizers of a parameter."""
_OPTIMIZER_NEVER_RUNS = (
    "_apply_optimizer_in_backward would train nothing: it waits for a gradient of this parameter, but autograd "
    "computes the gradient of the gathered weights. Step in a register_post_accumulate_grad_hook after fully_shard, "
    "where "
    "parameter.grad is the reduced gradient: parameter.register_post_accumulate_grad_hook(lambda p: (optimizer.step(), "
    "optimizer.zero_grad()))"
)


def never_runs(parameter: nn.Parameter) -> str:
    """Return why a hook or an optimizer on the gradient of `parameter` would never run; "" if there is none."""
    if parameter._backward_hooks:
        return _HOOK_NEVER_RUNS
    return _OPTIMIZER_NEVER_RUNS if IN_BACKWARD in vars(parameter) else ""
