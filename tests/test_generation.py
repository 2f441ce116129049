"""Text from prompts of several lengths, under autocast, and after an error; what sample.py asks for."""

import math
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name
from unittest.mock import Mock

import pytest
import torch
from conftest import VARIANTS, every_variant, refuses, scale_of_difference, slow, tiny, tokens
from running import compiling, flags, refused, train
from test_model import greedy_by_recomputation

from forms import FORMS
from nanonorm.cache import KVCache
from nanonorm.files import read_file
from nanonorm.generation import aligned

LENGTHS = (5, 1, 16, 21, 11)  # of a context of 16: four of them grow too long at other steps than the others
EXACT = 1e-12  # float64: another order of summation
ALL = [*((variant, "rope") for variant in VARIANTS), ("coupled", "learned"), ("layernorm-all", "learned")]
every_variant_and_table = pytest.mark.parametrize("variant, positions", ALL)


def ragged(*lengths) -> list[torch.Tensor]:
    return [tokens(1, length, seed=i)[0] for i, length in enumerate(lengths)]


def watch(monkeypatch, name: str, look) -> list:
    """What `look` makes of the arguments of every call of a function, from now on."""
    seen, function = [], resolve_name(name)

    def watched(*args, **more):
        seen.append(look(*args, **more))
        return function(*args, **more)

    monkeypatch.setattr(name, watched)
    return seen


@every_variant_and_table
@pytest.mark.parametrize("form", ["trained", "folded"])
def test_rows_of_several_lengths_say_what_each_says_alone(variant, positions, form):
    shape = {"n_kv_head": 2, "tie_embeddings": False, "positions": positions, "std": 0.5}
    model, prompts = FORMS[form](tiny(variant, **shape)).eval(), ragged(*LENGTHS)
    with torch.no_grad():
        alone = [greedy_by_recomputation(model, row[None], 30, 16)[0] for row in prompts]
    assert len(torch.stack([text[-30:] for text in alone]).unique()) > 9  # not one token for ever
    for use_cache in (True, False):
        singly = [model.generate(row[None], 30, temperature=0, use_cache=use_cache)[0] for row in prompts]
        assert all(map(torch.equal, singly, alone)), use_cache
        together = model.generate(prompts, 30, temperature=0, use_cache=use_cache)
        assert [len(text) for text in together] == [length + 30 for length in LENGTHS]
        assert all(map(torch.equal, together, alone)), use_cache
    lists = model.generate([row.tolist() for row in prompts], 1, temperature=0)
    assert [text[-1] for text in lists] == [text[-30] for text in alone]


@every_variant_and_table
@torch.no_grad()
def test_logits_behind_padding_are_those_without_it(variant, positions):
    """Whole, and through the cache in pieces, of which the first may hold nothing but padding; whatever the
    padding is."""
    model = tiny(variant, n_kv_head=2, qk_norm=True, positions=positions).eval()
    prompts = ragged(5, 1, 14)
    wanted = [model(row[None])[0] for row in prompts]
    idx, padding = aligned(prompts, "cpu")
    pad = torch.tensor(padding)
    other = torch.where(torch.arange(14) < pad[:, None], 60, idx)
    cache, cuts = KVCache(model, 3, 16), (0, 6, 7, 14)
    pieces = [model(idx[:, a:b], cache=cache, pad=pad) for a, b in pairwise(cuts)]
    found = [model(idx, pad=pad), model(other, pad=pad), torch.cat(pieces, 1)]
    for logits in found:
        assert logits.isfinite().all()
        for row, (n, own) in enumerate(zip(padding, wanted, strict=True)):
            assert scale_of_difference(logits[row, n:], own) <= EXACT


def test_rows_of_one_length_need_no_mask(monkeypatch):
    """So they are computed as without padding, to the bit; a ragged batch whose contexts become equally long
    is computed so from there on."""
    model, idx = tiny("coupled", std=0.5).eval(), tokens(2, 5)
    wanted = model.generate(idx, 20, temperature=0)
    asked = watch(monkeypatch, "model.Transformer.forward", lambda *_, pad=None, **more: pad)
    assert torch.equal(torch.stack(model.generate(list(idx), 20, temperature=0)), wanted)
    assert asked == [None] * 20
    asked.clear()
    model.generate(ragged(18, 20), 5, temperature=0)
    assert asked == [None] * 5
    model.generate(ragged(2, 3), 1, temperature=0)
    assert asked[-1].tolist() == [1, 0]


@every_variant
@torch.no_grad()
def test_a_prompt_in_an_empty_cache_is_attended_to_causally(variant, monkeypatch):
    """By the flag, which flash attention takes, where it refuses a mask; with the logits of a pass without a
    cache. What comes later, and what is padded, has a mask."""
    model, idx = tiny(variant, n_kv_head=2).eval(), tokens(3, 14)

    def look(q, k, v, mask=None, dropout=0.0, is_causal=False, **more):
        return None if mask is None else mask.shape[-2:], is_causal, k.shape[2]

    wanted = model(idx)
    asked = watch(monkeypatch, "torch.nn.functional.scaled_dot_product_attention", look)
    cache = KVCache(model, 3, 16)
    first = model(idx[:, :9], cache=cache)
    assert asked == [(None, True, 9)] * 2
    asked.clear()
    then = [model(piece, cache=cache) for piece in idx[:, 9:].split((4, 1), 1)]
    assert asked == [((4, 16), False, 16)] * 2 + [((1, 16), False, 16)] * 2
    assert scale_of_difference(torch.cat((first, *then), 1), wanted) <= EXACT
    asked.clear()
    model(idx, cache=KVCache(model, 3, 16), pad=torch.tensor([0, 2, 0]))
    assert asked == [((14, 14), False, 14)] * 2


@pytest.mark.parametrize("rows", [1, 2])
def test_a_decoding_is_compiled_once(monkeypatch, rows):
    """Not once a token: whatever the compiler guards of a step's input, the next one has too."""
    compiler = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda model, options, **how: compiler(model, **how))
    with compiling():
        tiny().eval().generate(tokens(rows, 8), 6, temperature=0, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("prompts", [tokens(2, 5, seed=4), slow(ragged(5, 1, 9))], ids=["rows", "ragged"])
def test_compiled_generation_says_the_same(prompts):
    """Past the window's end too, where the context drops to its half. And it is compiled."""
    model = tiny("coupled", dtype=torch.float32, std=0.5)
    with compiling():
        compiled = model.generate(prompts, 20, temperature=0, compile=True)
    assert all(map(torch.equal, compiled, model.generate(prompts, 20, temperature=0, compile=False)))


def test_rows_stop_and_are_drawn_together():
    """At one id, or at one of several; those that have stopped go on with the first."""
    model, prompts = tiny(std=0.3, tie_embeddings=False), ragged(3, 7)
    free = model.generate(prompts, 24, temperature=0)
    new = [text[len(row) :].tolist() for text, row in zip(free, prompts, strict=True)]
    stop = max(set(new[0]) & set(new[1]), key=lambda t: abs(new[0].index(t) - new[1].index(t)))
    never = next(t for t in range(61) if t not in new[0] + new[1])
    for stops in ((stop,), (never, new[0][2], new[1][10])):
        firsts = [min(row.index(t) for t in stops if t in row) for row in new]
        assert min(firsts) < max(firsts) < 23  # the faster row would go on, and both end before the last step
        stopped = model.generate(prompts, 24, temperature=0, stop_id=stops if stops[1:] else stop)
        for text, row, said, first in zip(stopped, prompts, new, firsts, strict=True):
            assert text[len(row) :].tolist() == said[: first + 1] + [stops[0]] * (max(firsts) - first)
    first, again, other = (model.generate(prompts, 20, seed=seed) for seed in (5, 5, 6))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))


@pytest.mark.parametrize("prompts", [[], [[1, 2], []], torch.zeros(2, 0, dtype=torch.long), [tokens(1, 3)]])
def test_a_prompt_without_ids_is_refused(prompts):
    with refuses("at least one id"):
        tiny().generate(prompts, 3)


def test_to_draw_nothing_and_to_compile_without_a_cache_are_refused():
    for nothing in ({"top_k": 0}, {"top_p": 0.0}, {"top_p": math.nan}):
        with refuses("leave no token to draw"):
            tiny().generate([[1]], 1, **nothing)
    for heat in (-1.0, math.nan):
        with refuses("0 takes the likeliest token"):
            tiny().generate([[1]], 1, temperature=heat)
    with refuses("compile=True needs the cache"):
        tiny().generate([[1]], 3, use_cache=False, compile=True)


@every_variant
def test_under_autocast_the_cache_holds_what_attention_reads(variant):
    """Logits through the cache are those of one pass, to bfloat16's three digits."""
    model, idx = tiny(variant, dtype=torch.float32, n_kv_head=2, qk_norm=True).eval(), tokens(2, 16)
    exact = model(idx)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = KVCache(model, 2, 16)
        pieces = [model(piece, cache=cache) for piece in (idx[:, :5], idx[:, 5:6], idx[:, 6:])]
        assert cache.k[0].dtype == torch.bfloat16
        assert scale_of_difference(torch.cat(pieces, 1).float(), model(idx).float()) < 0.1
        assert scale_of_difference(torch.cat(pieces, 1).float(), exact) < 0.1
        for prompts in (idx, ragged(2, 5)):
            assert len(model.generate(prompts, 20, temperature=0)) == 2


def test_autocast_leaves_float64_and_its_cache_alone():
    model, prompt = tiny().eval(), tokens(2, 3)
    wanted = model.generate(prompt, 5, temperature=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert KVCache(model, 2, 16).k[0].dtype == torch.float64
        assert torch.equal(model.generate(prompt, 5, temperature=0), wanted)


def test_a_cache_has_room_for_no_more_than_a_text_may_have():
    with refuses("a cache of 17 tokens is longer than this model's texts, 16 at most; make it shorter"):
        KVCache(tiny(), 2, 17)


def test_an_error_leaves_the_mode_as_it_was():
    for training in (True, False):
        model = tiny().train(training)
        with pytest.raises(IndexError):
            model.generate(torch.tensor([[61]]), 3)  # one id more than there are
        assert model.training is training and model.blocks[0].training is training


def test_a_context_of_one_token_sees_that_one():
    model = tiny(block_size=1, std=0.5).eval()
    wanted = text = tokens(1, 3)
    with torch.no_grad():
        for _ in range(6):
            text = torch.cat((text, model(text[:, -1:])[:, -1].argmax(-1, keepdim=True)), 1)
    assert not torch.equal(text[:, :3], text[:, 3:6]) and torch.equal(wanted, text[:, :3])
    for use_cache in (True, False):
        assert torch.equal(model.generate(wanted, 6, temperature=0, use_cache=use_cache), text)
        assert torch.equal(model.generate(list(wanted), 6, temperature=0, use_cache=use_cache)[0], text[0])


def test_sampling_without_a_compiler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("no g++")))
    said = refused(capsys, "nowhere", "--compile=True", "--device=cpu", program="sample.py")
    assert "torch.compile does not work here (no g++)" in said


def test_samples_are_drawn_in_one_batch(corpus, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    train(*flags(run, corpus, max_iters=2, taper="none", aux_weight=0.0, gate_end=2, bias=True))
    asked = watch(monkeypatch, "model.Transformer.generate", lambda model, prompts, *_, **more: prompts)
    capsys.readouterr()
    said = []
    for seed in (1, 1, 2):
        argv = ("--prompt=def ", "--num_samples=3", "--max_new_tokens=8", f"--seed={seed}")
        train(run, *argv, program="sample.py")
        said.append(capsys.readouterr().out)
    assert [prompts.shape[0] for prompts in asked] == [3] * 3
    samples = said[0].split("-" * 40 + "\n")
    assert len(set(samples)) == 3 and all(sample.startswith("def ") for sample in samples)
    assert said[0] == said[1] != said[2]
    train(run / "ckpt.pt", "--prompt=def ", "--max_new_tokens=8", program="sample.py")
    assert f"{run / 'ckpt.pt'} is a checkpoint, at step 2" in capsys.readouterr().err
    file = read_file(run / "model.pt")
    file["state"] = {n: t.bfloat16() if t.dim() == 2 else t for n, t in file["state"].items()}
    torch.save(file, run / "mixed.pt")
    train(run / "mixed.pt", "--prompt=def ", "--max_new_tokens=8", program="sample.py")
    assert "def " in capsys.readouterr().out
