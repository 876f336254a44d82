"""The losses of short training runs: each precision with three seeds.

    python benchmarks/narrow_runs.py --steps 100

Runs `configs/stdlib.toml`, which `make train` runs, with fewer steps and `model.intermediate_size` 448, since blocks of
mx(32) do not fit 432. Prints the last validation loss of each run, their mean, and how many are at most bf16's worst.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from weft.train.record.metrics import read_metrics

SEEDS = [0, 1, 2]
PRECISIONS = ["bf16", "fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
CONFIGURATION = Path(__file__).resolve().parents[1] / "configs" / "stdlib.toml"


def last_loss(precision: str, seed: int, steps: int, ranks: int) -> float:
    """The validation loss behind the last step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "train.steps": steps,
            "train.precision": precision,
            "train.seed": seed,
            "data.seed": seed,
            "train.validate_every": steps,
            "schedule.warmup_steps": steps // 10,
            "model.intermediate_size": 448,
            "checkpoint.every": steps,
            "run.directory": folder,
        }
        command = [sys.executable, "-m", "weft", "train", str(CONFIGURATION), "--ranks", str(ranks)]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = Path(folder).iterdir()
        losses = [record["loss"] for record in read_metrics(run) if record["kind"] == "validation"]
    return losses[-1]


def main() -> None:
    """Run one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"{'precision':16}" + "".join(f"{f'seed {seed}':>10}" for seed in SEEDS) + f"{'mean':>10}", flush=True)
    worst = None
    for precision in PRECISIONS:
        losses = [last_loss(precision, seed, options.steps, options.ranks) for seed in SEEDS]
        worst = max(losses) if worst is None else worst
        within = sum(loss <= worst for loss in losses)
        columns = "".join(f"{loss:10.4f}" for loss in [*losses, sum(losses) / len(losses)])
        print(f"{precision:16}{columns}  {within} of {len(losses)} at most at bf16's worst", flush=True)


if __name__ == "__main__":
    main()
