"""Trains torchtitan's DeepSeek-V3, parallelized by torchtitan's own function, with weft in place of FSDP2.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/torchtitan_deepseek_v3.py [--torch] [--ep 2] [--ac full] ...

It runs on the CPU, with a debug model; torchtitan_debug.py describes all options.
"""

from torchtitan_debug import run

if __name__ == "__main__":
    run("deepseek_v3")
