"""The router against what the papers say, written one token after another."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from weft.moe import Router

HIDDEN = 8


def make(experts, k, weight=None, **options):
    torch.manual_seed(0)
    router = Router(HIDDEN, experts, k, **options)
    with torch.no_grad():
        router.weight.mul_(30)
        if weight is not None:
            router.weight.copy_(weight)
    return router


def chosen_by_hand(scores, k, num_groups, topk_groups):
    """Which experts one token visits: scores and group scores in Python's own stable sort."""
    size = len(scores) // num_groups
    groups = [range(start, start + size) for start in range(0, len(scores), size)]
    best_two = [torch.tensor(sorted(scores[expert] for expert in group)[-2:]).sum().item() for group in groups]
    allowed = sorted(range(num_groups), key=lambda group: -best_two[group])[:topk_groups]
    experts = sorted(expert for group in allowed for expert in groups[group])
    return sorted(experts, key=lambda expert: -scores[expert])[:k]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    group_size=st.integers(1, 3),
    num_groups=st.integers(1, 4),
    topk_groups=st.integers(1, 4),
    k=st.integers(1, 6),
    biased=st.booleans(),
)
def test_experts_are_the_best_of_the_best_groups_and_ties_go_to_the_lower_number(
    seed, group_size, num_groups, topk_groups, k, biased
):
    topk_groups = min(topk_groups, num_groups)
    k = min(k, topk_groups * group_size)
    router = make(
        group_size * num_groups,
        k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        score="sigmoid",
        expert_bias=biased,
        weight=torch.zeros(()),
    )
    generator = torch.Generator().manual_seed(seed)
    # Few different scores, so that most tokens have ties.
    with torch.no_grad():
        router.weight.copy_(torch.randint(-1, 2, router.weight.shape, generator=generator))
        if biased:
            router.expert_bias.copy_(torch.randint(-1, 2, (router.num_experts,), generator=generator) / 2)
    hidden = torch.eye(HIDDEN)[None]  # every token sees one column of the weight
    routing = router(hidden)
    scores = router.weight.detach().t().sigmoid()
    bias = router.expert_bias if biased else 0.0
    for token, choice in enumerate((scores + bias).tolist()):
        expected = chosen_by_hand(choice, k, num_groups, topk_groups)
        assert routing.experts[token].tolist() == expected
        picked = scores[token][expected]
        assert_close(routing.weights[token], picked / picked.sum())
    assert routing.counts.tolist() == routing.experts.flatten().bincount(minlength=router.num_experts).tolist()
    assert routing.kept is None and routing.loss is None


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_are_scores_normalised_or_not_and_scaled(score, norm):
    router = make(6, 3, score=score, norm_topk_prob=norm, scaling_factor=2.5)
    hidden = torch.randn(2, 5, HIDDEN)
    routing = router(hidden)
    logits = hidden.flatten(0, 1) @ router.weight.t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    expected = scores.gather(-1, routing.experts)
    if norm:
        expected = expected / expected.sum(-1, keepdim=True)
    assert_close(routing.weights, 2.5 * expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_is_that_of_deepseek_v3_and_adds_up_over_sequences(score):
    router = make(6, 2, score=score, aux_loss_coef=0.1)
    hidden = torch.randn(3, 5, HIDDEN)
    per_sequence = []
    for sequence in hidden:  # equations 17 to 20
        logits = sequence @ router.weight.t()
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)
        frequency = chosen.sum(0) * 6 / (2 * 5)
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        per_sequence.append(0.1 * (frequency * mean).sum())
    assert_close(router(hidden).loss, torch.stack(per_sequence).mean())
    assert_close(router(hidden).loss, torch.stack([router(part[None]).loss for part in hidden]).mean())
    uniform = make(6, 2, score=score, aux_loss_coef=0.1, weight=torch.zeros(()))
    assert_close(uniform(hidden).loss, torch.tensor(0.1))


def test_the_z_loss_is_a_mean_over_tokens_beside_the_balance_loss():
    hidden = torch.randn(3, 5, HIDDEN)
    z_only, both = make(6, 2, z_loss_coef=0.2), make(6, 2, z_loss_coef=0.2, aux_loss_coef=0.1)
    expected = 0.2 * (hidden @ z_only.weight.t()).logsumexp(-1).square().mean()
    assert_close(z_only(hidden).loss, expected)
    assert_close(both(hidden).loss, expected + make(6, 2, aux_loss_coef=0.1)(hidden).loss)


def test_losses_over_the_positions_of_two_ranks_are_those_of_whole_sequences():
    options = {"aux_loss_coef": 0.1, "z_loss_coef": 0.2}
    hidden = torch.randn(3, 6, HIDDEN)
    expected, gathered = make(6, 2, **options)(hidden).loss, []
    for half in hidden.chunk(2, 1):  # what each rank contributes
        router, mine = make(6, 2, **options), []
        router.share_positions(lambda tensor, mine=mine: mine.append(tensor) or torch.stack([tensor, tensor]))
        router(half)
        gathered.append(mine)
    for half in hidden.chunk(2, 1):
        router, of_ranks = make(6, 2, **options), zip(*gathered)
        router.share_positions(lambda tensor, of_ranks=of_ranks: torch.stack(next(of_ranks)))
        assert_close(router(half).loss, expected)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), factor=st.sampled_from([0.1, 0.5, 1.0, 1.25, 3.0]), ties=st.booleans())
def test_the_capacity_keeps_the_best_of_each_expert_in_each_sequence(seed, factor, ties):
    experts, k, seq, batch = 4, 2, 7, 2
    router = make(experts, k, capacity_factor=factor, score="sigmoid")
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, seq, HIDDEN, generator=generator)
    if ties:
        hidden = hidden[:, :1].expand(-1, seq, -1)
    routing = router(hidden)
    capacity = math.ceil(factor * seq * k / experts)
    scores = (hidden.flatten(0, 1) @ router.weight.t()).sigmoid().gather(-1, routing.experts)
    kept = torch.zeros_like(routing.kept)
    for sequence in range(batch):
        tokens = range(sequence * seq, (sequence + 1) * seq)
        for expert in range(experts):
            asked = [(t, slot) for t in tokens for slot in range(k) if routing.experts[t, slot] == expert]
            for t, slot in sorted(asked, key=lambda place: -scores[place].item())[:capacity]:
                kept[t, slot] = True
    assert torch.equal(routing.kept, kept)
    assert torch.equal(routing.weights != 0, kept)
    assert torch.equal(routing.counts, routing.experts[kept].bincount(minlength=experts))
    weights = make(experts, k, score="sigmoid")(hidden).weights
    assert torch.equal(routing.weights[kept], weights[kept]), "what stays counts as much as before"


def test_the_bias_moves_by_the_sign_of_the_missing_load_and_stays_in_fp32():
    router = make(4, 1, expert_bias=True).to(torch.bfloat16)
    router.update_bias(torch.tensor([10, 0, 5, 5]), rate=1e-3)
    router.update_bias(torch.tensor([10, 0, 5, 5]), rate=1e-3)
    assert_close(router.expert_bias, torch.tensor([-2e-3, 2e-3, 0.0, 0.0]))
    assert "expert_bias" in router.state_dict()
    with pytest.raises(RuntimeError, match="build it with expert_bias=True"):
        make(4, 1).update_bias(torch.zeros(4), rate=1e-3)


def test_updates_of_the_bias_balance_the_load():
    router = make(8, 2, score="sigmoid", expert_bias=True)
    hidden = torch.randn(4, 64, HIDDEN)
    before = router(hidden).counts
    for _ in range(300):
        router.update_bias(router(hidden).counts, rate=3e-3)
    after = router(hidden).counts
    balanced = hidden.shape[0] * hidden.shape[1] * router.top_k / router.num_experts
    assert before.max() > 1.4 * balanced
    assert after.max() < 1.05 * balanced


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_are_computed_in_fp32_for_any_model_dtype(autocast):
    router = make(6, 2, z_loss_coef=1.0)
    hidden = torch.randn(1, 9, HIDDEN)
    if not autocast:
        router, hidden = router.to(torch.bfloat16), hidden.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        routing = router(hidden)
    wide = make(6, 2, weight=router.weight.float(), z_loss_coef=1.0)
    exact = wide(hidden.float())
    assert routing.weights.dtype == routing.loss.dtype == torch.float32
    assert torch.equal(routing.weights, exact.weights)
    assert torch.equal(routing.loss, exact.loss)
    for each in (routing, exact):
        (each.weights[:, 0].sum() + each.loss).backward()
    assert torch.equal(router.weight.grad, wide.weight.grad.to(router.weight.dtype))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_a_batch_without_tokens_has_no_assignments_and_a_loss_of_zero(shape):
    router = make(4, 2, aux_loss_coef=0.1, z_loss_coef=0.1, capacity_factor=1.0)
    routing = router(torch.randn(*shape, HIDDEN))
    assert routing.experts.shape == routing.kept.shape == (0, 2)
    assert routing.counts.tolist() == [0] * 4
    assert routing.loss == 0
    routing.loss.backward()
    assert not router.weight.grad.any()


WRONG = {
    "num_experts=0: num_experts must be a positive integer": {"num_experts": 0},
    "hidden_size=0": {"hidden_size": 0},
    "top_k=0": {"top_k": 0},
    "top_k=1.5: top_k must be a positive integer": {"top_k": 1.5},
    "top_k=9: top_k must be at most num_experts=8": {"top_k": 9},
    "score='relu': score must be 'softmax' or 'sigmoid'": {"score": "relu"},
    "scaling_factor=0.0": {"scaling_factor": 0.0},
    "capacity_factor=0: capacity_factor must be a positive number, or None to drop nothing": {"capacity_factor": 0},
    "capacity_factor=nan": {"capacity_factor": math.nan},
    "aux_loss_coef=-0.1: aux_loss_coef must be a number, 0 for no such loss": {"aux_loss_coef": -0.1},
    "z_loss_coef=-1": {"z_loss_coef": -1},
    "num_groups=3: num_groups must be a divisor of num_experts=8": {"num_groups": 3},
    "topk_groups=3: topk_groups must be at most num_groups=2": {"num_groups": 2, "topk_groups": 3},
    "topk_groups=1 groups of 2 experts (num_experts=8, num_groups=4) leave only 2 experts for top_k=3": {
        "num_groups": 4,
        "top_k": 3,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_value_is_an_error_that_names_it_and_the_rule(message):
    options = {"hidden_size": HIDDEN, "num_experts": 8, "top_k": 2, **WRONG[message]}
    with pytest.raises(ValueError) as error:
        Router(**options)
    assert str(error.value).startswith(message)
