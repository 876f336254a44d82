"""Trains torchtitan's DeepSeek-V3, parallelized by torchtitan's own function, with weft in place of FSDP2.

torchrun --nproc-per-node 2 examples/torchtitan_deepseek_v3.py [--torch] [--ep 2] [--ac full] ...     (CPU, debug model)
"""

from torchtitan_debug import run

if __name__ == "__main__":
    run("deepseek_v3")
