"""The GPT against arithmetic, and what its options do."""

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.model import GPT, from_config, head, padded_vocab
from megatron.model.size import parameters

SHAPE = [
    "num_layers=3",
    "hidden_size=48",
    "num_attention_heads=4",
    "seq_length=64",
    "pos_emb=rotary",
]


def small(*settings: str, vocab: int = 101) -> GPT:
    return from_config(load([], [*SHAPE, *settings]), vocab)


def test_the_125m_shape_has_the_papers_162_million_parameters():
    assert parameters(load(["configs/125M.yml"]), padded_vocab(50257, 128)).whole == 162_322_944


def test_losses_are_the_cross_entropy_of_each_token_in_blocks_or_whole(monkeypatch):
    ours, ids = small().eval(), torch.randint(101, (3, 51))
    logits = ours(ids[:, :-1]).detach().double()
    expected = -logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        ours(ids[:, :-1], labels=ids[:, 1:]).double(), expected, rtol=0, atol=2e-6
    )
    monkeypatch.setattr(head, "HEAD_TOKENS", 7)
    with torch.no_grad():
        blocks = ours(ids[:, :-1], labels=ids[:, 1:])
    assert blocks.shape == (3, 50)
    torch.testing.assert_close(blocks.double(), expected, rtol=0, atol=2e-6)


WITHOUT_FIRST_QUERIES = [
    ("pos_emb=rotary", "num_key_value_heads=2", "layers=gated_attention"),
    ("pos_emb=kerple_log", "window=20", "softmax_type=learnable"),
    ("pos_emb=fire", "gpt_j_residual=true"),
    ("pos_emb=fox", "norm_placement=post", "norm=rmsnorm"),
    ("pos_emb=ssmax", "logn_scale=true"),
    ("pos_emb=cope",),
    ("pos_emb=path_fox",),
    ("pos_emb=cable", "reset_attention_mask=true"),
    ("layers=[attention, attention, gated_delta]",),
]
ALL_QUERIES = WITHOUT_FIRST_QUERIES[-1:]  # a state reads earlier tokens


@pytest.mark.parametrize("settings", WITHOUT_FIRST_QUERIES, ids=" ".join)
def test_where_late_targets_alone_count_their_losses_are_those_of_the_whole_text(settings):
    ours, ids = small(*settings).eval(), torch.randint(101, (2, 81))
    ours.end_of_document = 7
    counted = torch.zeros(2, 80, dtype=torch.bool)
    counted[0, 60:], counted[1, 71:75] = True, True
    lengths = []
    ours.layers[-1].mlp.register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[1]))
    with torch.no_grad():
        whole = ours(ids[:, :-1], ids[:, 1:])
        late = ours(ids[:, :-1], ids[:, 1:], counted=counted)
    torch.testing.assert_close(late, whole * counted, rtol=0, atol=4e-6)
    assert lengths == [80, 80 if settings in ALL_QUERIES else 20]


LONGROPE = "{longrope: {factor: 4, long_factor: 4, original_length: 200}}"
ALL_SCORES = [
    ("pos_emb=stick_breaking", "window=200"),
    ("pos_emb=cope", "reset_attention_mask=true"),
    ("pos_emb=cope", "pos_emb_args={separate_keys: true}"),
    ("pos_emb=grape_ap", "num_key_value_heads=2"),
    ("pos_emb=dape", "logn_scale=true"),
    ("pos_emb=dape_v2", "window_layers=[20, null]"),
    ("pos_emb=sum", f"pos_emb_args={{parts: [cope, {LONGROPE}]}}"),
]


@pytest.mark.parametrize("settings", ALL_SCORES, ids=" ".join)
def test_an_encoding_that_works_on_all_scores_reads_a_text_in_pieces(settings):
    ours, ids = small(*settings).double().eval(), torch.randint(101, (2, 300))
    ours.end_of_document = 7
    for parameter in ours.parameters():  # so that gates and tables do something
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    lengths = []
    ours.layers[0].register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[1]))
    whole = ours.features(ids)
    with torch.no_grad():
        in_pieces = ours.features(ids, first=50)
    assert lengths == [300, 128, 128, 44]
    torch.testing.assert_close(in_pieces, whole[:, 50:], rtol=0, atol=1e-10)


def test_a_text_is_read_whole_where_pieces_would_change_it():
    """Layers with a state prepare their own encoding; in training, abacus draws for a text."""
    longrope = f"layer_args={{linear_pos_emb: {LONGROPE}}}"
    hybrid = small("pos_emb=cope", "layers=[gated_delta, attention]", longrope).double().eval()
    digits = "pos_emb_args={parts: [cope, {abacus: {digits: [3, 4, 5]}}]}"
    drawing = small("pos_emb=sum", digits).double().train()
    ids = torch.randint(101, (2, 300))
    for model in (hybrid, drawing):
        torch.manual_seed(1)
        whole = model.features(ids)
        torch.manual_seed(1)
        with torch.no_grad():
            torch.testing.assert_close(model.features(ids), whole, rtol=0, atol=1e-10)


def test_a_text_that_is_too_long_is_refused_by_its_own_length():
    model = small("pos_emb=sum", "pos_emb_args={parts: [learned, cope]}").eval()
    with torch.no_grad(), pytest.raises(UserError, match="300"):
        model.features(torch.randint(101, (1, 300)))


def test_dropout_acts_in_training_only_and_on_every_residual():
    ours, ids = small("hidden_dropout=0.5"), torch.randint(101, (2, 30))
    with torch.no_grad():
        assert not torch.equal(ours.train()(ids), ours(ids))
        torch.testing.assert_close(ours.eval()(ids), ours(ids), rtol=0, atol=0)
        torch.testing.assert_close(ours(ids), small().eval()(ids), rtol=0, atol=0)


def test_the_seed_decides_the_weights_and_leaves_other_randomness_alone():
    state = torch.get_rng_state()
    first, again, other = small("seed=1"), small("seed=1"), small("seed=2")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.word_embeddings.weight, again.word_embeddings.weight)
    assert not torch.equal(first.word_embeddings.weight, other.word_embeddings.weight)


@pytest.mark.parametrize("again", [False, True])
def test_tables_are_computed_once_per_step_also_where_activations_are_computed_again(
    again, monkeypatch
):
    ours, lengths = small("pos_emb=mep_param"), []
    ours.checkpoint_activations = again
    kernel = type(ours.position).distance_bias
    monkeypatch.setattr(
        type(ours.position),
        "distance_bias",
        lambda self, keys: [lengths.append(keys), kernel(self, keys)][1],
    )
    ids = torch.randint(101, (2, 65))
    ours(ids[:, :-1], labels=ids[:, 1:], mean=True).backward()
    assert lengths == [64]
