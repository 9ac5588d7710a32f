"""What is recorded at the experts, and what the layer makes of their answers, against the layer as it is."""

import dataclasses
import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate_cases import SOURCES, some_windows

from moet.calibrate.codebooks import codebook_of
from moet.calibrate.encode import encode_matrix
from moet.calibrate.layer import LayerWork
from moet.calibrate.routing import Routing, adds, answered, record
from moet.calibrate.values import activated
from moet.checkpoint import Checkpoint, dequantize_expert
from moet.forward import Decoder
from moet.models import Activation


@pytest.fixture(scope="module", params=SOURCES)
def opened(request, tmp_path_factory):
    """A checkpoint's decoder, the index of its second MoE layer, and the states before that."""
    root = tmp_path_factory.mktemp("routing")
    SOURCES[request.param](root)
    decoder = Decoder.open(Checkpoint.open(root))
    index = [layer.index for layer in decoder.checkpoint.spec.layers if not layer.mtp][1]
    states = decoder.embed(some_windows().ids)
    for i in range(index):
        with decoder.layer(i) as module:
            states = decoder.run(module, states, i)
    return decoder, index, states


def work_of(decoder, index, states) -> LayerWork:
    layer = decoder.checkpoint.spec.layer(index)
    with decoder.layer(index, experts=False) as module:
        routing, _ = record(decoder, module, states, index, layer.experts)
    return LayerWork(decoder.checkpoint, layer, decoder.checkpoint.spec.activation, routing, routing)


def test_native_answers_give_the_layers_own_output(opened, pool):
    """The experts' inputs, weights and activation are right, or the output would be another one."""
    decoder, index, states = opened
    with decoder.layer(index) as module:
        wanted = decoder.run(module, states, index)
    work = work_of(decoder, index, states)
    work.replay(3, pool, lambda experts, native: native)
    with decoder.layer(index, experts=False) as module:
        found = answered(decoder, module, states, index, work.quantized_answer)
    assert torch.equal(work.full_answer, work.quantized_answer)
    assert (found.hidden - wanted.hidden).abs().max() < 1e-5 * wanted.hidden.abs().max()
    assert sum(work.counts()) == states.ids.numel() * decoder.checkpoint.spec.top_k
    assert set(work.output_errors) == {0.0}


def test_the_rest_of_the_layer(opened, pool):
    """Where a layer adds its experts' answer to what it has otherwise, the sum is its output; V4's is not such a layer."""
    decoder, index, states = opened
    layer = decoder.checkpoint.spec.layer(index)
    with decoder.layer(index) as module:
        wanted = decoder.run(module, states, index)
        adding = adds(decoder, module, states, index)
        routing, rest = record(decoder, module, states, index, layer.experts)
    assert adding == (states.hidden.dim() == 3)
    work = LayerWork(decoder.checkpoint, layer, decoder.checkpoint.spec.activation, routing, routing)
    work.replay(3, pool, lambda experts, native: native)
    if adding:
        total = rest.hidden + work.full_answer.view(rest.hidden.shape)
        assert (total - wanted.hidden).abs().max() < 1e-5 * wanted.hidden.abs().max()


def test_output_errors_are_those_of_the_answers(opened, pool):
    """Against numpy in float64, for the 2-bit experts that were encoded."""
    decoder, index, states = opened
    work = work_of(decoder, index, states)
    torch.set_grad_enabled(False)
    solved = list(work.run(functools.partial(encode_matrix, codebook_of("sym2")), 3, pool))
    torch.set_grad_enabled(True)
    routing, a = work.quantized, work.activation
    for s in solved:
        for g, e in enumerate(s.experts):
            (tokens, weights), *rest = list(routing.pairs(e, 10**6)) or [(None, None)]
            if tokens is None:
                assert work.output_errors[e] == 0.0
                continue
            assert not rest
            x = routing.inputs[tokens].double()
            expert = decoder.checkpoint.expert(index, e)
            gate, up, down = (torch.from_numpy(m) for m in dequantize_expert(expert))
            biases = [
                0 if m.bias is None else torch.from_numpy(m.bias)
                for m in (expert.gate, expert.up, expert.down)
            ]

            def answer(first, second, biases=biases, x=x):
                return (
                    activated(
                        x @ first.T
                        + torch.cat([torch.as_tensor(b).expand(len(first) // 2) for b in biases[:2]]),
                        a,
                    )
                    @ second.T
                    + biases[2]
                )

            want = weights[:, None] * answer(torch.cat([gate, up]), down)
            got = weights[:, None] * answer(s.first.values[g].double(), s.second.values[g].double())
            error = ((got - want).norm() / want.norm()).item()
            assert work.output_errors[e] == pytest.approx(error, rel=1e-4)
            assert error > 0.01


def test_pairs_are_in_order_of_expert_and_token():
    index = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    weights = torch.arange(8.0).reshape(4, 2)
    routing = Routing.of(torch.zeros(4, 3), index, weights, 4)
    assert [routing.count(e) for e in range(4)] == [3, 2, 3, 0]
    assert [[x.tolist() for x in pair] for pair in routing.pairs(2, 2)] == [
        [[0, 2], [0.0, 4.0]],
        [[3], [7.0]],
    ]
    assert list(routing.pairs(3, 2)) == []
    assert torch.equal(routing.weight_sums(), weights.sum(1))


def test_two_networks_that_route_differently(opened, pool):
    """Each has the answers to its own tokens; errors are told against the full network's, on the quantized one's tokens."""
    decoder, index, states = opened
    other = dataclasses.replace(states, hidden=states.hidden + 0.2 * torch.randn(states.hidden.shape))
    layer = decoder.checkpoint.spec.layer(index)
    with decoder.layer(index, experts=False) as module:
        full, second = (record(decoder, module, s, index, layer.experts)[0] for s in (states, other))
    together = LayerWork(decoder.checkpoint, layer, decoder.checkpoint.spec.activation, full, second)
    together.replay(3, pool, lambda experts, native: native)
    for routing, answer in ((full, together.full_answer), (second, together.quantized_answer)):
        alone = LayerWork(decoder.checkpoint, layer, decoder.checkpoint.spec.activation, routing, routing)
        alone.replay(3, pool, lambda experts, native: native)
        assert (alone.full_answer - answer).abs().max() < 1e-5 * answer.abs().max()
    counts = [any(routing.count(e) for routing in (full, second)) for e in range(layer.experts)]
    assert any(error > 0.01 for error in together.output_errors) and sum(counts)


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation(limit=1.0), Activation("swiglu_oai", 1.5, 1.702)],
    ids=lambda a: f"{a.kind}-{a.limit}",
)
def test_activation(activation):
    both = torch.randn(50, 64) * 2
    gate, up = both.double().numpy()[:, :32], both.double().numpy()[:, 32:]
    if activation.limit is not None:
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    plus, slope = (1, activation.alpha) if activation.kind == "swiglu_oai" else (0, 1)
    wanted = (up + plus) * gate / (1 + np.exp(-slope * gate))
    assert np.allclose(activated(both, activation).numpy(), wanted, atol=1e-5)
