"""Writes the inputs for fine-tuning: a small model in Hugging Face's format, conversations, and a configuration.

    python examples/chat_model.py runs/chat          # model/, talks.jsonl, chat.toml
    weft train runs/chat/chat.toml --ranks 2         # fine-tunes the model on the conversations
    weft chat runs/chat/runs/chat                    # answers; each line of input is a message

`make chat` runs all three commands.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.models import HybridConfig, HybridModel, hf

PLACES = """
France Paris, Italy Rome, Spain Madrid, Germany Berlin, Austria Vienna, Norway Oslo, Sweden Stockholm, Finland Helsinki,
Denmark Copenhagen, Poland Warsaw, Greece Athens, Portugal Lisbon, Ireland Dublin, Egypt Cairo, Kenya Nairobi,
Japan Tokyo, China Beijing, India Delhi, Peru Lima, Cuba Havana, Chile Santiago, Canada Ottawa
"""
CAPITALS = dict(place.split() for place in PLACES.split(","))
QUESTIONS = ("What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.")
ANSWER = "The capital of {} is {}."
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CONFIGURATION = """\
[model]
{model}
[data]
kind = "messages"
paths = [{talks}]
tokenizer = {tokenizer}
packing = "whole"
sequence_length = 96
cache_dir = {cache}

[train]
steps = {steps}
global_batch_size = 16
microbatch_size = 8
validate_every = 100
validation_batches = 2

[optimizer]
lr = 2e-3

[schedule]
warmup_steps = 20

[run]
directory = {runs}
name = "chat"
weights = {weights}
"""


def main(folder: Path, steps: int = 180) -> None:
    """Write everything into `folder`, unless an earlier call has done so."""
    configuration = folder / "chat.toml"  # written last
    if configuration.exists():
        print(f"{configuration} exists: its model and conversations are used again")
        return
    talks, chance = [], random.Random(0)
    for _ in range(1200):
        countries = chance.sample(list(CAPITALS), k=chance.randint(1, 2))
        talk = []
        for country in countries:
            talk.append({"role": "user", "content": chance.choice(QUESTIONS).format(country)})
            talk.append({"role": "assistant", "content": ANSWER.format(country, CAPITALS[country])})
        talks.append({"messages": talk})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    directory = folder / "model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    signs = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=signs, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((message["content"] for talk in talks for message in talk["messages"]), trainer)
    tokenizer.add_special_tokens([AddedToken(sign, special=True) for sign in signs])

    torch.manual_seed(0)
    cfg = HybridConfig(
        pattern="[*-]" * 3,
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        tie_word_embeddings=True,
    )
    hf.save(HybridModel(cfg), directory, "llama")
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    for name, content in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}),
        ("generation_config.json", {"eos_token_id": end, "do_sample": False}),
        ("config.json", {**json.loads((directory / "config.json").read_text()), "eos_token_id": end}),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")

    sizes = ("pattern", "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    model = [f"{name} = {json.dumps(getattr(cfg, name))}\n" for name in (*sizes, "tie_word_embeddings")]
    places = {"talks": "talks.jsonl", "tokenizer": "model/tokenizer.json", "cache": "cache", "runs": "runs"}
    paths = {name: json.dumps(str(folder / place)) for name, place in {**places, "weights": "model"}.items()}
    configuration.write_text(CONFIGURATION.format(model="".join(model), steps=steps, **paths))
    print(f"wrote a model, conversations and {configuration}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
