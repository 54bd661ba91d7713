"""What the conversion promises: the dense model's function, and experts that can be told apart."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from splitwave.demo_model import DemoModelOptions, Variant, safetensors, smollm2
from splitwave.demo_model.gguf import Float32Array, Gguf
from splitwave.demo_model.recipe import Dtype
from tests.unit.demo_model_files import FEED_FORWARD, HEADS, HIDDEN, LAYERS, small_llama

MOE = "model.layers.1.block_sparse_moe"


@pytest.fixture
def gguf(tmp_path: Path) -> Gguf:
    return Gguf(small_llama(tmp_path / "m.gguf"))


def tensors(gguf: Gguf, variant: Variant) -> dict[str, Float32Array]:
    options = DemoModelOptions(variant=variant)
    return dict(smollm2.tensors(gguf, options, lambda _: None))


def feed_forward(
    x: Float32Array, gate: Float32Array, up: Float32Array, down: Float32Array
) -> Float32Array:
    """SwiGLU of rows, (rows, hidden) to the same."""
    activated = x @ gate.T
    out: Float32Array = (activated / (1 + np.exp(-activated)) * (x @ up.T)) @ down.T
    return out


def mixture(x: Float32Array, weights: dict[str, Float32Array], *, rolled: int = 0) -> Float32Array:
    """Mixtral's layer: softmax over the two best experts; `rolled` sends rows to the wrong ones."""
    logits = x @ weights[f"{MOE}.gate.weight"].T
    out = np.zeros_like(x)
    for row, scores in enumerate(logits):
        best = np.argsort(scores)[-2:]
        shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
        for expert, share in zip(best, shares, strict=True):
            chosen = (expert + rolled) % len(scores)
            w1, w3, w2 = (weights[f"{MOE}.experts.{chosen}.{w}.weight"] for w in ("w1", "w3", "w2"))
            out[row] += share * feed_forward(x[row : row + 1], w1, w3, w2)[0]
    return out


def dense(x: Float32Array, weights: dict[str, Float32Array]) -> Float32Array:
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    return feed_forward(x, *(weights[name] for name in names))


def rows(count: int) -> Float32Array:
    return np.random.default_rng(3).normal(size=(count, HIDDEN)).astype(np.float32)


def test_identical_experts_compute_the_dense_layer_however_tokens_are_routed(gguf: Gguf) -> None:
    x, weights = rows(50), tensors(gguf, Variant.IDENTICAL)
    want = dense(x, tensors(gguf, Variant.DENSE))

    for rolled in (0, 1):
        np.testing.assert_allclose(mixture(x, weights, rolled=rolled), want, atol=1e-5)


def test_distinct_experts_average_to_the_dense_layer(gguf: Gguf) -> None:
    weights, plain = tensors(gguf, Variant.DISTINCT), tensors(gguf, Variant.DENSE)
    downs = [weights[f"{MOE}.experts.{expert}.w2.weight"] for expert in range(4)]

    want = plain["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(np.mean(downs, axis=0), want, atol=1e-6)


def test_distinct_experts_show_a_misrouted_token(gguf: Gguf) -> None:
    x, weights = rows(50), tensors(gguf, Variant.DISTINCT)

    right, wrong = mixture(x, weights), mixture(x, weights, rolled=1)

    relative = np.linalg.norm(right - wrong, axis=1) / np.linalg.norm(right, axis=1)
    assert relative.min() > 0.01


def test_every_expert_gets_tokens_even_if_one_channel_outweighs_all_others() -> None:
    norm = np.ones(HIDDEN, np.float32)
    norm[0] = 30.0
    normalized = rows(400)
    normalized[:, 0] = 1.0  # As in real models, the heavy channel hardly changes.
    scores = (normalized * norm) @ smollm2.router(0, DemoModelOptions(), norm).T

    chosen = np.bincount(np.argsort(scores)[:, -2:].ravel(), minlength=4) / (2 * len(scores))

    assert chosen.min() > 0.1


def test_unpermuted_rows_give_the_same_scores_under_the_other_rotation() -> None:
    """The definition: GGUF rotates neighbouring pairs of a head, transformers its two halves."""
    head_dim = HIDDEN // HEADS
    rng = np.random.default_rng(1)
    query, key = (rng.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) for _ in range(2))
    x, y = rng.normal(size=(2, HIDDEN))
    angles = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)

    def paired(vector: Float32Array, position: int) -> Float32Array:
        pairs = vector.reshape(HEADS, head_dim // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * angles)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(HEADS, head_dim)

    def halved(vector: Float32Array, position: int) -> Float32Array:
        first, second = np.split(vector.reshape(HEADS, head_dim), 2, axis=1)
        turned = (first + 1j * second) * np.exp(1j * position * angles)
        return np.concatenate([turned.real, turned.imag], axis=1)

    want = (paired(query @ x, 5) * paired(key @ y, 2)).sum(axis=1)
    ours_query, ours_key = (smollm2.unpermute(weights, HEADS) for weights in (query, key))
    got = (halved(ours_query @ x, 5) * halved(ours_key @ y, 2)).sum(axis=1)
    untouched = (halved(query @ x, 5) * halved(key @ y, 2)).sum(axis=1)

    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert not np.allclose(untouched, want, rtol=1e-2)


@pytest.mark.parametrize("variant", [Variant.IDENTICAL, Variant.DISTINCT, Variant.DENSE])
def test_the_room_asked_for_is_the_room_taken(gguf: Gguf, variant: Variant) -> None:
    options = DemoModelOptions(variant=variant)

    built = sum(weights.size for weights in tensors(gguf, variant).values())

    assert smollm2.weight_count(gguf, options) == built


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = [0x3F808000, 0x3F808001, 0x3F818000, 0x3F807FFF, 0xBF818000]
    weights = np.array(bits, "<u4").view("<f4")

    octets = safetensors.encoded(weights, Dtype.BFLOAT16)

    assert octets.tolist() == [0x3F80, 0x3F81, 0x3F82, 0x3F80, 0xBF82]


@pytest.mark.timeout(120)  # Importing transformers takes long on a busy machine.
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="NOT RUN: needs torch and transformers",
)
def test_transformers_computes_the_same_logits_from_the_dense_and_the_identical_model(
    gguf: Gguf, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    logits = {}
    token_ids = torch.tensor([[1, 3, 5, 4, 7, 6, 3, 2]])
    for variant in (Variant.DENSE, Variant.IDENTICAL, Variant.DISTINCT):
        directory = tmp_path / variant
        directory.mkdir()
        smollm2.write(directory, gguf, DemoModelOptions(variant=variant), lambda _: None)
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert model.num_parameters() == smollm2.weight_count(
            gguf, DemoModelOptions(variant=variant)
        )
        with torch.no_grad():
            logits[variant] = model(token_ids).logits

    identical, distinct = logits[Variant.IDENTICAL], logits[Variant.DISTINCT]
    assert torch.allclose(identical, logits[Variant.DENSE], atol=1e-4)
    assert not torch.allclose(distinct, logits[Variant.DENSE], atol=1e-3)


def test_the_shapes_are_those_of_the_config(gguf: Gguf) -> None:
    weights = tensors(gguf, Variant.IDENTICAL)
    config = smollm2.config(gguf, DemoModelOptions())

    assert config["num_hidden_layers"] == LAYERS
    assert weights[f"{MOE}.gate.weight"].shape == (config["num_local_experts"], HIDDEN)
    assert weights[f"{MOE}.experts.3.w1.weight"].shape == (FEED_FORWARD, HIDDEN)
    assert weights[f"{MOE}.experts.3.w2.weight"].shape == (HIDDEN, FEED_FORWARD)
