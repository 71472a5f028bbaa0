"""ResNet-50 of He et al. 2015 (table 1) in TensorFlow 1 operations: 53 convolutions.

Keras 3 builds no graphs for sessions, so the network is written out here. Batch norm uses the
batch's own statistics; the stride of a stage is in its first 1 x 1 convolution, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["BLOCKS", "CONVOLUTIONS", "resnet50"]

v1 = tf.compat.v1

#: Bottleneck blocks of each stage.
BLOCKS = (3, 4, 6, 3)
#: The stem's, three in each block, and a projection in the first block of each stage.
CONVOLUTIONS = 1 + 3 * sum(BLOCKS) + len(BLOCKS)


class _Builder:
    def __init__(self, resource: bool) -> None:
        self.resource = resource

    def variable(self, name: str, shape: Sequence[int], initializer: Any) -> Any:
        return v1.get_variable(
            name, shape, initializer=initializer, use_resource=self.resource, dtype=tf.float32
        )

    def convolution(self, name: str, x: Any, channels: int, size: int, stride: int) -> Any:
        """Add a convolution without a bias and a batch norm."""
        with v1.variable_scope(name):
            shape = [size, size, x.shape[-1], channels]
            kernel = self.variable("kernel", shape, v1.initializers.he_normal(seed=len(name)))
            x = tf.nn.conv2d(x, kernel, stride, "SAME")
            scale = self.variable("scale", [channels], v1.initializers.ones())
            offset = self.variable("offset", [channels], v1.initializers.zeros())
            y, _, _ = v1.nn.fused_batch_norm(x, scale, offset)
            return y

    def block(self, name: str, x: Any, channels: int, stride: int, project: bool) -> Any:
        """Add a bottleneck of 1 x 1, 3 x 3 and 1 x 1 with a shortcut."""
        with v1.variable_scope(name):
            around = x
            if project:
                around = self.convolution("projection", x, 4 * channels, 1, stride)
            y = tf.nn.relu(self.convolution("reduce", x, channels, 1, stride))
            y = tf.nn.relu(self.convolution("middle", y, channels, 3, 1))
            return tf.nn.relu(self.convolution("expand", y, 4 * channels, 1, 1) + around)


def resnet50(images: Any, classes: int = 10, width: int = 64, resource: bool = True) -> Any:
    """Return the logits of images.

    Args:
        images: Shape (n, height, width, 3); both at least 32.
        classes: Number of logits.
        width: Channels of the first stage; 64 in the paper.
        resource: Whether the variables are resource variables.
    """
    build = _Builder(resource)
    x = tf.nn.relu(build.convolution("stem", images, width, 7, 2))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for stage, blocks in enumerate(BLOCKS):
        for block in range(blocks):
            first = block == 0
            stride = 2 if first and stage > 0 else 1
            x = build.block(f"stage{stage}_block{block}", x, width << stage, stride, first)
    x = tf.reduce_mean(x, [1, 2])
    kernel = build.variable("classes/kernel", [x.shape[-1], classes], v1.initializers.he_normal(1))
    bias = build.variable("classes/bias", [classes], v1.initializers.zeros())
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)
