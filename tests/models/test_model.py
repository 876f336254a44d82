import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from weft.mesh import Meshes
from weft.models import HybridConfig, HybridModel

SMALL = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(pattern="[*-][*-]", **options):
    return HybridConfig(pattern=pattern, **{**SMALL, **options})


def seeded(cfg, seed=0):
    torch.manual_seed(seed)
    return HybridModel(cfg)


def batch(cfg, shape=(2, 9)):
    generator = torch.Generator().manual_seed(11)
    return (torch.randint(cfg.vocab_size, shape, generator=generator) for _ in range(2))


def assert_same_weights(model, expected):
    got, wanted = model.state_dict(), expected.state_dict()
    assert list(got) == list(wanted)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


SPELLINGS = [
    *[("[*-][*-]", "*-*-"), ("[*-]*", "*-*"), ("[*]-[-]", "*--"), ("[M*-]|[G*E]", "M*-G*E"), ("[G-]|M[+E]", "G-M+E")],
    ("[*-]|", "|*-"),
]


@pytest.mark.parametrize("grouped, lone", SPELLINGS)
def test_grouped_and_ungrouped_spellings_give_identical_outputs_and_gradients(grouped, lone):
    one, other = seeded(small(grouped)), seeded(small(lone))
    tokens, labels = batch(one.cfg)
    assert torch.equal(one(tokens), other(tokens))
    one(tokens, labels=labels).backward()
    other(tokens, labels=labels).backward()
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_numbers_of_layers_with_a_window_or_without_rotation_do_not_name_parallel_attention():
    layers = HybridModel(small("[P-][*-]", sliding_window=4, windowed=(0,), unrotated=(0,))).decoder.layers
    parallel, alone = layers[0].mixer.attention, layers[1].self_attention
    assert (parallel.window, alone.window) == (None, 4)
    assert parallel.rotary is not None and alone.rotary is None
    assert HybridModel(small("P", sliding_window=4)).decoder.layers[0].mixer.attention.window == 4


def test_members_of_a_group_share_the_prefix_of_their_logical_layer():
    model = HybridModel(small("*[*-]-"))
    weights = {"norm", "q_proj", "k_proj", "v_proj", "o_proj"}, {"norm", "gate_proj", "up_proj", "down_proj"}
    attention, mlp = (
        {f"{key}.{part}.weight" for part in parts} for key, parts in zip(("self_attention", "mlp"), weights)
    )
    expected = {"embedding.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    for number, keys in enumerate((attention, attention | mlp, mlp)):
        expected |= {f"decoder.layers.{number}.{key}" for key in keys}
    assert set(model.state_dict()) == expected


def test_the_loss_is_the_mean_cross_entropy_over_labels_that_are_not_ignored():
    model = seeded(small())
    tokens, labels = batch(model.cfg)
    labels[0, 3:] = -100
    kept = labels != -100
    reference = torch.nn.functional.cross_entropy(model(tokens)[kept], labels[kept])
    assert_close(model(tokens, labels=labels), reference)


def test_ignored_labels_leave_no_gradient():
    model = seeded(small("-"))
    tokens = torch.tensor([[1, 2]])
    model(tokens, labels=torch.tensor([[3, -100]])).backward()
    assert model.embedding.weight.grad[1].abs().sum() > 0
    assert model.embedding.weight.grad[2].abs().sum() == 0


def test_labels_of_another_shape_are_refused():
    model = HybridModel(small())
    tokens, labels = batch(model.cfg)
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(2, 9, 37\).*-100"):
        model(tokens, labels=labels[:, 1:])


@pytest.mark.parametrize("pattern", ["[*-][*-]", "[+-]", "M", "G"])
def test_a_position_sees_only_itself_and_earlier_positions(pattern):
    model = seeded(small(pattern))
    tokens, _ = batch(model.cfg)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % model.cfg.vocab_size
    before, after = model(tokens), model(changed)
    assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(dim=-1).all()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    cfg = small()
    assert_same_weights(seeded(cfg), seeded(cfg))
    assert not torch.equal(seeded(cfg).embedding.weight, seeded(cfg, seed=1).embedding.weight)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["MG[*E]-", "[+E]/[M-]"])
def test_two_identical_runs_are_bit_equal(pattern):
    found = []
    for _ in range(2):
        model = seeded(small(pattern, num_experts=4, moe_intermediate_size=8))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, labels = batch(model.cfg, (2, 70))
        for _ in range(2):
            model(tokens, labels=labels).backward()
            optimizer.step()
        found.append(model)
    assert_same_weights(*found)


def test_two_models_in_a_row_differ_under_one_seed():
    torch.manual_seed(0)
    cfg = small()
    assert not torch.equal(HybridModel(cfg).embedding.weight, HybridModel(cfg).embedding.weight)


def test_no_two_weight_matrices_start_alike():
    model = seeded(small())
    starts = [tuple(weight.flatten()[:4].tolist()) for weight in model.parameters() if weight.ndim > 1]
    assert len(set(starts)) == len(starts)


def test_initial_weights_do_not_depend_on_later_layers():
    shallow, deep = seeded(small("[*-]")), seeded(small("[*-][*-]-"))
    assert_same_weights(shallow.decoder.layers[0], deep.decoder.layers[0])
    assert_same_weights(shallow.embedding, deep.embedding)


@pytest.mark.parametrize("when", ["before construction", "before materialisation"])
@pytest.mark.parametrize("order", [list, lambda modules: list(reversed(modules))], ids=["forward", "backward"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_materialised_module_by_module_equals_one_built_directly(when, order, tied):
    pattern = "[*-][*-]" if tied else "M[G*E][*-]"
    cfg = small(pattern, tie_word_embeddings=tied, num_experts=2, mlp_bias=True, attention_bias="all")
    expected = seeded(cfg)
    if when == "before construction":
        torch.manual_seed(0)
    with torch.device("meta"):
        model = HybridModel(cfg)
    if when == "before materialisation":
        torch.manual_seed(0)
    owners = [
        module for module in model.modules() if [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    ]
    for module in order(owners):
        module.to_empty(device="cpu", recurse=False)
        for own in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            with torch.no_grad():
                own.fill_(float("nan") if own.is_floating_point() else -1)
        module.reset_parameters()
    assert_same_weights(model, expected)
    tokens, _ = batch(cfg)
    assert torch.equal(model(tokens), expected(tokens))


def test_resetting_a_module_brings_its_initial_weights_back():
    model = seeded(small("M[G*E][*-]", attention_bias="all", zero_centered_norm=True))
    start = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            for weight in module.parameters(recurse=False):
                torch.nn.init.zeros_(weight)
            module.reset_parameters()
    assert_same_weights(model, start)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_the_model_with_the_marks_of_its_parameters(copied):
    model = seeded(small("MGKP[*E]/[*E]", num_experts=4, expert_bias=True, tie_word_embeddings=True))
    again = copied(model)
    assert_same_weights(again, model)
    marks = [vars(parameter) for parameter in model.parameters()]
    assert any(marks) and [vars(parameter) for parameter in again.parameters()] == marks
    tokens, labels = batch(model.cfg)
    assert torch.equal(again(tokens, labels=labels), model(tokens, labels=labels))
    torch.nn.init.zeros_(again.embedding.weight)
    assert model.embedding.weight.count_nonzero()
    for module in again.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_same_weights(again, model)


def test_steps_of_mamba_begin_between_their_bounds_and_not_below_the_floor():
    cfg = small("M", mamba_num_heads=64, mamba_head_dim=1, time_step_min=1e-6, time_step_max=1e-2, time_step_floor=1e-3)
    begin = torch.nn.functional.softplus(seeded(cfg).decoder.layers[0].mixer.dt_bias)
    assert_close(begin.min(), torch.tensor(1e-3))
    assert 1e-3 < begin.max() <= 1e-2


def test_tied_embeddings_are_one_parameter_that_collects_both_gradients():
    tied, free = seeded(small(tie_word_embeddings=True)), seeded(small())
    assert set(free.state_dict()) - set(tied.state_dict()) == {"output_layer.weight"}
    with torch.no_grad():
        free.output_layer.weight.copy_(free.embedding.weight)
    tokens, labels = batch(tied.cfg)
    assert torch.equal(tied(tokens), free(tokens))
    tied(tokens, labels=labels).backward()
    free(tokens, labels=labels).backward()
    assert_close(tied.embedding.weight.grad, free.embedding.weight.grad + free.output_layer.weight.grad)


def test_a_training_step_works_after_a_longer_sequence_in_inference_mode():
    model = seeded(small())
    first = model.decoder.layers[0].self_attention.rotary.cos.shape[0]
    with torch.inference_mode():
        model(torch.zeros(1, first + 1, dtype=torch.int64))
    tokens, labels = batch(model.cfg)
    model(tokens, labels=labels).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_an_axis_that_the_model_cannot_use_is_refused():
    class TwoRanks:
        def size(self):
            return 2

    meshes = Meshes(dense=None, expert=None, ep=TwoRanks())
    with pytest.raises(ValueError, match=r"ep=2.*use ep=1"):
        HybridModel(small(), meshes=meshes)


def test_a_token_of_padding_has_no_gradient_in_the_embedding():
    model = seeded(small(pad_token_id=3))
    model(torch.tensor([[1, 3, 2]]), labels=torch.tensor([[3, 2, 1]])).backward()
    assert (model.embedding.weight.grad.abs().sum(-1) > 0).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.long
def test_hooks_on_what_a_layer_does_not_call_are_refused_in_a_plain_run_too():
    model = seeded(small("[*-][*E]", num_experts=4, moe_intermediate_size=8))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for layer in model.decoder.layers:
        handle = layer.mlp.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"^mlp \(.*\) has hooks, .*: put hooks on the layer or the modules"):
            model(tokens)
        handle.remove()
        layer.mlp.compile()
        with pytest.raises(ValueError, match=r"^mlp \(.*\) is compiled, .*: compile the layer or the modules"):
            model(tokens)
        layer.mlp._compiled_call_impl = None
    expected = model(tokens)
    model.decoder.layers[0].compile(backend="eager", fullgraph=True)
    assert_close(model(tokens), expected)
