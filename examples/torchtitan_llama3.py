"""torchtitan's Llama 3 through its own parallelize function, with weft in FSDP2's place.

torchrun --nproc-per-node 2 examples/torchtitan_llama3.py [--torch] [--tp 2] [--ac full] ...     (CPU, debug model)
"""

from torchtitan_debug import run

if __name__ == "__main__":
    run("llama3")
