"""How quantized weights affect training: the losses of short runs, by precision and seed.

    python benchmarks/narrow_runs.py --seeds 10 --steps 100

One process trains a small model of four layers on the source text of the standard library, with the optimizer of
`configs/stdlib.toml`, and prints the validation loss after the last step. Each seed has different initial weights and a
different order of the data.

At the end, for each precision, it prints the mean difference from bf16 at the same seed, its standard error, and the
number of runs that are worse than the worst run in bf16. It also prints the error of the format alone: the relative
root mean square error of the last run's weight matrices, as mean, minimum and maximum over the matrices.
"""

import argparse
import math
import statistics
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft.models import HybridConfig, HybridModel, shard
from weft.models.narrow import choose_weights
from weft.quantize import Quantization, blockwise, dequantize, mx, nvfp4, quantize, rowwise, tensorwise

RECIPES = {
    "bf16": None,
    "fp8": tensorwise(),
    "fp8_rowwise": rowwise(),
    "fp8_blockwise": blockwise(128, 128),
    "mxfp8": mx(32),
    "nvfp4": nvfp4(),
}
LENGTH, ROWS, VALIDATION, PEAK = 128, 8, 400_000, 3e-3
CFG = HybridConfig(
    pattern="[*-][*-][*-][*-]",
    vocab_size=256,
    hidden_size=96,
    num_attention_heads=3,
    num_key_value_heads=3,
    intermediate_size=256,
    tie_word_embeddings=True,
)


def text() -> torch.Tensor:
    """Return the source text of the standard library's modules, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch(source: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random excerpts of `source` as tokens and labels, [ROWS, LENGTH] each."""
    places = torch.randint(0, len(source) - LENGTH - 1, (ROWS,), generator=generator)
    rows = torch.stack([source[place : place + LENGTH + 1] for place in places])
    return rows[:, :-1], rows[:, 1:]


def run(recipe: Quantization | None, seed: int, steps: int, source: torch.Tensor) -> tuple[float, HybridModel]:
    """Return the validation loss after the last step, and the model."""
    torch.manual_seed(seed)
    model = HybridModel(CFG)
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_quantization=recipe)
    shard(model, weft.init_meshes("cpu"), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rise, fall = 10 * (step + 1) / steps, 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(rise, fall)
        tokens, labels = batch(source[VALIDATION:], generator)
        model(tokens, labels=labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        losses = [
            model(tokens, labels=labels).item()
            for tokens, labels in (batch(source[:VALIDATION], generator) for _ in range(8))
        ]
    return sum(losses) / len(losses), model


def errors(model: HybridModel, recipe: Quantization) -> list[float]:
    """Return the relative error of each weight that the recipe quantizes."""
    chosen = choose_weights(model, weft.MixedPrecisionPolicy(param_quantization=recipe)).quantize
    assert chosen is not None
    found = []
    for name, parameter in model.named_parameters():
        if chosen(name, parameter):
            weight = parameter.full_tensor().detach().bfloat16()  # type: ignore[attr-defined]
            left = dequantize(*quantize(weight, recipe), recipe)
            found.append(float((left - weight).norm() / weight.norm()))
    return found


def main() -> None:
    """Run all precisions and seeds; print a line for each seed and one for each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    source = text()
    losses: dict[str, list[float]] = {name: [] for name in options.only}
    print(f"{'seed':6}" + "".join(f"{name:>15}" for name in losses), flush=True)
    for seed in range(options.first, options.first + options.seeds):
        for name, found in losses.items():
            loss, model = run(RECIPES[name], seed, options.steps, source)
            found.append(loss)
        print(f"{seed:<6}" + "".join(f"{found[-1]:15.4f}" for found in losses.values()), flush=True)
    for name, found in losses.items():
        line = f"{name:15} mean {statistics.mean(found):.4f}"
        if len(found) > 1 and (base := losses.get("bf16")):
            apart = [one - other for one, other in zip(found, base)]
            error = statistics.stdev(apart) / math.sqrt(len(apart))
            line += f", from bf16 {statistics.mean(apart):+.4f} +- {error:.4f}"
            line += f", {sum(each > max(base) for each in found)} of {len(found)} above its worst"
        if (recipe := RECIPES[name]) is not None:
            lost = errors(model, recipe)
            line += f"; weights lose {statistics.mean(lost):.4f} ({min(lost):.4f} to {max(lost):.4f})"
        print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
