"""Groups units into models: the driver of a unit refers to the driver around it, and the outermost driver is the root.

fully_shard(block)       creates a driver, the root of a model with one unit
fully_shard(model)       creates a driver around the drivers of the blocks; it becomes their root
the first use            the root creates the runtime of all units; the root, and forwards that wait for their backward,
(pass, `unshard()`, ...) keep the runtime alive
"""

import weakref
from collections.abc import Callable, Collection, Iterable

from torch import nn

from weft.fsdp.hooks import HookDriver
from weft.fsdp.runtime.inventory import Inventory
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.runtime import Runtime
from weft.fsdp.unit import Unit
from weft.weak import alive


class UnitDriver(HookDriver):
    """Drives one unit by hooks. The driver of a model's outermost unit is the root; the other drivers are under it."""

    def __init__(self, unit: Unit, options: RuntimeOptions | None) -> None:
        """`options`: the `runtime` argument of `fully_shard`, if given."""
        super().__init__(unit)
        self._own: Runtime | None = None  # the runtime, if this is a root: no other driver keeps it alive
        self._known: Callable[[], Runtime | None] = lambda: None
        self.above: Callable[[], UnitDriver | None] = lambda: None  # returns the driver of a unit around this one
        self._asked = options
        self.options = options or RuntimeOptions()

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of the root; None until `engine` has created it, and after the root has been freed."""
        return self._known()

    @property
    def engine(self) -> Runtime:  # type: ignore[override]
        """The runtime of the root, which serves all units of the model. It is created if the root has none yet."""
        runtime = self._known()
        if runtime is None:
            root = self.root
            runtime = root.runtime or root._start()
            self._known = weakref.ref(runtime)
        return runtime

    @property
    def root(self) -> "UnitDriver":
        """The driver of the outermost unit around this one."""
        root = self
        while (around := root.above()) is not None:
            root = around
        return root

    def come_under(self, around: "UnitDriver") -> None:
        """Put this driver under `around`, unless it is under a driver already. Drop the runtime of this driver,
        because the new root makes another one. `around` takes over the options that method calls have changed
        (`RuntimeOptions.joined`)."""
        if self.above() is None:
            self.above = weakref.ref(around)
        runtime = self.runtime
        changed = self.options if runtime is None else runtime.options
        around.options = around.options.joined(self._asked or RuntimeOptions(), changed)
        self._own, self._known = None, lambda: None

    def _start(self) -> Runtime:
        modules = alive(self.unit.modules)
        drivers = drivers_under(modules)
        units = [driver.unit for driver in drivers]
        for unit in units:
            for other, name in unit.tied.items():
                if other not in units:
                    raise RuntimeError(
                        f"parameter {name!r} of {unit} is shared with another model, {other}: two roots cannot "
                        f"accumulate gradients into one parameter; call fully_shard last on a module around both, and "
                        f"call that module"
                    )
        inventory = Inventory(modules, units)
        for driver in drivers:
            if driver._asked not in (None, self._asked or RuntimeOptions()):
                raise ValueError(
                    f"runtime={driver._asked} of {driver.unit}, which is not the root: the root's options count for "
                    "all units; pass them to fully_shard of the root, the last call"
                )
        runtime = Runtime(units, drivers, inventory, self.options)
        if self.options.graphs is not None:
            runtime.graphs = self.options.graphs.table(modules[0], runtime, self.unit.device)
        self._own = runtime
        for driver in drivers:
            driver._known = weakref.ref(runtime)
        return runtime


def drivers_under(modules: Iterable[nn.Module], without: Collection[nn.Module] = ()) -> list[UnitDriver]:
    """Return the drivers of `modules` and of the sharded modules inside them, outermost first. Leaves out modules that
    are reached only through `without`."""
    reached = (child for module in modules for _, child in module.named_modules(memo=set(without)))
    inside = (vars(child).get("_weft_driver") for child in reached)
    return [driver for driver in dict.fromkeys(inside) if driver is not None]
