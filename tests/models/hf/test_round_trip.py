"""A release of every family is trained a step, on one rank and on several, and generates as transformers does."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.hf.released import FAMILIES, IGNORED, config, make, tensors
from tests.models.hf.test_found import rewrite, with_company
from tests.models.hf.test_released import without_dtype
from weft.mesh import init_meshes
from weft.models import hf
from weft.models.generate import Sampling, continuations

NAMES = [name for _, name in FAMILIES.values()]
PROMPT = [5, 9, 11, 2, 40, 3]
LENGTH = 12
COMPANY = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def generated(directory, **options):
    """By transformers, as the directory's files say: the end tokens are those of its generation_config.json."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    options["use_mtp"] = False  # speculation, which MiniMax-M2 asks for without the weights of it
    return model.generate(prompt, max_new_tokens=LENGTH, **options)[0, len(PROMPT) :].tolist()


def greedy(directory, name, ends=()):
    """By weft."""
    model = hf.from_pretrained(directory, ignored=IGNORED.get(name, ()))
    steps = continuations(model, [PROMPT], ends=ends, most=LENGTH, sampling=Sampling(temperature=0))
    return [token for (token,) in steps]


def trained_a_step(pairs):
    """Read each of some directories, take a step on half of the tokens or on all, and write the model."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    meshes = [None, None] if ranks == 1 else [init_meshes("cpu"), init_meshes("cpu", ep=2)]
    for source, target, name in pairs:
        ignored = IGNORED.get(name, ())
        has_experts = "E" in hf.config_of(source, ignored=ignored).pattern
        model = hf.from_pretrained(source, meshes=meshes[has_experts], ignored=ignored).train()
        tokens = torch.randint(61, (4, 14), generator=torch.Generator().manual_seed(1))
        tokens = tokens.chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
        model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        hf.save_pretrained(model, target)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """name -> a directory of transformers with everything that a release has, and the text that it generates."""
    found = {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp(name)
        make(name, directory)
        with_company(directory)
        (directory / "generation_config.json").unlink()
        text = generated(directory, eos_token_id=None)
        other = next(token for token in range(61) if token not in text)
        ends = {"eos_token_id": [text[LENGTH // 2], other], "do_sample": False, "transformers_version": "4.57.0"}
        (directory / "generation_config.json").write_text(json.dumps(ends))
        if "text_config" not in config(name):
            rewrite(directory, max_position_embeddings=4321)
        found[name] = directory, text, set(ends["eos_token_id"])
    return found


@pytest.mark.long
def test_the_best_tokens_of_a_release_of_every_family_are_those_of_transformers(published):
    assert len(FAMILIES) == len(hf.families.FAMILIES)
    for name, (directory, text, _) in published.items():
        assert greedy(directory, name) == text, name


@pytest.mark.long
def test_what_is_trained_and_saved_stops_where_the_original_does_and_has_its_company(published, tmp_path):
    pairs = [(directory, tmp_path / name, name) for name, (directory, _, _) in published.items()]
    trained_a_step(pairs)
    stopped = 0
    for source, target, name in pairs:
        _, _, ends = published[name]
        before, after = tensors(source), tensors(target)
        assert before.keys() == after.keys(), name
        assert any(not torch.equal(after[each], tensor) for each, tensor in before.items()), name
        described = [json.loads((each / "config.json").read_text()) for each in (source, target)]
        assert without_dtype(described[0]) == without_dtype(described[1]), name
        for each in COMPANY:
            assert (target / each).read_bytes() == (source / each).read_bytes(), name
        written = generated(target)
        stop = next((at for at, token in enumerate(written) if token in ends), LENGTH)
        assert written[: stop + 1] == written, name  # it stops
        assert greedy(target, name, ends) == written[:stop], name
        stopped += stop < LENGTH
    assert stopped > len(pairs) // 2
    assert AutoTokenizer.from_pretrained(target).chat_template.startswith("{% for message")


@pytest.mark.long
def test_what_four_ranks_train_and_save_is_what_one_process_does(tmp_path, pool):
    for name in NAMES:
        make(name, tmp_path / "theirs" / name)
        with_company(tmp_path / "theirs" / name)
    pool.run(4, trained_a_step, [(tmp_path / "theirs" / name, tmp_path / "four" / name, name) for name in NAMES])
    trained_a_step([(tmp_path / "theirs" / name, tmp_path / "one" / name, name) for name in NAMES])
    for name in NAMES:
        four, one = tmp_path / "four" / name, tmp_path / "one" / name
        assert_close(tensors(four), tensors(one), rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")
        assert (four / "config.json").read_text() == (one / "config.json").read_text(), name
        for each in COMPANY:
            assert (four / each).read_bytes() == (tmp_path / "theirs" / name / each).read_bytes(), name


def test_a_dtype_that_is_a_name_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"dtype='bfloat16': pass a torch.dtype, such as torch.bfloat16"):
        hf.from_pretrained(tmp_path, dtype="bfloat16")
