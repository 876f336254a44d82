"""All graphed calls (methods whose calls are replayed from graphs if possible) of one model, and their common
counts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

from weft.debug import guard
from weft.fsdp.module import FSDPModule
from weft.fsdp.parameter import record_of
from weft.graphs.call import GraphedCall
from weft.graphs.capture import Backend, delaying
from weft.graphs.places import has_hooks
from weft.graphs.settings import Settings
from weft.graphs.tape import TapeBackend

WAY_OUT = "choose other modules in weft.Graphs(modules=...)"


class Engine(Protocol):
    """The properties that graphs need of the engine, the runtime that a model's units share."""

    @property
    def steady_passes(self) -> int:
        """The number of passes that ended since the memory plan (the layout of the buffers for gathered weights)
        changed. A forward and its backward count as one. It is 0 while a pass uses units in another order than the last
        pass of its kind."""
        ...

    @property
    def in_schedule(self) -> bool:
        """Whether a schedule drives the model."""
        ...


class GraphTable:
    """The graphed calls of one model, whose root module is `root`. Raises ValueError if `settings` choose an unknown or
    unsuitable module, no part of the model, or a backend that does not run on `device`."""

    def __init__(self, settings: Settings, root: nn.Module, engine: Engine, device: torch.device) -> None:
        self.settings = settings
        self.backend: Backend = _backend(settings.backend, device)
        self._engine = engine
        self.calls: list[GraphedCall] = []
        chosen = [*self._chosen(root)]
        self._names = {name for name, _ in chosen}
        covered = Counter(inner for _, module in chosen for inner in module.modules())
        for name, module in chosen:
            self._check(name, module)
            if covered[module] > 1:
                raise ValueError(f"graphs: {name!r} lies inside another chosen module; {WAY_OUT}")
            self.calls.append(GraphedCall(self, module, "forward", name, _inside, _is_sharded))
        for module in root.modules():
            scopes = getattr(module, "graph_scopes", {})
            for method, (scope, parts) in scopes.items() if module not in covered else ():
                if scope not in settings.scopes:
                    continue
                inside = _inside if parts is None else partial(_of_parts, parts)
                self.calls.append(GraphedCall(self, module, method, scope, inside, _is_sharded))
                if (because := getattr(module, "graph_refused", lambda scope: None)(scope)) is not None:
                    self.calls[-1].refuse(because)
        if not self.calls:
            raise ValueError(
                f"graphs: {type(root).__name__} has no layers of scopes {settings.scopes}: name modules in "
                "weft.Graphs(modules=...)"
            )

    def eager_because(self) -> str | None:
        """Return why nothing can be replayed now, or None if replays are possible."""
        if not torch.is_grad_enabled():
            return "no gradients are computed"
        if torch._C._current_graph_task_id() != -1:
            return "a recomputation"
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Objects of weft with `knows_graphs` have hooks that change only tensors that a capture has copied.
        if hooks is not None and not getattr(getattr(hooks[0], "__self__", None), "knows_graphs", False):
            return "it runs inside a checkpoint or other hooks on saved tensors"
        if _get_current_dispatch_mode() is not None:
            return "a dispatch mode is active"
        if (modes := _get_current_function_mode_stack()) and (len(modes) > 1 or delaying() is None):
            return "a function mode is active"
        if torch._C._are_functorch_transforms_active():
            return "torch.func transforms it"
        if _has_any_global_hook():
            return "hooks on all modules are registered"
        return "weft.debug.guard_memory is active" if guard.guards else None

    def may_capture(self) -> bool:
        """Return whether the memory plan has been steady for `warmup` passes. Gathered weights are then expected to
        keep their addresses."""
        return self._engine.steady_passes >= self.settings.warmup

    @property
    def in_schedule(self) -> bool:
        """Whether several microbatches may be in flight."""
        return self._engine.in_schedule

    @property
    def failed(self) -> list[bool]:
        """For each graphed call, whether a capture of it has failed on this rank since the last call of `agree`."""
        return [call.failed for call in self.calls]

    def agree(self, failed: Sequence[bool]) -> None:
        """Allow replays of new captures. Called at the end of a backward, after the ranks have exchanged `failed`.

        `failed`: for each graphed call, whether a capture of it has failed on any rank since the last call of `agree`.
        Such a call stays eager. With `check_collectives=False` the ranks exchange nothing: pass this rank's `failed`.
        """
        for call, anywhere in zip(self.calls, failed):
            if anywhere and call.refused is None:
                call.refuse("its capture failed on another rank")
            call.failed = False
            call.enable()

    def drop(self) -> None:
        """Free the memory, and restore the model's methods."""
        for call in self.calls:
            call.drop()

    def report(self) -> dict[str, Any]:
        """Return the result of `graph_report`: counts of captures, replays and eager calls, and bytes."""
        shown = [
            call for call in self.calls if call.scope in self._names or call.captures or call.eager or call.refused
        ]
        scopes = dict.fromkeys(call.scope for call in shown)
        each = {scope: _sum(call for call in self.calls if call.scope == scope) for scope in scopes}
        return {**_sum(self.calls), "scopes": each}

    def _chosen(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        choice = self.settings.modules
        named = dict(root.named_modules())
        if choice is None:
            return
        if callable(choice):
            found = [(name, module) for name, module in named.items() if choice(name, module)]
            if not found:
                raise ValueError(f"graphs: the predicate chose none of the {len(named)} modules of the root")
            yield from found
            return
        for name in choice:
            if name not in named:
                raise ValueError(f"graphs: the root has no module {name!r}; use the names of named_modules()")
            yield name, named[name]

    def _check(self, name: str, module: nn.Module) -> None:
        """Raise ValueError if `module` is compiled, or contains another unit, hooks or a compiled module."""
        own = name or "the root"
        for inner_name, inner in module.named_modules():
            whole = f"{name}.{inner_name}".strip(".") or own
            if inner is not module and isinstance(inner, FSDPModule):
                raise ValueError(
                    f"graphs: {own!r} contains {whole!r}, which is a separate unit: its weights are gathered and "
                    f"released inside the graph; {WAY_OUT}"
                )
            if inner is not module and has_hooks(inner):
                raise ValueError(f"graphs: {whole!r} inside {own!r} has hooks, which a replay would not run")
            if inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod"):
                raise ValueError(
                    f"graphs: {whole!r} is compiled, and a compiled module captures its own graphs; {WAY_OUT}"
                )


def _is_sharded(parameter: nn.Parameter) -> bool:
    return record_of(parameter) is not None


def _inside(module: nn.Module) -> list[nn.Module]:
    """Return `module` and the modules inside it that belong to the same unit."""
    found, ahead = [], [module]
    while ahead:
        each = ahead.pop()
        found.append(each)
        ahead += [child for child in each.children() if not isinstance(child, FSDPModule)]
    return found


def _of_parts(parts: Sequence[str], module: nn.Module) -> list[nn.Module]:
    """Return `module`, its children named in `parts`, and all modules inside these children."""
    used = [child for part in parts if (child := getattr(module, part)) is not None]
    return [module, *(each for child in used for each in child.modules())]


def _sum(calls: Any) -> dict[str, Any]:
    calls = list(calls)
    eager: Counter[str] = Counter()
    for call in calls:
        eager.update({**({} if call.refused is None else {call.refused: 0}), **call.eager})
    return {
        "captures": sum(call.captures for call in calls),
        "replays": sum(call.replays for call in calls),
        "eager": dict(eager),
        "bytes": sum(call.nbytes for call in calls),
    }


def _backend(name: str | None, device: torch.device) -> Backend:
    if name == "tape":
        return TapeBackend()
    if device.type != "cuda":
        raise ValueError(
            f"weft.Graphs(backend={name!r}) of a model on {device.type}: graphs need CUDA; backend='tape' replays "
            f"operators one by one, which saves no time but shows that the numbers are right"
        )
    from weft.graphs.cuda import CudaBackend

    return CudaBackend(device)
