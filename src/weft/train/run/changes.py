"""Compares the settings of a resumed run with those in its config.toml, and decides which may differ.

    REFUSED   the new value would not fit the trained weights, the data so far or the saved state, or would have no
              effect. With `run.renumber`, a pattern that groups the same layers differently is PRINTED
    PRINTED   the setting takes effect, and is printed before the first step
    SILENT    the setting takes effect, and changes the results by no more than rounding, with a few exceptions.
              `run.name`, `run.directory` and `run.weights` have no effect on a resumed run

docs/training.md has these rules for users, with the exceptions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from weft.models import HybridConfig
from weft.train.config import TrainConfig, load_config, to_dict
from weft.train.errors import ConfigError
from weft.train.run.runs import CONFIG
from weft.train.toml_values import show

Treatment = Literal["refused", "printed", "silent"]
REFUSED: Treatment = "refused"
PRINTED: Treatment = "printed"
SILENT: Treatment = "silent"

_SECTIONS: dict[str, Treatment] = {
    "model": REFUSED,
    "data": REFUSED,
    "train": SILENT,
    "optimizer": PRINTED,
    "schedule": PRINTED,
    "sharding": SILENT,
    "checkpoint": SILENT,
    "run": SILENT,
}
_SETTINGS: dict[str, Treatment] = {
    **dict.fromkeys(("model.aux_loss_coef", "model.z_loss_coef", "model.mtp_loss_coef"), PRINTED),
    **dict.fromkeys(
        (
            "model.recompute",
            "model.moe_rows_per",
            "model.mamba_kernel",
            "model.delta_kernel",
            "model.context_attention",
        ),
        SILENT,
    ),
    # Paths may change if the tokens stay the same, which their fingerprints show.
    **dict.fromkeys(("data.paths", "data.validation_paths", "data.tokenizer"), PRINTED),
    "data.cache_dir": SILENT,
    **dict.fromkeys(
        ("train.seed", "train.ema_decay", "train.skip_spikes", "optimizer.name", "optimizer.adamw_for"), REFUSED
    ),
    "optimizer.flat": SILENT,
    **dict.fromkeys(
        (
            "train.steps",
            "train.global_batch_size",
            "train.precision",
            "train.unquantized_ends",
            "train.validation_batches",
            "train.gradient_clip",
            "train.stop_after",
            "train.cross_documents",
            "train.expert_bias_rate",
            "train.buffers",
        ),
        PRINTED,
    ),
}


def treatment(setting: str) -> Treatment:
    """Return how a resumed run treats a change of `setting`, such as "train.steps"."""
    return _SETTINGS.get(setting, _SECTIONS[setting.partition(".")[0]])


def changed(directory: Path, config: TrainConfig, step: int, *, own_optimizer: bool = False) -> list[str]:
    """Return lines about changed settings, to print before the run in `directory` resumes from `step` with `config`.

    `own_optimizer`: True if your own code builds the optimizer, so the learning rate is not that of [optimizer].
    Raises ConfigError if settings that must not change have changed. The message names them.
    """
    path = directory / CONFIG
    if not path.is_file():
        return [f"{path} no longer exists: these settings cannot be compared with those of the run"]
    before = load_config(path)
    differences = dict(_differences(to_dict(before), to_dict(config)))
    kinds = {name: treatment(name) for name in differences}
    patterns = isinstance(before.model, HybridConfig) and isinstance(config.model, HybridConfig)
    if patterns and "model.pattern" in differences and before.hybrid.parsed.symbols == config.hybrid.parsed.symbols:
        if not config.run.renumber:
            old, new = differences["model.pattern"]
            raise ConfigError(
                f"model.pattern = {new} (it is {old}): the same layers, grouped differently; resume with --set "
                f"run.renumber=true, which renumbers weights and optimizer state, or leave the pattern as it is in "
                f"{path}"
            )
        kinds["model.pattern"] = PRINTED
    refused = [f"{name} = {new} (it is {old})" for name, (old, new) in differences.items() if kinds[name] == REFUSED]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: cannot change in a resumed run; leave it as it is in {path}, or start a new "
            "run without --resume"
        )
    told = [
        f"{name} = {new} from here on, was {old}" for name, (old, new) in differences.items() if kinds[name] == PRINTED
    ]
    rates = [each.schedule.factor(step, each.train.steps) for each in (before, config)]
    if not own_optimizer:
        rates = [rate * each.optimizer.lr for rate, each in zip(rates, (before, config))]
    if told and rates[0] != rates[1]:
        times = " times the optimizer's own" if own_optimizer else ""
        told.append(f"learning rate of step {step + 1}: {rates[1]:.3g}{times} ({rates[0]:.3g} with the old settings)")
    return told


def _differences(
    before: Mapping[str, Mapping[str, object]], now: Mapping[str, Mapping[str, object]]
) -> list[tuple[str, tuple[str, str]]]:
    found = []
    for section, settings in now.items():
        for name in [*settings, *(name for name in before[section] if name not in settings)]:
            old, new = before[section].get(name), settings.get(name)
            if old != new:
                found.append((f"{section}.{name}", (_shown(old), _shown(new))))
    return found


def _shown(value: object) -> str:
    return "unset" if value is None else show(value)
