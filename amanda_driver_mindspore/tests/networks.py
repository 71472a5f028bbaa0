"""Networks and expressions of MindSpore that several test modules run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

__all__ = ["EXPRESSIONS", "NETWORKS", "flat", "numbers", "step"]


def numbers(*shape: int) -> Tensor:
    """Return a tensor of the same numbers at each call."""
    values = np.random.default_rng(0).standard_normal(shape)
    return Tensor(values.astype(np.float32))


class Block(nn.Cell):  # type: ignore[misc]
    """A convolution with a normalization and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, has_bias=True)
        self.norm = nn.BatchNorm2d(channels)

    def construct(self, x: Any) -> Any:
        return ops.relu(self.norm(self.conv(x)) + x)


class Convolutions(nn.Cell):  # type: ignore[misc]
    """A convolutional network with a parameter outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.SequentialCell(Block(8), Block(8))
        self.pool = nn.MaxPool2d(2, 2)
        self.first = nn.Dense(8 * 16, 16)
        self.scale = Parameter(numbers(16, 16), name="scale")
        self.last = nn.Dense(16, 4)

    def construct(self, x: Any) -> Any:
        x = self.pool(self.blocks(ops.relu(self.stem(x))))
        x = ops.relu(self.first(x.flatten(start_dim=1)))
        return self.last(x @ self.scale + x * 0.5)


class Recurrence(nn.Cell):  # type: ignore[misc]
    """A network with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def construct(self, x: Any) -> Any:
        return self.lstm(x)[0]


class Attention(nn.Cell):  # type: ignore[misc]
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def construct(self, x: Any) -> Any:
        return self.attention(x, x, x)[0]


def encoder() -> nn.Cell:
    """Return an encoder layer without dropout."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


#: Name -> a function that makes the network, and its input.
NETWORKS: dict[str, tuple[Callable[[], nn.Cell], Tensor]] = {
    "convolutions": (Convolutions, numbers(4, 3, 8, 8)),
    "recurrence": (Recurrence, numbers(2, 5, 8)),
    "attention": (Attention, numbers(2, 5, 8)),
    "encoder": (encoder, numbers(2, 5, 8)),
}


def step(network: nn.Cell, x: Tensor) -> list[np.ndarray[Any, Any]]:
    """Return the loss of a network, and the gradients of its input and its parameters."""
    weights = network.trainable_params()
    loss, (of_x, of_weights) = ms.value_and_grad(
        lambda x: (network(x) ** 2).mean(), 0, weights=weights
    )(x)
    return [one.asnumpy() for one in (loss, of_x, *of_weights)]


def flat(result: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    if isinstance(result, (tuple, list)):
        return [tensor for one in result for tensor in flat(one)]
    return [result] if isinstance(result, Tensor) else []


_A, _B, _I = numbers(4, 4), numbers(4, 4) + 2, Tensor([0, 1, 2, 3], ms.int32)
_SEQUENCE, _IMAGE = numbers(2, 5, 8), numbers(2, 3, 8, 8)


def _set_items() -> Any:
    x = _A.copy()
    x[0] = 1.0
    x[1:3] = _B[1:3]
    return x


def _in_place() -> Any:
    x = _A.copy()
    x += _B
    x.mul_(2)
    return x.add_(_B)


#: Each is a function without arguments. What has no kernel on a device is left out there.
EXPRESSIONS: dict[str, Callable[[], Any]] = {
    "indices": lambda: (_A[0], _A[1:3], _A[:, 1], _A[_I], _A[_A > 0], _A[None], _A[..., 0]),
    "set items": _set_items,
    "in place": _in_place,
    "unary": lambda: (-_A, abs(_A), ~(_A > 0), _A.T, _A.exp(), _A**2, 2**_A, _A // _B, _A % _B),
    "comparisons": lambda: (_A > _B, _A == _B, _A <= 1, (_A > 0) & (_B > 0)),
    "reflected": lambda: (1 - _A, 1 / _A, 2 * _A, 1 + _A),
    "products": lambda: (_A @ _B, ops.mm(_A, _B), mint.matmul(_A, _B), ops.bmm(_A[None], _B[None])),
    "einsum": lambda: mint.einsum("ij,jk->ik", _A, _B),
    "reductions": lambda: (
        _A.mean(),
        _A.sum(0),
        _A.max(),
        _A.argmax(1),
        mint.mean(_A),
        mint.sum(_A),
    ),
    "norms": lambda: (_A.std(), ops.norm(_A), ops.cumsum(_A, 0)),
    "shapes": lambda: (_A.reshape(2, 8), _A.view(16), _A.transpose(1, 0), _A.permute(1, 0)),
    "splits": lambda: (ops.split(_A, 2), mint.chunk(_A, 2), _A.unsqueeze(0), _A.expand_as(_A)),
    "joins": lambda: (ops.stack([_A, _B]), mint.cat([_A, _B]), ops.concat((_A, _B))),
    "variance": lambda: mint.var(_A),
    "stacks": lambda: mint.stack([_A, _B]),
    "types": lambda: (_A.astype(ms.float16), _A.to(ms.float64), _A.int(), ops.tile(_A, (2, 1))),
    "lstm": lambda: nn.LSTM(8, 6, batch_first=True)(_SEQUENCE)[0],
    "gru": lambda: nn.GRU(8, 6, batch_first=True)(_SEQUENCE)[0],
    "rnn": lambda: nn.RNN(8, 6, batch_first=True)(_SEQUENCE)[0],
    "layer norm": lambda: (nn.LayerNorm((8,))(_SEQUENCE), nn.GroupNorm(3, 3)(_IMAGE)),
    "embedding": lambda: nn.Embedding(10, 8)(_I),
    "convolutions": lambda: (
        nn.Conv2d(3, 4, 3)(_IMAGE),
        nn.Conv1d(8, 4, 3)(_SEQUENCE.permute(0, 2, 1)),
    ),
    "transposed": lambda: nn.Conv2dTranspose(3, 4, 3)(_IMAGE),
    "pools": lambda: (ops.avg_pool2d(_IMAGE, 2), ops.max_pool2d(_IMAGE, 2)),
    "adaptive pool": lambda: ops.adaptive_avg_pool2d(_IMAGE, 1),
    "resizing": lambda: ops.interpolate(_IMAGE, size=(4, 4), mode="bilinear"),
    "padding": lambda: ops.pad(_IMAGE, (1, 1)),
    "losses": lambda: (ops.cross_entropy(_A, _I), ops.mse_loss(_A, _B), nn.SmoothL1Loss()(_A, _B)),
    "random": lambda: (ops.randn(2, 2), ops.dropout(_A, 0.5), ops.bernoulli(_A.sigmoid())),
    "activations": lambda: (ops.gelu(_A), ops.silu(_A), ops.softmax(_A), ops.log_softmax(_A)),
    "further activations": lambda: (
        ops.sigmoid(_A),
        nn.LeakyReLU()(_A),
        ops.relu6(_A),
        nn.PReLU()(_A),
    ),
    "new tensors": lambda: (ops.zeros((2, 2)), ops.ones_like(_A), mint.zeros(2), ops.arange(4)),
    "choices": lambda: (
        ops.where(_A > 0, _A, _B),
        mint.where(_A > 0, _A, _B),
        _A.masked_fill(_A > 0, 0.0),
    ),
    "gathers": lambda: (
        ops.gather(_A, _I, 0),
        mint.gather(_A, 1, _I.reshape(4, 1).astype(ms.int64)),
    ),
    "sorting": lambda: (ops.sort(_A), ops.topk(_A, 2), ops.argmax(_A), ops.one_hot(_I, 4)),
    "limits": lambda: (ops.clip(_A, 0, 1), mint.clamp(_A, 0, 1), _A.clamp(0, 1)),
    "functions": lambda: (
        ops.erf(_A),
        ops.square(_A),
        ops.rsqrt(_A * _A + 1),
        mint.add(_A, _B, alpha=2),
    ),
    "numpy": lambda: (ms.numpy.add(_A, _B), ms.numpy.sum(_A), ms.numpy.dot(_A, _B)),
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True)(
        _SEQUENCE, _SEQUENCE, _SEQUENCE
    )[0],
    "meshgrid": lambda: ops.meshgrid(_I, _I),
    "dropout cell": lambda: nn.Dropout(p=0.5).set_train()(_A),
}
