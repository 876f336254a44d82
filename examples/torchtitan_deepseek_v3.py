"""torchtitan's DeepSeek-V3 through its own parallelize function, with weft in FSDP2's place.

torchrun --nproc-per-node 2 examples/torchtitan_deepseek_v3.py [--torch] [--ep 2] [--ac full] ...     (CPU, debug model)
"""

from torchtitan_debug import run

if __name__ == "__main__":
    run("deepseek_v3")
