"""Trains a debug model of torchtitan on CPU ranks, with weft in place of FSDP2. The other torchtitan examples use this
file. torchtitan supplies the configuration, parallelize function, loss, clipping, optimizer and checkpoints.

    option                     effect
    -------------------------  ---------------------------------------------------------------------------------
    --tp 2                     torchtitan's tensor and sequence parallelism; half as many data-parallel ranks
    --ep 2                     torchtitan's expert parallelism: experts have their own mesh and exchange tokens
    --replicate 2              hybrid sharding: replicas, each sharded over half of the data-parallel ranks
    --spmd full_dtensor        parameters, activations and inputs are DTensors over the whole mesh
    --ac full|selective        activation checkpointing of each block
    --compile                  torch.compile of each block
    --fp32-experts             experts multiply in fp32, like the rest of the model; torchtitan always uses bfloat16
    --layers 3                 only the first 3 layers of the debug model
    --save DIR, --resume DIR   save or load the model, the optimizer and the step with torchtitan's CheckpointManager
    --torch                    use torch's own FSDP2, not weft
"""

import argparse
import gc
import importlib
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torchtitan.tools.utils as titan_utils

titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu  # the imports below read these two

from torch.distributed.tensor import distribute_tensor  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.full_dtensor import parallelize_inputs  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_, dist_sum, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

import weft  # noqa: E402

SEQUENCE, ROWS = 16, 2
STEPS, SAVED = 4, 2
CHECKPOINTING = {"full": FullAC.Config, "selective": SelectiveAC.Config}


def dense(q: Any, k: Any, v: Any, *, scale: float, enable_gqa: bool, **options: Any) -> tuple[torch.Tensor, None]:
    """Replaces FlexAttention, which has no backward on CPU."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    ), None


FlexAttention._compiled_flex_attn = staticmethod(dense)


class State:
    """The step, in the form in which torchtitan's trainer saves it."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def configured(config: Any, options: argparse.Namespace) -> tuple[Any, ParallelDims]:
    """Return torchtitan's debug configuration in fp32, and the meshes of these ranks."""
    config.training = TrainingConfig(
        local_batch_size=ROWS, seq_len=SEQUENCE, steps=STEPS, mixed_precision_param="float32", disable_cuda_graphs=True
    )
    config.parallelism = ParallelismConfig(
        data_parallel_replicate_degree=options.replicate,
        tensor_parallel_degree=options.tp,
        expert_parallel_degree=options.ep,
        spmd_backend=options.spmd,
    )
    config.activation_checkpoint = CHECKPOINTING[options.ac]() if options.ac else None
    config.compile = CompileConfig(enable=options.compile, components=["model"], backend="inductor")
    config.optimizer.implementation = "foreach"
    if options.save or options.resume:
        config.checkpoint.enable, config.checkpoint.interval = True, SAVED
        config.checkpoint.folder = str(Path(options.save or options.resume).absolute())
        config.checkpoint.load_only = not options.save
    del config.model_spec.model.layers[options.layers :]
    set_spmd_backend(options.spmd)
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    config.model_spec.model.update_from_config(config=config)
    return config, dims


def built(config: Any, dims: ParallelDims) -> torch.nn.Module:
    """Return the debug model, parallelized on the meta device and then filled by its own `init_weights`."""
    with torch.device("meta"):
        model = config.model_spec.model.build()
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sums of torch's FSDP2
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():  # the same values with any sharding
            generator = torch.Generator().manual_seed(zlib.crc32(canonical_fqn(name).encode()))
            value = torch.randn(parameter.shape, generator=generator) * 0.02 + ("norm" in name)
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
    return model.train()


def exact_norm(model: torch.nn.Module) -> float:
    """Return the norm of the gradients in double precision. The float32 norm on CPU depends on the lengths of the
    parts."""
    gradients = (parameter.grad.full_tensor() for parameter in model.parameters())
    return float(sum(gradient.double().square().sum() for gradient in gradients)) ** 0.5


def train(config: Any, options: argparse.Namespace) -> None:
    """Train a few steps like torchtitan's trainer; print the loss and the norm of each."""
    config, dims = configured(config, options)
    model = built(config, dims)
    loss_of = config.loss.build(compile_config=config.compile)
    loss_of.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizers = config.optimizer.build(model_parts=[model])
    if config.model_spec.post_optimizer_build_fn is not None:
        config.model_spec.post_optimizer_build_fn(optimizers, [model], dims)
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    state = State()
    checkpointer = config.checkpoint.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder="",
    )
    if options.resume:
        assert checkpointer.load(SAVED)
    batch = dims.get_mesh("batch")
    positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cpu", BLOCK_SIZE=16)
    while state.step < STEPS:
        state.step += 1
        generator = torch.Generator().manual_seed(state.step)
        rows = torch.randint(0, 256, (batch.size(), ROWS, SEQUENCE + 1), generator=generator)[batch.get_local_rank()]
        inputs, labels = rows[:, :-1], rows[:, 1:]
        tokens = torch.tensor(batch.size() * labels.numel())
        beside = {"positions": positions, "attention_masks": mask}
        if options.spmd == "full_dtensor":
            inputs, labels, beside = parallelize_inputs(dims, inputs, labels, beside)
        loss, _ = loss_of(model(inputs, **beside), labels, tokens, positions=beside["positions"])
        loss.backward()
        exact = exact_norm(model)
        norm = clip_grad_norm_(model.parameters(), config.training.max_norm, foreach=True, ep_enabled=dims.ep_enabled)
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        mean = dist_sum(loss.detach(), batch)
        if dist.get_rank() == 0:
            print(f"step {state.step} loss {mean:.8f} norm {norm.item():.8f} exact {exact:.8f}", flush=True)
        checkpointer.save(state.step)
    checkpointer.close()


def run(model: str) -> None:
    """Train torchtitan's debug model of this name with the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="leave torch's FSDP2 in place")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--replicate", type=int, default=1, help="replicas of what is sharded")
    parser.add_argument("--spmd", default="partial_dtensor", choices=["partial_dtensor", "full_dtensor"])
    parser.add_argument("--ac", choices=list(CHECKPOINTING), help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each block")
    parser.add_argument("--fp32-experts", action="store_true", help="experts that multiply in fp32, as the rest")
    parser.add_argument("--layers", type=int, help="of the debug model, from the first; all by default")
    parser.add_argument("--save", metavar="DIR", help=f"a checkpoint after every {SAVED} steps")
    parser.add_argument("--resume", metavar="DIR", help=f"go on from the checkpoint of step {SAVED} there")
    options = parser.parse_args()
    if not options.torch:
        print(weft.drop_in())
    if options.fp32_experts:
        torch.Tensor.bfloat16 = torch.Tensor.float  # only experts call `bfloat16`
    dist.init_process_group("gloo")
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    train(getattr(registry, f"{model}_debugmodel")(), options)
    dist.destroy_process_group()
    weft.forget_meshes()  # torch caches process groups, whose threads may abort the interpreter when it exits
    gc.collect()
