"""torchtitan's Llama 3 through its own parallelize function, built on the meta device, with weft in FSDP2's place.

TORCHDYNAMO_DISABLE=1 torchrun --nproc-per-node 2 examples/torchtitan_llama3.py [--torch]     (CPU, debug model)
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torchtitan.tools.utils as titan_utils

titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu  # before what asks for them is imported

from torch.distributed.tensor import distribute_tensor  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

import weft  # noqa: E402

SEQUENCE = 16


def dense(q, k, v, *, scale, enable_gqa, **options):
    """In place of FlexAttention, which has no backward on CPU."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    ), None


FlexAttention._compiled_flex_attn = staticmethod(dense)


def build() -> torch.nn.Module:
    """The debug model, sharded on the meta device, then filled by its own `init_weights`."""
    spec = model_registry("debugmodel", attn_backend="flex")
    parallelism = ParallelismConfig(data_parallel_shard_degree=dist.get_world_size(), spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums, which torch's would use
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():  # the same with both libraries
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            value = torch.randn(parameter.shape, generator=generator) * 0.02 + ("norm" in name)
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="leave torch's FSDP2 in place")
    if not parser.parse_args().torch:
        print(weft.drop_in())
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cpu", BLOCK_SIZE=16)
    for step in range(3):
        rows = torch.randint(0, 256, (ranks, 2, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))[rank]
        output = model(rows[:, :-1], positions=positions, attention_masks=mask)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), rows[:, 1:].flatten()) / ranks
        loss.backward()  # torchtitan sums gradients over the ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.8f} norm {norm.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
