"""Programs with libraries that build on TensorFlow and Keras 3, and what all programs of TensorFlow
share.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-subclassing-any
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined,unused-ignore"
# These libraries are not annotated, and few of them are installed for the checks.

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from maintenance.sweeps.foreign import Note

from .catalog import program


def library(
    name: str, *needs: str, **settings: str
) -> Callable[[Callable[[Note], None]], Callable[[Note], None]]:
    """Register a program that starts at one seed.

    TensorFlow's optimizers of graphs are off: they fuse ops, which rounds differently, except where
    a routine stands between these.
    """

    def enter(run: Callable[[Note], None]) -> Callable[[Note], None]:
        def seeded(note: Note) -> None:
            import tensorflow as tf

            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
            tf.keras.backend.clear_session()
            tf.keras.utils.set_random_seed(11)
            run(note)

        environment = {"TF_ENABLE_ONEDNN_OPTS": "0", **settings}
        program(name, needs=(*needs, "tensorflow"), framework="tensorflow", settings=environment)(
            seeded
        )
        return run

    return enter


def arrays(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return copies of TensorFlow's tensors, variables or arrays, as what the notes compare."""
    return [torch.from_numpy(numpy.array(value)) for value in values]


def drawn(*shape: int) -> Any:
    """Return normal random numbers."""
    return numpy.random.normal(size=shape).astype("float32")


def classes(number: int, count: int) -> Any:
    """Return random classes."""
    return numpy.random.randint(0, number, count)


def fitted(note: Note, model: Any, *data: Any, **options: Any) -> None:
    """Train with the library's own `fit`, and note losses, weights and predictions."""
    history = model.fit(*data, **{"epochs": 2, "batch_size": 4, "verbose": 0, **options})
    note("history", str(sorted(history.history.items())))
    note("weights", arrays(model.get_weights()))
    note("predictions", arrays([model(data[0])]) if len(data) > 1 else None)


def steps(note: Note, variables: Callable[[], Any], loss_of: Callable[[], Any], how: Any) -> None:
    """Train for three steps with a tape.

    Args:
        note: Takes the facts.
        variables: Returns the variables; called after the first loss, which may create them.
        loss_of: Returns the loss.
        how: Applies a list of gradients to a list of variables.
    """
    import tensorflow as tf

    loss_of()

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of()
        found = list(variables())
        grads = tape.gradient(loss, found)
        how(grads, found)
        return loss, grads

    for number in range(3):
        loss, grads = step()
        note(f"step {number}", arrays([loss, *(tf.convert_to_tensor(grad) for grad in grads)]))
    note("variables", arrays(variables()))


@library("Keras: functions, fit, save, load")
def saved(note: Note) -> None:
    """Train, and go on from a saved model."""
    import keras
    import tensorflow as tf

    given = keras.Input((6, 6, 2))
    hidden = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, padding="same")(given))
    hidden = keras.layers.Flatten()(keras.layers.Dropout(0.2)(hidden + 1))
    model = keras.Model(given, keras.layers.Dense(3, "softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    x, y = drawn(8, 6, 6, 2), classes(3, 8)
    fitted(note, model, x, y)
    with tempfile.TemporaryDirectory() as folder:
        model.save(os.path.join(folder, "model.keras"))
        loaded = keras.models.load_model(os.path.join(folder, "model.keras"))
        model.export(os.path.join(folder, "exported"), verbose=False)
        exported = tf.saved_model.load(os.path.join(folder, "exported"))
        note("loaded", arrays([loaded.predict(x, verbose=0), exported.serve(x)]))


@library("KerasHub: a small GPT-2", "keras_hub")
def causal_language(note: Note) -> None:
    """Fine-tune with LoRA, and sample tokens with a cache."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=20,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=8,
    )
    backbone.enable_lora(2)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", sampler="greedy")
    tokens = classes(20, 48).reshape(6, 8)
    given = {"token_ids": tokens, "padding_mask": numpy.ones_like(tokens)}
    fitted(note, model, given, numpy.roll(tokens, -1, 1))
    found = model.generate({"token_ids": tokens, "padding_mask": tokens > 9}, stop_token_ids=None)
    note("generated", arrays([found["token_ids"]]))


@library("KerasTuner: a random search", "keras_tuner")
def search(note: Note) -> None:
    """Build and fit two models, and take the best."""
    import keras
    import keras_tuner

    def build(choices: Any) -> Any:
        units = choices.Int("units", 2, 6)
        model = keras.Sequential([keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.RandomSearch(
            build, "val_loss", max_trials=2, seed=1, directory=folder, overwrite=True
        )
        x, y = drawn(12, 3), drawn(12, 1)
        tuner.search(x, y, epochs=1, validation_data=(x, y), verbose=0)
        note("best", str(tuner.get_best_hyperparameters()[0].values))
        note("predictions", arrays([tuner.get_best_models()[0](x)]))


@library("Sonnet: modules and optimizers", "sonnet")
def modules(note: Note) -> None:
    """Train a convolution, batch norm and an LSTM with a loop of one's own."""
    import sonnet
    import tensorflow as tf

    convolution, norm = sonnet.Conv1D(4, 3), sonnet.BatchNorm(True, True)
    core, head = sonnet.LSTM(5), sonnet.nets.MLP([6, 3], dropout_rate=0.1)
    x, labels = tf.constant(drawn(4, 6, 2)), tf.constant(classes(3, 4))
    optimizer = sonnet.optimizers.Adam(0.01)

    def loss() -> Any:
        hidden = norm(convolution(x), is_training=True)
        found, _ = sonnet.static_unroll(
            core, tf.transpose(hidden, [1, 0, 2]), core.initial_state(4)
        )
        logits = head(found[-1], is_training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    every = (convolution, norm, core, head)
    steps(
        note,
        lambda: [variable for module in every for variable in module.trainable_variables],
        loss,
        optimizer.apply,
    )


@library("BayesFlow: a flow for a posterior", "bayesflow", KERAS_BACKEND="tensorflow")
def amortized(note: Note) -> None:
    """Train a coupling flow on simulations, and sample."""
    import bayesflow

    network = bayesflow.networks.CouplingFlow(depth=2, subnet_kwargs={"widths": (8,)})
    approximator = bayesflow.ContinuousApproximator(
        adapter=bayesflow.Adapter()
        .convert_dtype("float64", "float32")
        .rename("theta", "inference_variables")
        .rename("x", "inference_conditions"),
        inference_network=network,
    )
    theta = drawn(12, 2)
    data = bayesflow.OfflineDataset(
        {"theta": theta, "x": theta + drawn(12, 2)}, 4, approximator.adapter
    )
    approximator.compile("adam")
    history = approximator.fit(dataset=data, epochs=2, verbose=0)
    note("history", str(sorted(history.history.items())))
    note("weights", arrays(approximator.get_weights()))
    note(
        "samples", arrays(approximator.sample(num_samples=3, conditions={"x": theta[:2]}).values())
    )


@library("keras-tcn: causal convolutions", "tcn")
def temporal(note: Note) -> None:
    """Fit dilated causal convolutions with skips."""
    import keras
    from tcn import TCN

    model = keras.Sequential(
        [TCN(4, 2, dilations=(1, 2), use_batch_norm=True, dropout_rate=0.1), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    fitted(note, model, drawn(8, 6, 2), drawn(8, 1))


@library("Kapre: spectra as layers", "kapre")
def spectra(note: Note) -> None:
    """Fit on magnitudes of short Fourier transforms."""
    import keras
    from kapre import STFT, Magnitude, MagnitudeToDecibel

    model = keras.Sequential(
        [
            keras.Input((64, 1)),
            STFT(n_fft=16, hop_length=8),
            Magnitude(),
            MagnitudeToDecibel(),
            keras.layers.Conv2D(2, 3),
            keras.layers.GlobalMaxPooling2D(),
        ]
    )
    model.compile("adam", "mse")
    fitted(note, model, drawn(8, 64, 1), drawn(8, 2))


@library("KerasRS: retrieval with in-batch negatives", "keras_rs")
def retrieval(note: Note) -> None:
    """Train two towers, and retrieve."""
    import keras
    import keras_rs

    loss = keras.losses.CategoricalCrossentropy(from_logits=True)

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = keras.layers.Embedding(6, 4), keras.layers.Embedding(8, 4)
            self.cross = keras_rs.layers.FeatureCross()
            self.correct = keras_rs.layers.SamplingProbabilityCorrection()

        def call(self, given: Any) -> Any:
            users, items = self.cross(self.users(given["user"])), self.items(given["item"])
            scores = users @ keras.ops.transpose(items)
            return self.correct(scores, keras.ops.ones(keras.ops.shape(scores)[1]) / 8)

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
            return loss(keras.ops.eye(keras.ops.shape(y_pred)[0]), y_pred)

    model = Model()
    model.compile("adagrad")
    given = {"user": classes(6, 12), "item": classes(8, 12)}
    fitted(note, model, given, numpy.zeros(12))
    found = keras_rs.layers.BruteForceRetrieval(model.items.embeddings, k=2)(
        model.users(numpy.arange(3))
    )
    note("found", arrays(found))


@library("KerasCV: losses and augmentations", "keras_cv")
def vision(note: Note) -> None:
    """Augment images and boxes, and train a small backbone."""
    import keras
    import keras_cv

    images = numpy.random.uniform(0, 255, (4, 16, 16, 3)).astype("float32")
    augmented = keras_cv.layers.RandomFlip(seed=3)(images)
    note("augmented", arrays([augmented]))
    model = keras.Sequential(
        [
            keras_cv.layers.SqueezeAndExcite2D(3, bottleneck_filters=2),
            keras.layers.Conv2D(4, 3),
            keras_cv.layers.DropPath(0.2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2, "softmax"),
        ]
    )
    model.compile("adam", keras_cv.losses.FocalLoss())
    fitted(note, model, images / 255, numpy.eye(2, dtype="float32")[classes(2, 4)])
