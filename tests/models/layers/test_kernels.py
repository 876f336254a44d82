"""Kernels of other packages: chosen where they run. None is installed here: stand-ins have the signatures, shapes and
meanings that the packages document."""

import logging
import sys
import types

import pytest
import torch
from torch.testing import assert_close

from weft.models import Documents, HybridConfig, HybridModel
from weft.models.layers import kernels
from weft.models.layers.delta_net import delta_chunked

SIZES = {"vocab_size": 37, "hidden_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_groups": 2}
KINDS = {"M": ("mamba_kernel", kernels.SCAN), "G": ("delta_kernel", kernels.RULE)}


def chunk_scan(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    """What mamba_ssm documents, position after position: its shapes, its defaults, its result in the dtype of `x`."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    assert dt.shape == (batch, seqlen, nheads) and A.shape == (nheads,)
    assert B.shape == C.shape == (batch, seqlen, ngroups, dstate)
    assert initial_states is None or initial_states.shape == (batch, nheads, headdim, dstate)
    assert dt_softplus is False and dt_limit == (0.0, float("inf"))  # the step is taken as it is
    assert all(each is None for each in (D, z, dt_bias, cu_seqlens)) and not return_varlen_states
    state = dt.new_zeros(batch, nheads, headdim, dstate) if initial_states is None else initial_states
    of_heads = torch.arange(nheads) // (nheads // ngroups)
    assert seq_idx is None or (seq_idx.shape == (batch, seqlen) and seq_idx.dtype == torch.int32)
    out = []
    for t in range(seqlen):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        written = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t].to(dt.dtype), B[:, t, of_heads].to(dt.dtype))
        state = torch.exp(dt[:, t] * A)[..., None, None] * state + written
        out.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t, of_heads].to(dt.dtype)))
    result = torch.stack(out, dim=1).to(x.dtype)
    return (result, state) if return_final_states else result


def chunk_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    **options,
):
    """What fla documents, position after position: its shapes, its defaults, its result in the dtype of `q`."""
    batch, length, heads, width = q.shape
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert k.shape == q.shape and v.shape[:2] == (batch, length) and v.shape[2] % heads == 0
    assert g.shape == beta.shape == v.shape[:3] and g.max() <= 0
    assert initial_state is None or initial_state.shape == (batch, v.shape[2], width, v.shape[3])
    assert use_qk_l2norm_in_kernel and not options
    assert cu_seqlens is None or (batch == 1 and cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == length)
    dtype = q.dtype
    q, k, v, g, beta = (each.float() for each in (q, k, v, g, beta))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each[:, :, torch.arange(v.shape[2]) // (v.shape[2] // heads)] for each in (q, k))
    state = q.new_zeros(batch, v.shape[2], width, v.shape[3]) if initial_state is None else initial_state.float()
    out = []
    for t in range(length):
        if cu_seqlens is not None and t in cu_seqlens:
            state = torch.zeros_like(state)
        state = state * g[:, t, :, None, None].exp()
        correction = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * (width**-0.5 if scale is None else scale))
    result = torch.stack(out, dim=1).to(dtype)
    return result, state if output_final_state else None


@pytest.fixture(autouse=True)
def fresh():
    """What was found and told before is forgotten."""
    for remembered in (kernels._found, kernels._tell):
        remembered.cache_clear()
    yield
    for remembered in (kernels._found, kernels._tell):
        remembered.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins for both packages, and the calls that they get."""
    calls = []
    for (_, path, function), stand_in in ((kernels.SCAN, chunk_scan), (kernels.RULE, chunk_rule)):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))

        def called(*args, function=function, stand_in=stand_in, **options):
            calls.append(function)
            return stand_in(*args, **options)

        setattr(sys.modules[path], function, called)
    return calls


def model(symbol, **options):
    torch.manual_seed(0)
    return HybridModel(HybridConfig(pattern=symbol, linear_num_value_heads=8, **SIZES, **options))


CLOSE = {"M": {"rtol": 1e-4, "atol": 1e-5}, "G": {"rtol": 0.1, "atol": 0.01}}  # fla computes in half precision


@pytest.mark.slow
@pytest.mark.parametrize("symbol", KINDS)
def test_a_kernel_that_is_installed_and_usable_computes_what_torch_computes(installed, monkeypatch, symbol):
    setting, place = KINDS[symbol]
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    tokens = torch.arange(30).view(2, 15)
    found = []
    for choice in ("torch", "auto", place[0]):
        net = model(symbol, **{setting: choice})
        if symbol == "G":
            net.to(torch.bfloat16)
        net(tokens, labels=tokens).backward()
        cache: dict = {}
        parts = torch.cat([net(part, cache=cache) for part in tokens.split([7, 1, 7], dim=1)], dim=1)
        assert_close(parts, net(tokens), **CLOSE[symbol])
        found.append([weight.grad for weight in net.parameters()])
    assert_close(found[1], found[0], **CLOSE[symbol])
    assert_close(found[2], found[1], rtol=0, atol=0)
    assert set(installed) == {place[2]} and len(installed) == 8  # twice four: one position alone is a step


def random_rule(dtype, width=8):
    """Queries, keys, values, decays, weights and a state, two value heads for each key head."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = normal(2, 9, 2, width), normal(2, 9, 2, width), normal(2, 9, 4, 6)
    g, beta, state = -normal(2, 9, 4).exp(), normal(2, 9, 4).sigmoid(), normal(2, 4, width, 6)
    return [each.requires_grad_() for each in (*(each.to(dtype) for each in (q, k, v)), g, beta.to(dtype), state)]


def test_what_fla_is_handed_and_gives_back_is_the_delta_rule_with_its_gradients(installed, monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    found = []
    for rule in (delta_chunked, kernels.fast_rule("fla", delta_chunked)):
        given = random_rule(torch.bfloat16)
        output, last = rule(*given)
        (output.square().sum() + last.square().sum()).backward()
        found.append((output, last, [each.grad.float() for each in given]))
        assert output.dtype == last.dtype == torch.float32
    assert installed == ["chunk_gated_delta_rule"]
    assert_close(found[1], found[0], rtol=0.03, atol=0.03)  # its output is rounded to bf16


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"dtype": torch.float32}, "it computes in half precision, but the tensors are float32"),
        ({"dtype": torch.bfloat16, "width": 320}, "its key heads are at most 256 wide, but these are 320 wide"),
    ],
)
def test_what_fla_does_not_take_is_left_to_torch_or_refused(installed, monkeypatch, caplog, given, reason):
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        kernels.fast_rule("auto", delta_chunked)(*random_rule(**given))
    assert f"fla is not used: {reason}" in caplog.text and installed == []
    with pytest.raises(kernels.KernelError, match=f"fla cannot be used: {reason}"):
        kernels.fast_rule("fla", delta_chunked)(*random_rule(**given))


@pytest.mark.parametrize("symbol", KINDS)
def test_why_a_kernel_is_not_used_is_logged_once(caplog, symbol):
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        for _ in range(2):
            model(symbol)(torch.arange(10)[None])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{KINDS[symbol][1][0]} is not used: it is not installed; torch's operations are used instead"


def test_a_kernel_that_is_installed_says_why_it_cannot_be_used_on_the_cpu(installed, caplog):
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        model("M")(torch.arange(10)[None])
    assert "mamba_ssm is not used: it runs on CUDA, but the tensors are on cpu" in caplog.text
    assert installed == []


def test_a_package_that_breaks_on_import_is_named_with_its_error(monkeypatch, caplog, tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        model("G")(torch.arange(10)[None])
    assert "fla is not used: it needs a_package_that_nobody_has, which is not installed" in caplog.text


@pytest.mark.parametrize("symbol", KINDS)
def test_a_kernel_that_is_named_and_does_not_run_is_an_error(symbol):
    setting, place = KINDS[symbol]
    with pytest.raises(kernels.KernelError, match=f"{place[0]} cannot be used: it is not installed; choose 'auto'"):
        model(symbol, **{setting: place[0]})(torch.arange(10)[None])


@pytest.mark.parametrize("symbol", KINDS)
def test_a_kernel_receives_the_document_boundaries(installed, monkeypatch, symbol):
    setting, place = KINDS[symbol]
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    tokens = torch.arange(30).view(2, 15)
    documents = Documents.from_cu_seqlens(torch.tensor([0, 4, 15, 26, 30]), 2, 15)
    found = []
    for choice in ("torch", place[0]):
        net = model(symbol, **{setting: choice}).to(torch.bfloat16 if symbol == "G" else torch.float32)
        found.append(net(tokens, documents=documents))
    assert_close(*found, **CLOSE[symbol])
    assert installed == [place[2]]
    assert not torch.allclose(net(tokens)[0, 4:], found[1][0, 4:], **CLOSE[symbol])
