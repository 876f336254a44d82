"""Kernels of other packages: chosen where they run. None is installed here, so stand-ins have their signatures."""

import logging
import sys
import types

import pytest
import torch
from torch.testing import assert_close

from weft.models import HybridConfig, HybridModel
from weft.models.layers import kernels
from weft.models.layers.delta_net import delta_chunked
from weft.models.layers.mamba2 import ssd_chunked

SIZES = {"vocab_size": 37, "hidden_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_groups": 2}
KINDS = {"M": ("mamba_kernel", kernels.SCAN), "G": ("delta_kernel", kernels.RULE)}


def chunk_scan(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, **options):
    """As mamba_ssm's: the step is taken as it is, and both results are returned where they are asked for."""
    assert options == {"return_final_states": True} and (D, z, dt_bias) == (None, None, None)
    y, last = ssd_chunked(x, dt, A, B, C, initial_states, chunk_size)
    return y.to(x.dtype), last


def chunk_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **options):
    """As fla's: one key head for each value head, keys of length 1 made inside."""
    assert options == {"use_qk_l2norm_in_kernel": True} and scale is None and q.shape[2] == v.shape[2]
    o, last = delta_chunked(q, k, v, g, beta, initial_state)
    return o.to(v.dtype), last if output_final_state else None


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


@pytest.mark.parametrize("symbol", KINDS)
def test_a_kernel_that_is_installed_and_usable_computes_what_torch_computes(installed, monkeypatch, symbol):
    setting, place = KINDS[symbol]
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    tokens = torch.arange(30).view(2, 15)
    found = []
    for choice in ("torch", "auto", place[0]):
        net = model(symbol, **{setting: choice})
        net(tokens, labels=tokens).backward()
        cache: dict = {}
        parts = torch.cat([net(part, cache=cache) for part in tokens.split([7, 1, 7], dim=1)], dim=1)
        assert_close(parts, net(tokens), rtol=1e-4, atol=1e-5)
        found.append([weight.grad for weight in net.parameters()])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])
    assert set(installed) == {place[2]} and len(installed) == 8  # twice four: one position alone is a step


@pytest.mark.parametrize("symbol", KINDS)
def test_why_a_kernel_is_not_used_is_logged_once(caplog, symbol):
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        for _ in range(2):
            model(symbol)(torch.arange(10)[None])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{KINDS[symbol][1][0]} is not used: it is not installed; torch's operations do its work"


def test_a_kernel_that_is_installed_says_why_it_cannot_be_used_on_the_cpu(installed, caplog):
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        model("M")(torch.arange(10)[None])
    assert "mamba_ssm is not used: it runs on CUDA, and the tensors are on cpu" in caplog.text
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
