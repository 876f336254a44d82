"""What the library can do, asked for in a configuration: each gives the numbers of the plain loop in one process."""

import re
from collections import Counter

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fsdp import nets
from tests.train.command import metrics, rewind, write_config
from tests.train.test_loop import StopAt, reference
from weft.fsdp.module import unit_of
from weft.models import HybridModel
from weft.train.config import load_config
from weft.train.data import Batches, load_corpus
from weft.train.errors import ConfigError
from weft.train.loop import Trainer
from weft.train.optimizers import made_by, make_optimizer, optimizer_bytes
from weft.train.run.runs import Run
from weft.train.sections import LoopConfig, OptimizerConfig
from weft.train.task.blocks import outermost, prepare, repeated_blocks

STEPS = 4


def fit(path, directory, overrides=(), stop_at=STEPS, resume_from=None):
    """One rank's part: its lines, weights, optimizer and what it says of its units."""
    stop = StopAt(stop_at)
    config = load_config(path, overrides)
    stop.trainer = trainer = Trainer(config, Run(directory, resume_from), stop=stop, say=lambda line: None)
    trainer.run()
    weights = nets.whole(trainer.model.state_dict())
    parameter = next(iter(trainer.model.decoder.layers[0].parameters()))
    group = unit_of(trainer.model.decoder.layers[0]).groups[0]
    facts = {
        "mesh": tuple(parameter.device_mesh.shape),
        "reshard": unit_of(trainer.model.decoder.layers[0]).reshard_after_forward,
        "post-forward shard": group.post_forward is not None,
        "offload": group.offload is not None,
        "optimizer": type(trainer.optimizer).__name__,
        "stepped": sum(len(each["params"]) for each in trainer.optimizer.param_groups),
        "state bytes": optimizer_bytes(trainer.optimizer),
        "whole": [name for name, each in trainer.model.named_parameters() if _here(each).numel() in (0, each.numel())],
    }
    return metrics(directory), weights, facts


def _here(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def assert_close(found, expected):
    lines, weights = found[:2]
    for line, other in zip(lines, expected[0], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)


def config_for(folder, **changes):
    usual = {"train__validate_every": 0, "checkpoint__every": 0, "train__microbatch_size": 2}
    return write_config(folder, **{**usual, **changes})


WAYS = {
    "sharding.dp_replicate=2": lambda facts, plain: facts["mesh"] == (2, 2),
    "sharding.dp_replicate=2 & sharding.dp_shard=2 & sharding.outer_strategy=optim": lambda facts, plain: (
        facts["mesh"] == (2, 2) and facts["state bytes"] < plain["state bytes"] * 1.5
    ),
    "sharding.reshard_after_forward=2": lambda facts, plain: facts["post-forward shard"],
    "sharding.reshard_after_forward=false": lambda facts, plain: facts["reshard"] is False,
    "sharding.offload=true": lambda facts, plain: facts["offload"],
    "optimizer.flat=true & sharding.dp_replicate=2": lambda facts, plain: facts["stepped"] < plain["stepped"],
}


def all_ways(path, folder):
    return [fit(path, folder / str(number), way.split(" & ")) for number, way in enumerate(["train.seed=0", *WAYS])]


@pytest.mark.long
def test_every_way_of_sharding_is_training_in_one_process(pool, tmp_path):
    path = config_for(tmp_path)
    records, _, weights = reference(path, STEPS)
    plain, *found = pool.run(4, all_ways, path, tmp_path)[0]
    for (way, shows), result in zip(WAYS.items(), found, strict=True):
        assert_close(result, (records, weights))
        assert shows(result[2], plain[2]), (way, result[2], plain[2])


def stopped_and_resumed(path, folder, before, after):
    """A run whole, and one in two parts, whose second has other settings."""
    whole = fit(path, folder / "run", before)
    if dist.get_rank() == 0:
        rewind(folder / "run", 2)
    dist.barrier()
    return whole, fit(path, folder / "run", after, resume_from=2)


FLAT, MUON = ["optimizer.flat=true"], ["optimizer.name=Muon", "optimizer.lr=0.01"]
SGD = ["optimizer.name=SGD", "optimizer.options={momentum = 0.9}"]


@pytest.mark.long
@pytest.mark.parametrize(
    "before, after",
    [
        ([], FLAT),
        pytest.param(FLAT, [], marks=pytest.mark.long),
        pytest.param(SGD, SGD, marks=pytest.mark.long),
        pytest.param(MUON, MUON, marks=pytest.mark.long),
    ],
)
def test_every_optimizer_resumes_bit_for_bit(pool, tmp_path, before, after):
    whole, parts = pool.run(2, stopped_and_resumed, config_for(tmp_path, checkpoint__every=2), tmp_path, before, after)[
        0
    ]
    assert parts[0] == whole[0]
    assert all(torch.equal(parts[1][name], value) for name, value in whole[1].items())


def other_optimizers(path, folder):
    return fit(path, folder / "sgd", SGD), fit(path, folder / "muon", MUON), fit(path, folder / "own", OWN)


class Sign(torch.optim.Optimizer):
    """An optimizer of one's own."""

    def __init__(self, params, lr, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * group["scale"])


OWN = [f"optimizer.name={__name__}:Sign", "optimizer.options={scale = 0.5}"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"options": {"amsgrad": "yes"}}, 'optimizer.options.amsgrad = "yes": must be true or false'),
        ({"options": {"foreach": 1}}, "optimizer.options.foreach = 1: must be true or false"),
        ({"name": "SGD", "options": {"momentum": "0.9"}}, "optimizer.options.momentum = "),
        ({"name": "Rprop", "options": {"etas": [0.5]}}, "optimizer.options.etas = [0.5]: must be a [list] of 2"),
        ({"options": {"fused": True, "foreach": True}}, "cannot be `True` together"),
        ({"flat": True, "options": {"fused": True, "foreach": True}}, "cannot be `True` together"),
        ({"name": "torch.optim:LBFGS"}, 'optimizer.name = "torch.optim:LBFGS": LBFGS recomputes the loss'),
    ],
)
def test_an_optimizer_that_cannot_step_is_refused_in_one_line_before_the_first_step(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(**settings))
    assert "\n" not in str(caught.value)


def test_a_custom_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigError, match="optimizer: LBFGS recomputes the loss"):
        made_by(lambda model: torch.optim.LBFGS(model.parameters()), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("option", ["fused", "foreach", "differentiable"])
@pytest.mark.parametrize("value", [True, False])
def test_the_user_can_choose_how_a_step_is_computed(name, option, value):
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, OptimizerConfig(name=name, options={option: value}))
    assert all(group[option] is value for group in optimizer.param_groups)
    model(torch.ones(2)).sum().backward()
    if option != "differentiable":
        optimizer.step()


def plain_loop(path, make):
    """`reference` with another optimizer."""
    config = load_config(path)
    corpus = load_corpus(config.data)
    sizes = {"sequence_length": config.data.sequence_length}
    sizes |= dict.fromkeys(("microbatch_size", "global_batch_size"), config.train.global_batch_size)
    batches = Batches(corpus.train, seed=config.data.seed, **sizes)
    torch.manual_seed(config.train.seed)
    model = HybridModel(config.model)
    optimizers = make(model)
    peaks = [group["lr"] for each in optimizers for group in each.param_groups]
    records = []
    for step in range(STEPS):
        for group, peak in zip((group for each in optimizers for group in each.param_groups), peaks):
            group["lr"] = peak * config.schedule.factor(step, config.train.steps)
        tokens, labels = next(batches)
        loss = model(tokens, labels=labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.gradient_clip)
        records.append({"loss": loss.item()})
        for each in optimizers:
            each.step()
            each.zero_grad()
    return records, model.state_dict()


def groups(parameters):
    parameters = list(parameters)
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) is many] for many in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def muon_and_adamw(model):
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("decoder")]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or not name.startswith("decoder")]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(groups(others), lr=0.01, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.long
def test_optimizers_of_a_configuration_are_the_plain_ones(pool, tmp_path):
    path = config_for(tmp_path)
    sgd, muon, own = pool.run(2, other_optimizers, path, tmp_path)[0]
    assert_close(sgd, plain_loop(path, lambda net: [torch.optim.SGD(groups(net.parameters()), lr=1e-3, momentum=0.9)]))
    assert_close(own, plain_loop(path, lambda net: [Sign(net.parameters(), lr=1e-3, scale=0.5)]))
    assert (sgd[2]["optimizer"], own[2]["optimizer"]) == ("SGD", "Sign")
    # Muon iterates in bf16, where the last bit of a gradient's sum is enough to round differently.
    for line, other in zip(muon[0], plain_loop(path, muon_and_adamw)[0], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-3)
    matrices = [name for name, value in muon[1].items() if value.ndim == 2 and name.startswith("decoder")]
    assert set(matrices) <= set(muon[2]["whole"]), "each matrix lies whole on one rank"


def of_one_layer(path, folder, changes):
    return [fit(path, folder / str(number), change) for number, change in enumerate(changes)]


RECOMPUTE = [
    [],
    ["train.activation_checkpointing=true", "train.keep_products=true"],
    ["train.activation_checkpointing=true", "train.recompute_every=2"],
]


@pytest.mark.long
def test_recomputing_a_part_changes_no_number(pool, tmp_path):
    path = config_for(tmp_path, model__pattern="[*-][*-]")
    plain, products, every = pool.run(1, of_one_layer, path, tmp_path, RECOMPUTE)[0]
    assert products[0] == plain[0] and every[0] == plain[0]
    assert all(torch.equal(products[1][name], value) for name, value in plain[1].items())


class Calls(TorchDispatchMode):
    """How often operators run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.counts[function] += 1
        return function(*arguments, **(options or {}))


def calls_of(loop):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(4)))
    prepare(outermost(repeated_blocks(model)), loop)
    with Calls() as calls:
        model(torch.ones(2, 4)).sum().backward()
    return calls.counts[torch.ops.aten.addmm.default], calls.counts[torch.ops.aten.gelu.default]


def test_what_is_recomputed_is_what_was_asked_for():
    on = {"activation_checkpointing": True}
    assert calls_of(LoopConfig()) == (8, 4)
    assert calls_of(LoopConfig(**on)) == (12, 8)  # the last product is not needed again
    assert calls_of(LoopConfig(**on, recompute_every=2)) == (10, 6)
    assert calls_of(LoopConfig(**on, keep_products=True)) == (8, 8)


class Grouped(nn.Linear):
    """A product per half of the rows, as of two experts, and a function of it."""

    def forward(self, x):
        ends = torch.tensor([4, 8], dtype=torch.int32)
        return nn.functional.gelu(torch._grouped_mm(x, self.weight.expand(2, 8, 8).contiguous(), ends))


@pytest.mark.parametrize(("keeps", "times"), [(False, 2), (True, 1)])
def test_products_of_experts_are_kept_as_others_are(keeps, times):
    model = nn.Sequential(*(Grouped(8, 8) for _ in range(4)))
    prepare(outermost(repeated_blocks(model)), LoopConfig(activation_checkpointing=True, keep_products=keeps))
    with Calls() as calls:
        model(torch.ones(8, 8, requires_grad=True)).backward(torch.ones(8, 8))
    assert calls.counts[torch.ops.aten._grouped_mm.default] == 4 * (times + 2)


def compiled(path, folder):
    plain, graphs = fit(path, folder / "plain"), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = fit(path, folder / "compiled", ["train.compile=eager"])
    return plain, found, torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs


@pytest.mark.long
def test_layers_are_compiled_each_by_itself(pool, tmp_path):
    path = config_for(tmp_path, model__pattern="[*-][*-]")
    plain, found, graphs = pool.run(2, compiled, path, tmp_path)[0]
    assert_close(found, plain)
    assert 1 <= graphs <= 2


def runs_of_compiled_layers(path, folder):
    runs = []

    def counted(graph, inputs):
        def run(*arguments):
            runs.append(graph)
            return graph.forward(*arguments)

        return run

    torch._dynamo.register_backend(counted, name="counted")
    found = {}
    for name, overrides in {"plain": [], "looked at": ["train.peak_tflops=1"]}.items():
        runs.clear()
        config = load_config(path, ["train.compile=counted", "train.steps=3", *overrides])
        trainer, after_steps = Trainer(config, Run(folder / name), say=lambda line: None), found.setdefault(name, [])
        trainer.moment = lambda name, numbers, seen=after_steps: name == "step" and seen.append(len(runs))
        trainer.run()
    return found


@pytest.mark.long
def test_the_step_whose_operations_are_counted_runs_without_compiled_layers(pool, tmp_path):
    found = pool.run(1, runs_of_compiled_layers, config_for(tmp_path), tmp_path)[0]
    each = found["plain"][0]
    assert each > 0 and found == {"plain": [each, 2 * each, 3 * each], "looked at": [0, each, 2 * each]}


WRONG = {
    "train.compile=fast": 'train.compile = "fast": must be a backend',
    "optimizer.name=nowhere:Thing": "cannot be imported",
    "optimizer.name=torch.nn:Linear": "is not a torch.optim.Optimizer",
    "optimizer.name=torch.optim:Nothing": "torch.optim has no Nothing",
    "optimizer.options={momentum = 0.9}": "AdamW has no option 'momentum'; its options are amsgrad",
    "optimizer.name=SGD & optimizer.betas=[0.5, 0.6]": "has no effect, because SGD has no such option",
    "optimizer.name=SGD & optimizer.options={nesterov = true}": "SGD refuses its options",
    'optimizer.name=Muon & optimizer.adamw_for=["*"]': "leaves no matrix",
}


def refused(path, folder):
    found = []
    for number, way in enumerate(WRONG):
        with pytest.raises(ConfigError) as error:
            Trainer(load_config(path, way.split(" & ")), Run(folder / str(number)), say=lambda line: None)
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_what_only_the_model_shows_to_be_wrong_is_one_line_too(pool, tmp_path):
    for line, words in zip(pool.run(1, refused, config_for(tmp_path), tmp_path)[0], WRONG.values(), strict=True):
        assert words in line and "\n" not in line


def test_muon_and_its_adamw_get_the_configured_options():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    made = make_optimizer(net, OptimizerConfig(name="Muon", weight_decay=0.25, eps=1e-3, adamw_for=()))
    muon, *adamw = made.param_groups
    assert (muon["weight_decay"], muon["adjust_lr_fn"]) == (0.25, "match_rms_adamw")
    assert adamw and all(group["eps"] == 1e-3 for group in adamw)


def test_names_of_matrices_for_adamw_hold_if_activations_are_recomputed():
    net = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    muon, *_ = make_optimizer(net, OptimizerConfig(name="Muon", adamw_for=("0.weight",))).param_groups
    assert [*map(id, muon["params"])] == [id(net[1].weight)]
