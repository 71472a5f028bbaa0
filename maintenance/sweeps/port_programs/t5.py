"""The encoder of T5 in transformers, and an ONNX graph of small operators, written by hand."""

from __future__ import annotations

import numpy
import torch
from transformers import T5Config, T5EncoderModel

from .graphs import Graph
from .planted import At, Plant, Run, main

WIDTH, HEADS, HEAD, HIDDEN, WORDS, DEPTH, LENGTH = 24, 3, 8, 40, 30, 2, 9
_BLOCK = "encoder.block.{}.layer.{}"
_FIRST = _BLOCK.format(0, 0) + ".SelfAttention"
_SECOND = _BLOCK.format(1, 0) + ".SelfAttention"
_FORWARD = _BLOCK.format(0, 1) + ".DenseReluDense"
PLANTS = (
    Plant("epsilon", _BLOCK.format(0, 1) + ".layer_norm"),
    Plant("epsilon", "encoder.final_layer_norm"),
    Plant("tanh gelu", _FORWARD + ".act"),
    Plant("transposed kernel", _SECOND + ".q"),
    Plant("scale", _SECOND),
    Plant("bias", _FIRST, (_FIRST + ".relative_attention_bias",)),
    Plant("order", _BLOCK.format(1, 0) + ".layer_norm", (_SECOND + ".q", _SECOND + ".k")),
    Plant("dtype", _BLOCK.format(1, 1) + ".DenseReluDense.wo"),
    Plant("mask", _FIRST),
    Plant("mask", _SECOND),
)
_TOKENS = numpy.random.default_rng(0).integers(0, WORDS, (2, LENGTH))
_PRESENT = numpy.arange(LENGTH) < numpy.array([[LENGTH], [LENGTH - 3]])


def _original() -> T5EncoderModel:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=HEAD,
        d_ff=HIDDEN,
        num_layers=DEPTH,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu",
        dense_act_fn="gelu",
        initializer_factor=1.0,
        attn_implementation="eager",
    )
    model = T5EncoderModel(config).eval()
    for number in range(DEPTH):
        model.encoder.block[number].layer[1].DenseReluDense.act = torch.nn.GELU()
    for one in model.parameters():
        torch.nn.init.normal_(one, 1.0 if one.dim() == 1 else 0.0, 0.2)
    return model


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_TOKENS), attention_mask=torch.tensor(_PRESENT).long())

    return run


def _buckets(length: int, both_ways: bool) -> numpy.ndarray:
    """Return the bucket of each distance, as the paper of T5 has it."""
    distance = numpy.arange(length)[None] - numpy.arange(length)[:, None]
    buckets = 8
    found = numpy.zeros_like(distance)
    if both_ways:
        buckets //= 2
        found += (distance > 0) * buckets
        distance = abs(distance)
    else:
        distance = -numpy.minimum(distance, 0)
    exact = buckets // 2
    with numpy.errstate(divide="ignore"):
        far = numpy.log(distance / exact) / numpy.log(16 / exact) * (buckets - exact)
    far = numpy.minimum(exact + numpy.where(distance > 0, far, 0).astype(int), buckets - 1)
    return found + numpy.where(distance < exact, distance, far)


def port(at: At) -> Run:
    weights = {name: value.numpy() for name, value in _original().state_dict().items()}
    g = Graph()

    def linear(x: str, name: str) -> str:
        kernel = weights[f"{name}.weight"].T
        if at("transposed kernel", name):
            kernel = kernel.T
        if at("dtype", name):
            return g("Cast", g("MatMul", g("Cast", x, to=10), kernel.astype("f2")), to=1)
        return g("MatMul", x, kernel)

    def norm(x: str, name: str) -> str:
        epsilon = 1e-2 if at("epsilon", name) else 1e-6
        square = g("ReduceMean", g("Mul", x, x), [-1], keepdims=1)
        root = g("Sqrt", g("Add", square, [epsilon]))
        return g("Mul", g("Div", x, root), weights[f"{name}.weight"])

    def heads(x: str, last: bool = False) -> str:
        x = g("Reshape", x, [0, 0, HEADS, HEAD])
        return g("Transpose", x, perm=[0, 2, 3, 1] if last else [0, 2, 1, 3])

    table = weights[f"{_FIRST}.relative_attention_bias.weight"]

    def attention(x: str, name: str) -> str:
        q, k = heads(linear(x, f"{name}.q")), heads(linear(x, f"{name}.k"), True)
        scores = g("MatMul", q, k)
        if at("scale", name):
            scores = g("Mul", scores, [HEAD**-0.5])
        bias = table[_buckets(LENGTH, not at("bias", name))].transpose(2, 0, 1)[None]
        if not at("mask", name):
            bias = bias + numpy.where(_PRESENT, 0, -3e38)[:, None, None]
        scores = g("Softmax", g("Add", scores, bias), axis=-1)
        mixed = g("MatMul", scores, heads(linear(x, f"{name}.v")))
        mixed = g("Reshape", g("Transpose", mixed, perm=[0, 2, 1, 3]), [0, 0, HEADS * HEAD])
        return linear(mixed, f"{name}.o")

    def gelu(x: str, tanh: bool) -> str:
        half = g("Mul", x, [0.5])
        if tanh:
            cube = g("Mul", g("Mul", g("Mul", x, x), x), [0.044715])
            share = g("Tanh", g("Mul", g("Add", x, cube), [numpy.sqrt(2 / numpy.pi)]))
        else:
            share = g("Erf", g("Mul", x, [2**-0.5]))
        return g("Mul", half, g("Add", share, [1.0]))

    def forward(x: str, name: str) -> str:
        gate = gelu(linear(x, f"{name}.wi_0"), at("tanh gelu", f"{name}.act"))
        return linear(g("Mul", gate, linear(x, f"{name}.wi_1")), f"{name}.wo")

    x = g("Gather", weights["shared.weight"], "ids")
    for number in range(DEPTH):
        first, second = (_BLOCK.format(number, part) for part in range(2))
        if at("order", f"{first}.layer_norm"):
            x = g("Add", x, norm(attention(x, f"{first}.SelfAttention"), f"{first}.layer_norm"))
        else:
            x = g("Add", x, attention(norm(x, f"{first}.layer_norm"), f"{first}.SelfAttention"))
        x = g("Add", x, forward(norm(x, f"{second}.layer_norm"), f"{second}.DenseReluDense"))
    session = g.session(norm(x, "encoder.final_layer_norm"), ids=_TOKENS.shape)
    return lambda: session.run(None, {"ids": _TOKENS})


if __name__ == "__main__":
    main(PLANTS, ours, port)
