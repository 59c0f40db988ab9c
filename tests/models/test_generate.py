from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow.errors import ConfigError
from moeflow.models.generate import continue_text, generate
from moeflow.schema import GATES
from tests.models.gpts import VOCAB, gpt, tokens


class Letters:
    """A tokenizer of the first VOCAB letters from 'A' on."""

    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def decode(self, numbers: list[int]) -> str:
        return "".join(chr(number + 65) for number in numbers)


class Held:
    """Stands for a run's data: one held-out window."""

    tokenizer, seq_len = Letters(), 40

    @property
    def eval(self) -> Held:
        return self

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        return {"inputs": tokens(len(indices), self.seq_len)}


def sharp(**options):
    """A model whose predictions are far from even, so that a wrong token would show."""
    return gpt(init_std=0.4, **options)


def without_cache(model, out: Tensor, max_new: int) -> Tensor:
    model.eval()
    for _ in range(max_new):
        out = torch.cat([out, model(out)[:, -1:].argmax(-1)], dim=1)
    return out


@pytest.mark.parametrize("name", [n for n in GATES if n not in ("expert_choice", "soft")])
def test_every_gate_generates_as_it_evaluates(name):
    """Text by one token at a time is what a forward pass over the whole text gives, dropless."""
    scope = {} if name in ("hash", "zero") else {"capacity_factor": None, "eval_capacity_factor": None}
    model = sharp(gate={"name": name, "load_balance_scope": "batch", **scope})
    out = generate(model, tokens(2, 5), max_new=12, temperature=0)
    assert torch.equal(out, without_cache(model, tokens(2, 5), 12))


def test_padding_to_capacity_does_not_matter():
    plain, padded = sharp(), sharp(gate={"capacity_factor": 1.0, "pad_to_capacity": True})
    assert torch.equal(*(generate(model, tokens(2, 5), 12, temperature=0) for model in (plain, padded)))


@pytest.mark.parametrize(
    "options", [{}, {"num_experts": 0}, {"num_kv_heads": 2, "moe_every": 2, "moe_offset": 1}, {"tie_embeddings": False}]
)
def test_greedy_with_cache_is_greedy_without(options):
    model = sharp(**options)
    out = generate(model, tokens(2, 5), max_new=20, temperature=0)
    assert torch.equal(out, without_cache(model, tokens(2, 5), 20))
    assert len(set(out[0].tolist())) > 3


def test_drawn_tokens_do_not_depend_on_the_cache():
    model = sharp()
    out = generate(model, tokens(2, 5), 15, temperature=0.7, top_k=6, generator=torch.Generator().manual_seed(4))
    expected, generator = tokens(2, 5), torch.Generator().manual_seed(4)
    model.eval()
    for _ in range(15):
        logits = model(expected)[:, -1] / 0.7
        kept, ids = logits.topk(6)
        probs = torch.zeros(2, VOCAB).scatter(1, ids, torch.softmax(kept, dim=1))
        expected = torch.cat([expected, torch.multinomial(probs, 1, generator=generator)], dim=1)
    assert torch.equal(out, expected)


def test_frequencies_of_drawn_tokens():
    model = sharp().eval()
    start = tokens(1, 4)
    probs = torch.softmax(model(start)[0, -1] / 1.5, dim=0)
    many = start.expand(4000, 4)
    drawn = generate(model, many, 1, temperature=1.5, generator=torch.Generator().manual_seed(0))[:, -1]
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    expected = 4000 * probs.double()
    common = expected > 5
    chi_squared = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    assert chi_squared < 2.2 * common.sum().item()


@pytest.mark.parametrize("given", [3, 8, 13])
def test_never_sees_more_than_its_context(given):
    """As a plain forward pass over the window would continue: the window starts anew from its later half."""
    model, context = sharp(), 8
    out = generate(model, tokens(2, given), 21, temperature=0, context=context)
    expected, begin = tokens(2, given), max(0, given - context)
    for _ in range(21):
        if expected.shape[1] - begin > context:
            begin = expected.shape[1] - context // 2
        expected = torch.cat([expected, model(expected[:, begin:])[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, expected)


def test_text_of_a_sequence_does_not_depend_on_its_neighbors():
    """With a capacity, tokens of other sequences could push a choice out."""
    model = sharp(gate={"capacity_factor": 0.3})
    together = generate(model, tokens(6, 7), 12, temperature=0)
    alone = [generate(model, tokens(6, 7)[i : i + 1], 12, temperature=0) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.allclose(model(tokens(6, 7))[5:], model(tokens(6, 7)[5:])), "the capacity must have an effect"


def test_the_model_is_left_as_it_was():
    model = gpt(gate={"capacity_factor": 0.5}, dropout=0.3)
    configs = [block.mlp.gate.config for block in model.blocks.values()]
    generate(model, tokens(), 3)
    assert model.training
    with pytest.raises(IndexError):
        generate(model, torch.full((1, 2), VOCAB + 5), 3)  # fails inside the model
    assert model.training
    assert all(block.mlp.gate.config is c for block, c in zip(model.blocks.values(), configs, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_after_generation_training_goes_on_unchanged():
    def gradient(generate_first: bool) -> Tensor:
        model = gpt()
        if generate_first:
            generate(model, tokens(), 5, generator=torch.Generator().manual_seed(0))
        model.task.loss(model(tokens()), {"targets": tokens(seed=1)}).backward()
        return model.blocks["0"].attention.q.weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_each_token_passes_through_the_model_once():
    model = gpt()
    seen = []
    model.embed.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape[1]))
    generate(model, tokens(1, 6), 10)
    assert seen == [6] + [1] * 9


def test_text_and_samples():
    model = sharp()
    text = continue_text(model, Letters(), "BCA", 12, seed=5)
    assert text.startswith("BCA")
    assert len(text) == 15
    assert text == continue_text(model, Letters(), "BCA", 12, seed=5)
    assert text != continue_text(model, Letters(), "BCA", 12, seed=6)
    samples = model.task.samples(model, Held(), num_tokens=50)
    assert samples.startswith(Letters().decode(tokens(1, 40)[0, :24].tolist()))
    assert len(samples) == 74


def test_tokens_that_the_text_has_not_are_never_drawn():
    out = generate(sharp(), tokens(40, 2) % 5, 20, temperature=3.0, vocab_size=5)
    assert set(out.flatten().tolist()) == {0, 1, 2, 3, 4}


def test_no_new_tokens():
    assert torch.equal(generate(gpt(), tokens(), 0), tokens())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"max_new": -1}, "number of new tokens"),
        ({"context": 0}, "context"),
        ({"tokens_BS": torch.zeros(1, 0, dtype=torch.int64)}, "at least one token"),
    ],
)
def test_arguments_out_of_bounds(changes, what):
    with pytest.raises(ConfigError, match=what):
        generate(**{"model": gpt(), "tokens_BS": tokens(), "max_new": 3, **changes})
