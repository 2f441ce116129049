"""A student that learns from a teacher: the loss in pieces, adapters, and runs of train.py with both."""

import copy
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import adamw_losses, batch, refuses, same_state, scale_of_difference, state_of, tiny, tokens
from running import (
    assert_goes_on_from,
    assert_same,
    assert_same_log,
    compiling,
    cut_back,
    final,
    metrics,
    ran,
    refused,
    train,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from begin import untapered
from config import Config
from forms import fold, load_model, proved, unfuse
from model import Transformer
from nanonorm import adapters, kernels, parts
from nanonorm.distill import Distilled, distill_loss, fingerprint, share_weights, whole_distill_loss
from nanonorm.kernels import NOT_COUNTED
from nanonorm.ranks import Ranks, deal
from nanonorm.run import given_weights
from nanonorm.timing import tensor_peak
from scripts.couple import coupled
from scripts.speed.parts import take_pefts_forward
from train import Step

FAMILIES = {
    "llama": {"n_kv_head": 2, "head_dim": 8, "hidden": 40, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "llama-untied": {"n_kv_head": 2, "rope_scaling": (8.0, 1.0, 4.0, 8.0), "tie_embeddings": False},
    "qwen3": {"n_kv_head": 2, "head_dim": 10, "qk_norm": True, "tie_embeddings": False},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def teacher_of(family: str = "llama", dtype=torch.float64, **more) -> Transformer:
    return tiny("rmsnorm", n_layer=3, phase="norm", dtype=dtype, **FAMILIES[family], **more).eval()


OWN = {f"blocks.{i}.{name}" for i in (1, 2) for name in ("norm_mlp.weight", "floor")}  # of the student alone


def student_of(teacher: Transformer) -> Transformer:
    """The teacher with CoupledNorm from its second block on, each with an alpha, one with a floor."""
    numbers = torch.tensor([[1.3, 0.8], [0.5, 0.0]], dtype=torch.float64)
    return coupled(teacher.to_file({}), "file", 1, numbers)


def pair(family: str = "llama", kind: str = "dora", dtype=torch.float64, rank: int = 4, targets=None):
    """A Distilled with adapters, of random values where they start at 0, and the teacher."""
    pytest.importorskip("peft")
    teacher = teacher_of(family, dtype)
    student = student_of(teacher).train()
    share_weights(student, teacher, "")
    if kind != "none":
        adapters.put_on(student, kind, rank, 2.0 * rank, targets)
    return Distilled(student, teacher, {"path": "teacher", "sha256": "0"}), teacher


def shake(model: Distilled):
    """Random adapters: none of them is 0, no magnitude is a norm."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in adapters.learning(model.student).values():
            p.add_(0.1 * torch.randn(p.shape, generator=rng, dtype=torch.float64))
    adapters.measure_rows(model.student)


# --- the loss


def plain_loss(y, head, taught, teacher_head, targets, ce_weight, kl_weight):
    student = F.linear(y, *head).flatten(0, 1)
    teacher = F.linear(taught, *teacher_head).flatten(0, 1).detach().softmax(-1)
    ce = F.cross_entropy(student, targets.flatten())
    kl = (teacher * (teacher.log() - student.log_softmax(-1))).sum(-1).mean()
    return ce_weight * ce + kl_weight * kl, ce, kl


def random_heads(bias: bool, V: int = 31, D: int = 6, teacher_D: int = 9):
    rng = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=rng, dtype=torch.float64)
    y, taught = draw(2, 5, D).requires_grad_(), draw(2, 5, teacher_D)
    head = draw(V, D).requires_grad_(), draw(V).requires_grad_() if bias else None
    return y, head, taught, (draw(V, teacher_D), draw(V) if bias else None), tokens(2, 5, vocab=V)


SOME = torch.tensor([[True, False, False, True, True], [False, False, False, False, True]])


@pytest.mark.parametrize("counts", [torch.ones_like(SOME), SOME], ids=["all", "some"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0), (0.3, 1.7)])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_in_pieces_is_at_once(rows, weights, bias, counts, monkeypatch):
    """Values and gradients, whatever the size of a piece; 3 does not divide the 10 tokens. They are of the
    tokens that count alone."""
    y, head, taught, teacher_head, targets = random_heads(bias)
    monkeypatch.setattr(kernels, "LOGITS_AT_ONCE", 31 * rows)
    leaves = [y, *(t for t in head if t is not None)]
    others = (y[counts][None], head, taught[counts][None], teacher_head, targets[counts][None])
    expected = plain_loss(*others, *weights)
    wanted = torch.autograd.grad(3 * expected[0], leaves)
    given = (y, head, taught, teacher_head, targets.where(counts, NOT_COUNTED), *weights)
    found = distill_loss(*given)
    got = torch.autograd.grad(3 * found[0], leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert not found[1].requires_grad and not found[2].requires_grad
    if weights == (1.0, 0.0):  # the cross-entropy, without a teacher
        flat = y.flatten(0, 1), *head, None, None, None, given[4].flatten(), weights, True
        alone = kernels.in_pieces(*flat)
        torch.testing.assert_close(alone[:2], expected[:2], rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(3 * alone[0], leaves)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert alone[2] == 0
    with torch.no_grad():
        torch.testing.assert_close(distill_loss(*given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_where_no_target_counts_the_loss_is_0(rows, monkeypatch):
    y, head, taught, teacher_head, targets = random_heads(True)
    monkeypatch.setattr(kernels, "LOGITS_AT_ONCE", 31 * rows)
    none = distill_loss(y, head, taught, teacher_head, torch.full_like(targets, NOT_COUNTED), 0.3, 1.7)
    assert [loss.item() for loss in none] == [0, 0, 0]
    assert all(grad.abs().max() == 0 for grad in torch.autograd.grad(none[0], [y, *head]))


def test_one_head_for_both_learns_as_the_students_alone():
    y, (weight, _), taught, _, targets = random_heads(False, teacher_D=6)
    grads = []
    for loss, teacher in ((distill_loss, weight), (plain_loss, weight.detach())):
        total = loss(y, (weight, None), taught, (teacher, None), targets, 0.5, 1.0)[0]
        grads += torch.autograd.grad(total, weight)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_loss_takes_less_than_a_quarter_of_the_plain_ones_memory():
    """Of 4,096 tokens, of Qwen3's vocabulary. The plain one is measured at a quarter of the tokens, all of
    whose tables are as many times smaller: the test takes gigabytes and not tens of them."""
    V, D = 151_936, 64
    weight = (0.1 * torch.randn(V, D)).requires_grad_()

    def in_pieces(y, taught, targets):
        return distill_loss(y, (weight, None), taught, (weight, None), targets, 0.5, 1.0)[0]

    def plain(y, taught, targets):
        student = F.linear(y, weight).flatten(0, 1).log_softmax(-1)
        teacher = F.linear(taught, weight.detach()).flatten(0, 1).log_softmax(-1)
        kl = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return 0.5 * F.nll_loss(student, targets.flatten()) + kl

    def peak(loss, N):
        y, taught = torch.randn(1, N, D).requires_grad_(), torch.randn(1, N, D)
        return tensor_peak(lambda: loss(y, taught, tokens(1, N, vocab=V)).backward())

    assert peak(in_pieces, 4096) < peak(plain, 1024)


# --- adapters


@every_family
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_is_adapted(family, kind):
    """To 1e-9 in float64, and so is what is folded; the adapters moved the logits, and began with none."""
    model, _ = pair(family, kind)
    idx, x = tokens(2, 16), batch()
    student = model.student.eval()
    with torch.no_grad():
        plain = student_of(model.teacher)(idx)
        assert scale_of_difference(student(idx), plain) < 1e-12
        shake(model)
        adapted, ce = student(idx), student(*x).ce
        assert scale_of_difference(adapted, plain) > 1e-2
        merged, error = model.plain()
        assert scale_of_difference(merged(idx), adapted) < 1e-9 and error < 1e-9
        assert abs(merged.eval()(*x).ce - ce) < 1e-12
        folded, errors = proved(merged, "folded", idx)
        assert scale_of_difference(folded(idx), adapted) < 1e-9 and errors["float64"] < 1e-9
    assert not any("lora" in name for name in folded.state_dict())


def test_a_fused_matrix_has_the_ranks_of_its_parts_and_all_one_scaling():
    model, _ = pair(rank=5)
    for block in model.student.blocks:
        layers = (block.attn.qkv, block.attn.proj, block.mlp.gate_up, block.mlp.down)
        assert [m.r["default"] for m in layers] == [15, 5, 10, 5]
        assert {m.scaling["default"] for m in layers} == {2.0}
    model, _ = pair(rank=1000)  # no rank above full
    assert model.student.blocks[0].attn.proj.r["default"] == 24


def test_targets_are_chosen_and_others_refused():
    model, _ = pair(targets=("qkv", "down"))
    names = {name.split(".")[3] for name in adapters.learning(model.student)}
    assert names == {"qkv", "down"}
    with refuses("which has qkv, proj, gate_up, down"):
        pair(targets=("up",))
    with refuses("carries no adapter"):
        adapters.put_on(tiny("cbwc"), "lora", 4, 8.0)


def test_a_bfloat16_base_begins_where_it_was_and_its_adapters_are_float32():
    """peft takes a DoRA's magnitudes in the type of the weights: a 256th off in bfloat16."""
    model, _ = pair(dtype=torch.bfloat16)
    assert {p.dtype for p in adapters.learning(model.student).values()} == {torch.float32}
    for block in model.student.blocks:
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.gate_up, block.mlp.down):
            magnitude = layer.lora_magnitude_vector["default"].weight
            torch.testing.assert_close(magnitude, layer.weight.float().norm(dim=1), rtol=1e-6, atol=0)
            x = torch.randn(5, layer.in_features)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(layer(x), layer.get_base_layer()(x))
    shake(model)
    gain = model.student.blocks[0].norm_mlp.weight
    gain.data = gain.data.float() * 1.001
    trained = gain.detach().clone()
    idx = tokens(2, 16)
    adapted = copy.deepcopy(model.student).float().eval()
    adapters.measure_rows(adapted)
    merged, error = model.plain()
    assert error < 1e-9  # of lengths taken in float64
    assert_same(merged.blocks[0].norm_mlp.weight.detach(), trained)  # the proof is to see what trained
    assert {p.dtype for p in merged.parameters()} == {torch.float32}  # what adapters learned is not rounded
    assert scale_of_difference(merged(idx), adapted(idx)) < 1e-5


def lengths_of(network) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in network.named_buffers() if name.endswith(".row_lengths")}


def by_peft(network):
    """The network with peft's own forward pass of a DoRA."""
    network = copy.deepcopy(network)
    take_pefts_forward(network)
    return network


@pytest.mark.parametrize("biased", [False, True])
def test_dora_is_pefts_with_its_gradient(biased):
    """In float64 to 1e-12: values, gradients, the merged weights. Of a LayerNorm network with biases too."""
    model = pair()[0] if not biased else Distilled(tiny("layernorm", bias=True), tiny("layernorm"), {})
    if biased:
        adapters.put_on(model.student, "dora", 4, 8.0)
        assert model.student.blocks[0].mlp.down.bias is not None
    shake(model)
    found = []
    for network in (model.student, by_peft(model.student)):
        y = network.stream(tokens(2, 16))
        y.pow(2).sum().backward()
        found.append([y, *(p.grad for p in adapters.learning(network).values())])
    for ours, theirs in zip(*found, strict=True):
        assert scale_of_difference(ours, theirs) < 1e-12
    for layer, other in zip(*(adapters.adapted(n).values() for n in (model.student, network)), strict=True):
        other.merge()
        assert scale_of_difference(merged_weight(layer), other.get_base_layer().weight) < 1e-12


def merged_weight(layer):
    """What a layer multiplies by, read off its outputs."""
    bias = layer.get_base_layer().bias
    with torch.no_grad():
        y = layer.eval()(torch.eye(layer.in_features, dtype=torch.float64))
        return (y if bias is None else y - bias).T


def test_doras_row_lengths_in_low_precision():
    """Before a step those of W, to the bit; later to float32's rounding, also under autocast, of a bfloat16
    W, and of a row that B A all but cancels, where terms apart would leave nothing right."""
    model, _ = pair(dtype=torch.bfloat16)
    layer = model.student.blocks[1].mlp.down
    W, lengths = layer.weight, layer.lora_magnitude_vector["default"].row_lengths
    assert torch.equal(lengths, torch.linalg.vector_norm(W.float(), dim=1)) and lengths.dtype == torch.float32
    shake(model)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        B[3] = 0
        B[3, 0], A[0] = -0.5, W[3].float()  # alpha/rank is 2: row 3 becomes 0
        A[0] *= 1 + 2**-12
    with torch.autocast("cpu", torch.bfloat16):
        adapters.measure_rows(model.student)
    exact = torch.linalg.vector_norm(W.double() + 2 * B.double() @ A.double(), dim=1)
    torch.testing.assert_close(lengths.double(), exact, rtol=1e-5, atol=0)
    assert lengths[3] < 1e-3 * W[3].norm()


def test_a_step_leaves_the_row_lengths_of_what_it_made():
    """Training's, and reading a file; a run that forgot would go on with other lengths than it exports."""
    model, _ = pair()
    step, (x, y), before = taught_step(model.student, model), batch(), lengths_of(model.student)
    step.at(1)
    step(x[None], y[None])
    after = lengths_of(model.student)
    assert len(after) == 12 and not any(torch.equal(t, after[name]) for name, t in before.items())
    adapters.measure_rows(model.student)
    assert same_state(lengths_of(model.student), after)
    resumed, _ = pair()
    adapters.load_adapters(resumed.student, {name: p.detach() for name, p in step.learns.items()}, "file")
    assert same_state(lengths_of(resumed.student), after)


def test_a_dora_costs_what_a_lora_costs():
    """The same count of products, forward and backward; with peft's own forward pass it is more."""
    cost = {}
    for kind in ("lora", "dora", "peft"):
        model, _ = pair(kind="lora" if kind == "lora" else "dora", rank=8)
        student = by_peft(model.student) if kind == "peft" else model.student
        with FlopCounterMode(display=False) as counter:
            student.stream(tokens(2, 16)).sum().backward()
        cost[kind] = counter.get_total_flops()
    assert cost["dora"] == cost["lora"] < cost["peft"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_doras_forward_pass_is_one_graph(dtype):
    """And its rows' lengths no constants of it."""
    model, _ = pair(dtype=dtype)
    layer = model.student.blocks[1].attn.qkv
    x = torch.randn(3, 24, dtype=layer.lora_A["default"].weight.dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        shake(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            assert scale_of_difference(compiled(x), layer(x)) < 1e-12


def test_pefts_file_goes_both_ways():
    """What peft writes of ours it reads into a network of its own, and what it writes of that we read."""
    peft = pytest.importorskip("peft")
    model, _ = pair()
    shake(model)
    ours, idx = model.student.blocks, tokens(2, 16)
    file = peft.get_peft_model_state_dict(ours)
    assert not any("row_lengths" in name for name in (*file, *model.student.state_dict()))
    theirs = student_of(model.teacher)
    peft.inject_adapter_in_model(ours.peft_config["default"], theirs.blocks)
    assert not peft.set_peft_model_state_dict(theirs.blocks, file).unexpected_keys
    assert scale_of_difference(theirs.stream(idx), model.student.stream(idx)) < 1e-12
    back, _ = pair()
    peft.set_peft_model_state_dict(back.student.blocks, peft.get_peft_model_state_dict(theirs.blocks))
    adapters.measure_rows(back.student)
    assert torch.equal(back.student.stream(idx), model.student.stream(idx))


# --- student and teacher


@every_family
def test_training_moves_the_student_alone(family):
    """The teacher's logits stay to the bit; all of the student's parameters but OWN are its."""
    model, teacher = pair(family)
    idx, (x, y) = tokens(2, 16), batch()
    theirs = dict(teacher.named_parameters())
    own = {n.replace(".base_layer", ""): p for n, p in model.student.named_parameters() if ".lora_" not in n}
    assert {n for n, p in own.items() if p is not theirs.get(n)} == OWN
    learns = adapters.learning(model.student).values()
    assert sum(p.numel() for p in learns) < sum(p.numel() for p in theirs.values())
    with torch.no_grad():
        logits, began = teacher(idx), model.student(idx)

    def loss(step):
        adapters.measure_rows(model.student)
        return model.train()(x, y).total

    kl = adamw_losses(loss, model, 20, lr=1e-2)
    assert kl[-1] < 0.7 * kl[0]
    with torch.no_grad():
        assert torch.equal(teacher(idx), logits)
        assert scale_of_difference(model.student(idx), began) > 1e-3


@pytest.mark.parametrize("hooked", ["none", "student", "teacher"])
def test_the_loss_is_that_of_the_two_networks_and_a_heads_hook_fires(hooked):
    model, teacher = pair("llama-untied")
    shake(model)
    model.ce_weight, model.kl_weight, (x, y), seen = 0.3, 0.9, batch(), []
    y = y.clone()
    y[0, :5] = NOT_COUNTED
    if hooked != "none":
        getattr(model, hooked).lm_head.register_forward_hook(lambda *_: seen.append(1))
    losses = model.eval()(x, y)
    assert losses.aux == 0 and bool(seen) == (hooked != "none")
    student, taught = (m(x)[y != NOT_COUNTED].log_softmax(-1) for m in (model.student, teacher))
    ce = F.nll_loss(student, y[y != NOT_COUNTED])
    kl = F.kl_div(student, taught.detach(), reduction="batchmean", log_target=True)
    total = 0.3 * ce + 0.9 * kl
    torch.testing.assert_close((losses.ce, losses.kl, losses.total), (ce, kl, total), rtol=1e-9, atol=1e-12)
    learns = list(adapters.learning(model.student).values())
    grads = (torch.autograd.grad(loss, learns) for loss in (losses.total, total))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_the_scale_loss_is_the_students_own():
    """FakeLN's, which looks at the tokens: the first of a window and the end token count for no target."""
    student, (x, y) = tiny("layernorm-all-fake", phase="blend"), batch()
    model = Distilled(student, tiny("layernorm"), {}, ce_weight=0.5, kl_weight=2.0)
    student.end_token = 7
    losses, aux = model(x, y), student(x, y).aux
    assert losses.aux == aux
    torch.testing.assert_close(losses.total - 0.5 * losses.ce - 2 * losses.kl, aux, rtol=1e-9, atol=1e-12)
    student.end_token = None
    assert aux > 0 and abs(student(x, y).aux - aux) > 1e-6 * aux


def test_blocks_computed_twice_learn_the_same():
    grads = []
    for twice in (False, True):
        torch.manual_seed(0)  # of adapters that begin at random
        model, _ = pair()
        shake(model)
        model.train()
        model.student.grad_checkpoint = twice
        model(*batch()).total.backward()
        grads.append([p.grad for p in adapters.learning(model.student).values()])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-15)


def test_no_phase_thaws_a_gain():
    """A student that tapers: its adapters learn, its gains stay the teacher's."""
    pytest.importorskip("peft")
    student = tiny("rmsnorm-all-aux", phase="norm")
    adapters.put_on(student, "lora", 4, 8.0)
    step = taught_step(student, Distilled(student, tiny("rmsnorm"), {}))
    for phase in ("norm", "blend", "scale"):
        step.enter(phase)
        trained = {name for name, p in student.named_parameters() if p.requires_grad}
        assert trained and all(".lora_" in name for name in trained)
        assert trained == set(step.trained) == set(step.learns)


def taught_step(student, module, **knobs) -> Step:
    """The optimizer steps of a student that learns from a teacher, on the CPU in float64."""
    run = dict(teacher="x", max_iters=9, warmup_iters=1, gate_start=3, gate_end=6, learning_rate=1e-3)
    cfg = Config(**run, **knobs, compile=False).resolve()
    return Step(student, cfg, torch.device("cpu"), torch.float64, Ranks(), module)


def test_the_weights_go_to_the_other_ranks_once(monkeypatch):
    """The teacher's among them, though DDP is made anew in each phase. One process stands for two here."""
    sent, ranks = [], Ranks()
    monkeypatch.setattr(dist, "broadcast", lambda t, of: sent.append(t.data_ptr()))
    monkeypatch.setattr("torch.nn.parallel.distributed._sync_module_states", lambda **_: sent.append("all"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks.size, (model, _) = 2, pair(dtype=torch.float32)
        deal(model, torch.device("cpu"), ranks)
        cfg = Config(gradient_accumulation_steps=2, max_iters=10, compile=False).resolve()
        step = Step(model.student, cfg, torch.device("cpu"), torch.float32, ranks, model)
        for phase in ("blend", "scale"):
            step.enter(phase)
            assert isinstance(step.forward, DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    assert sorted(sent) == sorted(t.data_ptr() for t in (*model.parameters(), *model.buffers()))


def test_a_rank_without_values_gets_the_structure_of_the_main_one(monkeypatch):
    """Shapes, layouts, types, what takes a gradient, and which parameters student and teacher share."""
    ranks, (full, _) = Ranks(), pair(dtype=torch.float32)
    matrix = full.student.blocks[0].mlp.down.get_base_layer().weight
    matrix.data = matrix.data.t().contiguous().t()  # as GPT-2's lie
    hollow, made = copy.deepcopy(full), {}
    for part in hollow.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            empty = torch.nn.Parameter(p.detach().to("meta"), p.requires_grad)
            setattr(part, name, made.setdefault(p, empty) if p.dim() >= 2 else p)
    values = iter([t.detach().clone() for t in (*full.parameters(), *full.buffers())])
    monkeypatch.setattr(dist, "broadcast", lambda t, of: t.copy_(next(values)))
    ranks.size = 2
    deal(hollow, torch.device("cpu"), ranks)
    theirs, ours = (dict(m.named_parameters(remove_duplicate=False)) for m in (hollow, full))
    assert theirs.keys() == ours.keys() and len({*map(id, theirs.values())}) == len({*map(id, ours.values())})
    for name, p in ours.items():
        assert torch.equal(theirs[name], p), name
        assert theirs[name].stride() == p.stride() and theirs[name].requires_grad == p.requires_grad


def test_without_adapters_all_of_the_student_learns():
    """And nothing of the teacher, which stays in eval mode."""
    model = Distilled(tiny("coupled"), tiny("rmsnorm"), {"path": "x", "sha256": "0"}).train()
    assert model.student.training and not model.teacher.training
    model(*batch()).total.backward()
    assert all(p.grad is not None for p in model.student.parameters())
    assert all(p.grad is None for p in model.teacher.parameters())
    assert model.to_file({})["state"].keys() == model.student.state_dict().keys()


@pytest.mark.parametrize("form", ["to taper", "finished", "unfused", "folded"])
@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-all", "coupled", "cbwc"])
def test_a_network_of_every_form_is_a_teacher(variant, form):
    """The same function as the file's, with a shorter context; and without what a taper and the loss of its
    scale hold, which a student may not have: its checkpoint leaves the teacher's tensors out."""
    model = tiny(variant, phase="norm" if form == "to taper" else "scale")
    made = {"unfused": unfuse, "folded": fold}.get(form, lambda m: m)(model)
    file = made.to_file({"gate": model.gate.tolist(), "phase": model.phase})
    teacher, idx = untapered(file, "file", 8), tokens(2, 8)
    with torch.no_grad():
        assert scale_of_difference(teacher(idx), model(idx)) < 1e-12
    assert teacher.anchor is None and not teacher.taper_norms() and teacher.config.block_size == 8


def test_in_the_middle_of_its_taper_it_is_none():
    file = tiny("rmsnorm-all-aux", phase="blend").to_file({"gate": 0.37, "phase": "blend"})
    with refuses("file is in the middle of its taper (gates up to 0.37)"):
        untapered(file, "file", 8)


def test_what_a_checkpoint_holds_of_an_adapted_student():
    file = pair()[0].to_file({})
    assert set(file["state"]) == OWN
    assert all(".lora_" in name for name in file["adapters"]) and file["meta"]["teacher"]["sha256"] == "0"
    with refuses("tok_emb.weight differs; do this"):
        share_weights(tiny("coupled", n_layer=3, seed=1), tiny("rmsnorm", n_layer=3), "do this")


def test_a_fingerprint_is_of_names_types_and_values():
    state = state_of(tiny("rmsnorm"))
    same = dict(reversed(state.items()))
    one_bit = {**state, "norm_final.weight": state["norm_final.weight"].nextafter(torch.tensor(9.0).double())}
    renamed = {name.replace("final", "last"): t for name, t in state.items()}
    narrow = {name: t.float() for name, t in state.items()}
    assert fingerprint(same) == fingerprint(state)
    assert len({fingerprint(s) for s in (state, one_bit, renamed, narrow)}) == 4


# --- runs


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    """A network whose blocks all count, in the corpus's tokens."""
    out = tmp_path_factory.mktemp("base") / "base"
    out.mkdir()
    shape = {"vocab_size": 400, "block_size": 32, **FAMILIES["llama"]}
    network = tiny("rmsnorm", phase="norm", dtype=torch.float32, **shape)
    torch.save(network.to_file({}), out / "model.pt")
    (out / "tokenizer.model").write_bytes((corpus / "tokenizer.model").read_bytes())
    return out


@pytest.fixture(scope="module")
def student(base, corpus):
    """What scripts/couple.py makes of it, to be trained by peft's adapters."""
    pytest.importorskip("peft")
    out = base.parent / "coupled"
    how = (f"--data={corpus}", f"--out={out}", "--keep=0", "--alpha=1.5", "--tokens=1000")
    train(base, *how, program="scripts/couple.py")
    return out


def taught(out, corpus, begun, learns_from, **knobs):
    """The flags of a short distillation."""
    run = dict(max_iters=30, warmup_iters=2, eval_interval=15, batch_size=4, log_interval=5, ckpt_interval=8,
               learning_rate=3e-3, device="cpu", block_size=32, adapter="dora", adapter_rank=4)  # fmt: skip
    knobs = {**run, "dataset": corpus, "out_dir": out, "init_from": begun, "teacher": learns_from, **knobs}
    return [f"--{name}={value}" for name, value in knobs.items()]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_student_is_distilled_merged_folded_and_exported(dtype, base, student, corpus, tmp_path, capfd):
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 arithmetic")
    out = tmp_path / "run"
    train(*taught(out, corpus, student, base, dtype=dtype))
    said = capfd.readouterr().out
    assert "from teacher to student: cross-entropy" in said and "adapters merged: at most" in said
    kl = [line["val/kl"] for line in metrics(out) if "val/kl" in line]
    before = float(said.split("KL ")[1].split()[0])
    assert kl[-1] < kl[0] and kl[-1] < 0.8 * before
    last = [line for line in metrics(out) if "val/loss" in line][-1]
    assert last["grad/qkv"] > 0 and last["grad/emb"] == 0
    model = load_model(out / "folded.pt")
    assert model.meta["merge_error"] < 1e-9 and model.meta["fold_error"]["float64"] < 1e-9
    assert {p.dtype for p in model.parameters()} == {torch.float64 if dtype == "float64" else torch.float32}
    file = final(out)
    assert set(file["state"]) == {f"blocks.{i}.norm_mlp.weight" for i in (0, 1)} and "teacher" in file["meta"]
    assert given_weights(str(out))[1] == out / "folded.pt"  # what a new run starts from
    capfd.readouterr()
    train(out, "--prompt=import ", "--max_new_tokens=5", program="sample.py")
    assert capfd.readouterr().out.startswith("import ")


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(base, student, corpus, tmp_path, capsys):
    """To the bit, adapters included, from another path of the teacher; another teacher is refused."""
    cut, exports = tmp_path / "cut", ("unfused.pt", "folded.pt")
    train(*taught(tmp_path / "whole", corpus, student, base, ce_weight=0.2))
    cut_back(24, tmp_path / "whole", cut)
    for name in exports:
        (cut / name).unlink(missing_ok=True)
    resume = [f"--out_dir={cut}", "--init_from=resume"]
    assert "is not the teacher that the run" in refused(capsys, *resume, f"--teacher={student}")
    assert "holds adapters without the network" in refused(capsys, cut, program="sample.py")
    with refuses("holds adapters without the network"):
        given_weights(str(cut))
    train(*resume, f"--teacher={base / 'model.pt'}")
    whole, resumed = final(tmp_path / "whole"), final(cut)
    for part in ("state", "adapters", "optimizer"):
        assert_same(whole[part], resumed[part])
    assert metrics(tmp_path / "whole") == metrics(cut)


def assert_same_but_rounding(one, other, tolerance: float):
    """The logs of two runs, and the adapters that they ended with."""
    assert_same_log(one, other, tolerance)
    theirs = final(other)
    if "parts" in theirs:
        parts.join(theirs, other / "ckpt.pt")
    theirs = theirs["adapters"]
    for name, tensor in final(one)["adapters"].items():
        torch.testing.assert_close(theirs[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow(minutes=1.5)
@pytest.mark.parametrize(
    ("shard", "kind", "then"), [(False, "dora", 2), (True, "lora", 1), (True, "dora", 4)]
)
def test_adapters_of_ranks_are_those_of_one_process(shard, kind, then, base, student, corpus, tmp_path):
    """In float64, from train.py's start to its exports: two ranks, and those that go on from their
    checkpoint. The sums only change their order."""
    knobs = {"gradient_accumulation_steps": 4, "batch_size": 1, "dtype": "float64", "ce_weight": 0.2}
    knobs |= {"adapter": kind, "max_iters": 20, "eval_interval": 10, "log_interval": 1}
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    train(*taught(one, corpus, student, base, **knobs))
    said = ran(*taught(two, corpus, student, base, **knobs, shard=shard), ranks=2)
    assert "adapters merged: at most" in said
    cut_back(16, two, again)
    (again / "folded.pt").unlink()
    assert all(t.dim() < 2 for t in final(again)["adapters"].values()) == shard
    ran("--init_from=resume", f"--out_dir={again}", ranks=then)
    for other in (two, again):
        assert_same_but_rounding(one, other, 1e-10)
        exported = load_model(other / "folded.pt").state_dict()
        for name, tensor in load_model(one / "folded.pt").state_dict().items():
            torch.testing.assert_close(exported[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.slow
def test_a_compiled_distillation_is_the_same_run(base, student, corpus, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    knobs = {"dtype": "float64", "log_interval": 1}
    train(*taught(tmp_path / "eager", corpus, student, base, **knobs, compile=False))
    with compiling(more_than=1):
        train(*taught(tmp_path / "compiled", corpus, student, base, **knobs, compile=True))
    assert_same_but_rounding(tmp_path / "eager", tmp_path / "compiled", 1e-8)


@pytest.mark.slow
def test_a_student_of_its_own_learns_without_adapters(base, corpus, tmp_path):
    """From scratch, of another shape; resumed as any run."""
    knobs = dict(adapter="none", n_layer=1, n_embd=16, n_head=2, vocab_size=400, ckpt_interval=12)
    train(*taught(tmp_path / "run", corpus, "scratch", base, **knobs))
    assert_goes_on_from(24, tmp_path / "run", tmp_path / "again")
    kl = [line["val/kl"] for line in metrics(tmp_path / "run") if "val/kl" in line]
    assert kl[-1] < kl[0]


def test_equal_networks_begin_at_distance_0_and_the_log_takes_the_loss_apart(base, corpus, tmp_path, capfd):
    """A student that will taper has its norms when it begins. train/loss is what steps minimize, ce and KL by
    their weights and the scale loss, which is 0 until the gate starts."""
    out, weights = tmp_path / "run", {"ce_weight": 0.5, "kl_weight": 2.0}
    taper = {"taper": "internal", "aux_weight": 0.1, "gate_start": 10, "gate_end": 20}
    train(*taught(out, corpus, base, base, adapter="none", **weights, **taper))
    said = capfd.readouterr().out
    assert float(said.split("from teacher to student: ")[1].split("KL ")[1].split()[0]) < 1e-6
    for line in metrics(out):
        parts = 0.5 * line["train/ce"] + 2 * line["train/kl"] + line["train/aux"]
        assert line["train/loss"] == pytest.approx(parts, rel=1e-5), line["iter"]  # float32
        assert (line["train/aux"] > 0) == (line["iter"] > 10)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_network_without_norms_is_distilled_into_one(ranks, base, corpus, tmp_path):
    """By adapters on a fold, from that fold: what is exported at the end is one file."""
    pytest.importorskip("peft")
    folded = tmp_path / "base"
    train(*taught(folded, corpus, base, base, adapter="none", taper="all", gate_start=10, gate_end=20))
    weights, out = folded / "folded.pt", tmp_path / "run"
    argv = taught(out, corpus, weights, weights, ce_weight=1.0, gradient_accumulation_steps=2)
    ran(*argv, ranks=ranks)
    assert {path.name for path in out.glob("*.pt")} == {"ckpt.pt", "ckpt.prev.pt", "folded.pt"}
    model = load_model(out / "folded.pt")
    assert model.meta["merge_error"] < 1e-9 and model.config.form == "folded"


REFUSED = [
    ({"teacher": None}, "adapter=dora needs teacher=PATH"),
    ({"kl_weight": 0}, "nothing to learn"),
    ({"norm": "cbwc", "init_from": "scratch"}, "norm=cbwc centres the matrices"),
    ({"init_from": "scratch"}, "adapters are for a student with its teacher's weights"),
    ({"adapter_targets": "lm_head"}, "leave lm_head out of adapter_targets"),
    ({"adapter_targets": "()"}, "adapter_targets must be one or more of qkv"),
    ({"norm": "coupled", "coupled_floor": True}, "adapters would leave the floors at 0"),
    ({"teacher": "nowhere.pt"}, "no such file or folder: nowhere.pt"),
    ({"mask_end": True}, "mask_end=True is not for a student"),
    ({"taper": "all", "calibration": "mean_scale"}, "calibration=mean_scale reads qkv in parts"),
]


@pytest.mark.parametrize(("knobs", "said"), REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(knobs, said, base, student, corpus, tmp_path, capsys):
    assert said in refused(capsys, *taught(tmp_path / "run", corpus, student, base, **knobs))
    assert not (tmp_path / "run").exists()


def test_a_fingerprint_is_of_types_where_the_bytes_are_the_same():
    t = torch.randn(4)
    assert fingerprint({"a": t}) != fingerprint({"a": t.view(torch.int32)})


def test_a_wrong_merge_is_refused(monkeypatch):
    model, _ = pair()
    shake(model)
    monkeypatch.setattr("peft.tuners.lora.Linear.merge", lambda self, *_, **__: None)
    with refuses("with its adapter merged is off by"):
        adapters.merge(model.student)


@torch.no_grad()
def test_biases_stay_where_adapters_are_merged():
    pytest.importorskip("peft")
    model, idx = tiny("rmsnorm", bias=True).eval(), tokens(2, 16)
    adapters.put_on(model, "lora", 4, 8.0)
    for p in adapters.learning(model).values():
        p.normal_()
    before = model(idx)
    adapters.merge(model)
    torch.testing.assert_close(model(idx), before, rtol=1e-9, atol=1e-9)


def test_whole_logits_count_the_targets_that_pieces_count():
    y, head, taught, teacher_head, targets = random_heads(False)
    targets[0, 1:] = NOT_COUNTED
    whole = whole_distill_loss(y @ head[0].T, taught @ teacher_head[0].T, targets, 0.25, 0.75)
    torch.testing.assert_close(whole, distill_loss(y, head, taught, teacher_head, targets, 0.25, 0.75))
