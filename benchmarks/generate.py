"""Time per generated token, compared with transformers and its cache, as a function of the number of earlier positions.

    weft bench generate --ranks 1

Each model has four layers of width 256 of one kind, in fp32, with one row. Both sides have the same weights and read
the same prompt, which is not timed, and then generate `--steps` tokens greedily.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _report import machine, parser, ratio

from weft.models import HybridConfig, HybridModel, hf

WIDTH, LAYERS, VOCABULARY = 256, 4, 512
LENGTHS = (64, 512, 2048)
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 2 * max(LENGTHS),
    "pad_token_id": None,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention, * (Llama)": ("llama", {}),
    "latent attention, + (DeepSeek-V3)": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "first_k_dense_replace": LAYERS,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 8,
        },
    ),
    "Mamba-2, M (Mamba-2)": (
        "mamba2",
        {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 2, "expand": 2, "tie_word_embeddings": False},
    ),
    "gated delta nets and attention, GGG* (Qwen3-Next)": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_only_layers": list(range(LAYERS)),
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "gated delta nets, G (weft alone)": (
        "",  # transformers' cache needs an attention layer to count positions
        {
            "pattern": "[G-]" * LAYERS,
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "linear_num_value_heads": 8,
        },
    ),
}
Step = Callable[[torch.Tensor], torch.Tensor]


def sides_of(kind: str, options: dict[str, Any]) -> dict[str, Callable[[], Step]]:
    """Return functions that begin a generation with weft's model and with transformers' model. Both models have the
    same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # otherwise, warnings about missing kernels appear between the rows
    logging.disable_progress_bar()
    torch.manual_seed(0)
    if not kind:
        return {"weft": partial(of_weft, HybridModel(HybridConfig(**options)).eval())}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **options}))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = hf.from_pretrained(folder).eval()
    return {"weft": partial(of_weft, ours), "transformers": partial(of_transformers, theirs.eval())}


def of_weft(model: Any) -> Step:
    """Return a function that computes the next token's logits; each call continues the sequence of earlier calls."""
    cache: dict[Any, Any] = {}
    return lambda tokens: model(tokens, cache=cache)[:, -1]


def of_transformers(model: Any) -> Step:
    """Return the same function for a model of transformers."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    return lambda tokens: model(input_ids=tokens, use_cache=True, **{name: cache}).logits[:, -1]


def seconds(begin: Callable[[], Step], length: int, steps: int) -> tuple[float, list[int]]:
    """Return the mean seconds per token after a prompt of `length`, and the tokens."""
    prompt = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    step, text = begin(), []
    token = step(prompt).argmax(-1, keepdim=True)
    started = time.perf_counter()
    for _ in range(steps):
        text.append(int(token))
        token = step(token).argmax(-1, keepdim=True)
    return (time.perf_counter() - started) / steps, text


@torch.no_grad()
def main() -> None:
    """Measure both sides alternately; print the median milliseconds and the median ratio of paired rounds."""
    options = parser(__doc__, rounds=3, steps=32).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(machine())
    print(f"\n{'ms per token after':50}{'positions':>10}{'weft':>10}{'transformers':>14}{'ratio':>11}")
    for name, (kind, more) in KINDS.items():
        sides = sides_of(kind, more)
        medians = []
        for length in LENGTHS:
            texts = [seconds(begin, length, options.steps)[1] for begin in sides.values()]  # also warms up
            assert texts[0] == texts[-1], f"{name}: after {length} positions the texts differ"
            taken: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(options.rounds):
                for side, begin in sides.items():
                    taken[side].append(seconds(begin, length, options.steps)[0])
            each = {side: 1e3 * statistics.median(values) for side, values in taken.items()}
            medians.append(each["weft"])
            beside = f"{each['transformers']:14.2f}{ratio(*taken.values()):11.2f}" if len(sides) > 1 else ""
            print(f"{name:50}{length:10}{each['weft']:10.2f}{beside}", flush=True)
        print(f"{'':50}{'':10}{medians[-1] / medians[0]:10.2f} times as long as after {LENGTHS[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
