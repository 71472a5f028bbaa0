"""Programs with libraries of TensorFlow that need Keras 2.

They set this before they import TensorFlow, as their pages say.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-subclassing-any
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined,unused-ignore"
# These libraries are not annotated, and few of them are installed for the checks.

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy

from maintenance.sweeps.foreign import Note

from .keras_libraries import arrays, classes, drawn, fitted, library, steps

LEGACY = {"TF_USE_LEGACY_KERAS": "1"}


@library("Keras 2: layers, a train_step and a checkpoint", "tf_keras", **LEGACY)
def keras_two(note: Note) -> None:
    """Override `train_step`, stop early, save and load."""
    import tensorflow as tf
    import tf_keras as keras

    class Model(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}

    given = keras.Input((8, 4))
    hidden = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))(given)
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(hidden))
    hidden = keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)
    result = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(hidden))
    model = Model(given, result)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    x = drawn(12, 8, 4)
    fitted(note, model, x, classes(3, 12), callbacks=[keras.callbacks.EarlyStopping("loss")])
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(os.path.join(folder, "model.weights.h5"))
        model.load_weights(os.path.join(folder, "model.weights.h5"))
    note("predictions of fit", arrays([model.predict(x, verbose=0)]))


@library(
    "TensorFlow Probability: a surrogate posterior and HMC", "tensorflow_probability", **LEGACY
)
def surrogate(note: Note) -> None:
    """Minimize the evidence bound, and sample a chain in loops inside of a function."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    distributions = tfp.distributions
    joint = distributions.JointDistributionSequential(
        [
            distributions.Normal(0.0, 1.0),
            lambda mean: distributions.Sample(distributions.Normal(mean, 0.5), 6),
        ]
    )
    data = tf.constant(drawn(6) + 1)

    def score(mean: Any) -> Any:
        return joint.log_prob(mean, data)

    posterior = tfp.experimental.vi.build_factored_surrogate_posterior(
        event_shape=tf.TensorShape([]), seed=(1, 2)
    )
    losses = tfp.vi.fit_surrogate_posterior(
        score, posterior, tf.keras.optimizers.Adam(0.1), num_steps=5, seed=(3, 4)
    )
    note("losses", arrays([losses, *posterior.trainable_variables]))
    kernel = tfp.mcmc.HamiltonianMonteCarlo(score, step_size=0.1, num_leapfrog_steps=2)
    chain = tf.function(
        lambda: tfp.mcmc.sample_chain(
            4, tf.constant(0.0), kernel=kernel, num_burnin_steps=2, trace_fn=None, seed=(5, 6)
        )
    )
    note("chain", arrays([chain()]))


@library("TensorFlow Probability: layers of distributions", "tensorflow_probability", **LEGACY)
def variational(note: Note) -> None:
    """Fit a layer that returns distributions, by their likelihood."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(6, activation="relu"),
            tf.keras.layers.Dense(2),
            tfp.layers.DistributionLambda(
                lambda t: tfp.distributions.Normal(t[..., :1], tf.nn.softplus(t[..., 1:]))
            ),
        ]
    )
    model.compile("adam", lambda y, found: -found.log_prob(y))
    history = model.fit(drawn(12, 3), drawn(12, 1), epochs=2, batch_size=4, verbose=0)
    note("history", str(sorted(history.history.items())))
    note("weights", arrays(model.get_weights()))


@library("GPflow: exact and sparse Gaussian processes", "gpflow", **LEGACY)
def processes(note: Note) -> None:
    """Optimize with SciPy, and with natural gradients and Adam."""
    import gpflow
    import tensorflow as tf

    x = numpy.random.uniform(size=(10, 1))
    y = numpy.sin(6 * x) + 0.1 * numpy.random.normal(size=(10, 1))
    exact = gpflow.models.GPR((x, y), gpflow.kernels.SquaredExponential())
    options = {"maxiter": 3}
    gpflow.optimizers.Scipy().minimize(
        exact.training_loss, exact.trainable_variables, options=options
    )
    note("exact", arrays([*exact.trainable_variables, *exact.predict_f(x)]))
    sparse = gpflow.models.SVGP(
        gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(), x[:4].copy(), num_data=10
    )
    gpflow.set_trainable(sparse.q_mu, False)
    gpflow.set_trainable(sparse.q_sqrt, False)
    natural, adam = gpflow.optimizers.NaturalGradient(0.1), tf.keras.optimizers.Adam(0.01)
    loss = sparse.training_loss_closure((x, y))

    @tf.function
    def step() -> None:
        adam.minimize(loss, sparse.trainable_variables)
        natural.minimize(loss, [(sparse.q_mu, sparse.q_sqrt)])

    for _ in range(3):
        step()
    note("sparse", arrays([loss(), *sparse.variables]))


@library("Spektral: a graph network", "spektral", **LEGACY)
def graph_network(note: Note) -> None:
    """Convolve over a graph."""
    import tensorflow as tf
    from spektral.layers import GCNConv

    class Network(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(6, activation="relu"), GCNConv(3)

        def call(self, given: Any) -> Any:
            x, edges = given
            return self.second([self.first([x, edges]), edges])

    edges = (numpy.random.uniform(size=(8, 8)) > 0.5).astype("float32")
    model = Network()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    given = [drawn(8, 4), edges + edges.T]
    fitted(note, model, given, classes(3, 8), batch_size=8, shuffle=False)


@library("DeepXDE: an equation solved by a network", "deepxde", DDE_BACKEND="tensorflow", **LEGACY)
def equation(note: Note) -> None:
    """Differentiate a network twice by its inputs."""
    import deepxde

    space = deepxde.geometry.Interval(-1, 1)

    def residual(x: Any, y: Any) -> Any:
        return deepxde.grad.hessian(y, x) - 2

    edge = deepxde.icbc.DirichletBC(space, lambda x: (x + 1) ** 2, lambda _, on: on)
    data = deepxde.data.PDE(space, residual, edge, 8, 2)
    network = deepxde.nn.FNN([1, 6, 6, 1], "tanh", "Glorot uniform")
    model = deepxde.Model(data, network)
    model.compile("adam", lr=0.001, verbose=0)
    history, _ = model.train(iterations=3, display_every=1, verbose=0)
    note("losses", arrays(history.loss_train))
    note("weights", arrays(network.get_weights()))
    note("solution", arrays([model.predict(numpy.array([[0.5]], "float32"))]))


@library("TensorFlow Recommenders: retrieval", "tensorflow_recommenders", **LEGACY)
def recommended(note: Note) -> None:
    """Train a retrieval model, and look up with a brute-force index."""
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    class Model(tfrs.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = (tf.keras.layers.Embedding(8, 4) for _ in range(2))
            candidates = tf.data.Dataset.range(8).batch(4).map(self.items)
            metrics = tfrs.metrics.FactorizedTopK(candidates, ks=[2])
            self.task = tfrs.tasks.Retrieval(metrics=metrics)

        def compute_loss(self, given: Any, training: bool = False) -> Any:
            return self.task(
                self.users(given["user"]), self.items(given["item"]), compute_metrics=not training
            )

    model = Model()
    model.compile(tf.keras.optimizers.Adagrad(0.1))
    given = {"user": classes(8, 12), "item": classes(8, 12)}
    fitted(note, model, tf.data.Dataset.from_tensor_slices(given).batch(4), batch_size=None)
    index = tfrs.layers.factorized_top_k.BruteForce(model.users, k=2)
    index.index(model.items(numpy.arange(8)))
    note("found", arrays(index(numpy.arange(3))))


@library("Larq: binary layers", "larq", **LEGACY)
def binary(note: Note) -> None:
    """Train binary convolutions by straight-through gradients."""
    import larq
    import tensorflow as tf

    binary = {
        "input_quantizer": "ste_sign",
        "kernel_quantizer": "ste_sign",
        "kernel_constraint": "weight_clip",
        "use_bias": False,
    }
    model = tf.keras.Sequential(
        [
            larq.layers.QuantConv2D(4, 3, **binary),
            tf.keras.layers.BatchNormalization(scale=False),
            tf.keras.layers.Flatten(),
            larq.layers.QuantDense(3, **binary),
            tf.keras.layers.Activation("softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    fitted(note, model, drawn(8, 6, 6, 2), classes(3, 8))


@library("TF-Agents: a deep Q network", "tf_agents", **LEGACY)
def agent(note: Note) -> None:
    """Collect steps into a replay buffer, and train an agent on it."""
    import tensorflow as tf
    from tf_agents.agents.dqn import dqn_agent
    from tf_agents.environments import random_py_environment, tf_py_environment
    from tf_agents.networks import q_network
    from tf_agents.replay_buffers import tf_uniform_replay_buffer
    from tf_agents.specs import array_spec
    from tf_agents.trajectories import trajectory

    world = tf_py_environment.TFPyEnvironment(
        random_py_environment.RandomPyEnvironment(
            array_spec.BoundedArraySpec((4,), numpy.float32, -1, 1),
            array_spec.BoundedArraySpec((), numpy.int32, 0, 1),
            seed=1,
        )
    )
    network = q_network.QNetwork(
        world.observation_spec(), world.action_spec(), fc_layer_params=(8,)
    )
    learner = dqn_agent.DqnAgent(
        world.time_step_spec(), world.action_spec(), network, tf.keras.optimizers.Adam(0.01)
    )
    learner.initialize()
    buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(
        learner.collect_data_spec, world.batch_size, 32
    )
    now = world.reset()
    for _ in range(12):
        chosen = learner.collect_policy.action(now)
        then = world.step(chosen.action)
        buffer.add_batch(trajectory.from_transition(now, chosen, then))
        now = then
    batches = iter(buffer.as_dataset(sample_batch_size=4, num_steps=2))
    losses = [learner.train(next(batches)[0]).loss for _ in range(3)]
    note("losses", arrays(losses))
    note("weights", arrays(network.get_weights()))


@library("TensorFlow Lattice: monotonic layers", "tensorflow_lattice", **LEGACY)
def lattice(note: Note) -> None:
    """Fit a calibrated lattice under constraints."""
    import tensorflow as tf
    import tensorflow_lattice as tfl

    calibrated = tfl.layers.ParallelCombination()
    for monotonicity in ("increasing", "none"):
        calibrated.append(
            tfl.layers.PWLCalibration(
                input_keypoints=numpy.linspace(-1.0, 1.0, 4),
                output_min=0.0,
                output_max=1.0,
                monotonicity=monotonicity,
            )
        )
    model = tf.keras.Sequential(
        [calibrated, tfl.layers.Lattice([2, 2], monotonicities=["increasing", "none"])]
    )
    model.compile("adam", "mse")
    fitted(note, model, drawn(12, 2), drawn(12, 1))


@library(
    "TF Model Optimization: pruning, clusters and quantization",
    "tensorflow_model_optimization",
    **LEGACY,
)
def optimized(note: Note) -> None:
    """Wrap layers that are pruned, clustered and quantized while they train."""
    import tensorflow as tf
    import tensorflow_model_optimization as tfmot

    def made() -> Any:
        return tf.keras.Sequential(
            [tf.keras.layers.Dense(8, "relu", input_shape=(4,)), tf.keras.layers.Dense(3)]
        )

    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = drawn(12, 4), classes(3, 12)
    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.5, 0, 4, frequency=1)
    pruned = tfmot.sparsity.keras.prune_low_magnitude(made(), schedule)
    pruned.compile("adam", loss)
    fitted(note, pruned, x, y, callbacks=[tfmot.sparsity.keras.UpdatePruningStep()])
    for name, wrap in {
        "quantized": tfmot.quantization.keras.quantize_model,
        "clustered": lambda model: tfmot.clustering.keras.cluster_weights(
            model, 4, tfmot.clustering.keras.CentroidInitialization.LINEAR
        ),
    }.items():
        model = wrap(made())
        model.compile("adam", loss)
        model.fit(x, y, epochs=2, batch_size=4, verbose=0)
        note(name, arrays([*model.get_weights(), model(x)]))


@library("TensorFlow GNN: messages along edges", "tensorflow_gnn", **LEGACY)
def messages(note: Note) -> None:
    """Update the states of nodes of a graph tensor."""
    import tensorflow as tf
    import tensorflow_gnn as tfgnn

    source, target = classes(6, 10), classes(6, 10)
    graph = tfgnn.GraphTensor.from_pieces(
        node_sets={
            "nodes": tfgnn.NodeSet.from_fields(
                sizes=tf.constant([6]), features={"hidden_state": tf.constant(drawn(6, 4))}
            )
        },
        edge_sets={
            "edges": tfgnn.EdgeSet.from_fields(
                sizes=tf.constant([10]),
                adjacency=tfgnn.Adjacency.from_indices(
                    ("nodes", tf.constant(source)), ("nodes", tf.constant(target))
                ),
            )
        },
    )
    layer = tfgnn.keras.layers.GraphUpdate(
        node_sets={
            "nodes": tfgnn.keras.layers.NodeSetUpdate(
                {
                    "edges": tfgnn.keras.layers.SimpleConv(
                        tf.keras.layers.Dense(5, "relu"), "sum", receiver_tag=tfgnn.TARGET
                    )
                },
                tfgnn.keras.layers.NextStateFromConcat(tf.keras.layers.Dense(4)),
            )
        }
    )
    optimizer = tf.keras.optimizers.legacy.SGD(0.1)

    def loss() -> Any:
        found = layer(graph).node_sets["nodes"]["hidden_state"]
        return tf.reduce_mean(tf.square(found))

    steps(
        note,
        lambda: layer.trainable_variables,
        loss,
        lambda grads, found: optimizer.apply_gradients(zip(grads, found, strict=True)),
    )


@library("Robustness toolbox and CleverHans: attacks", "art", "cleverhans", **LEGACY)
def attacks(note: Note) -> None:
    """Differentiate losses by images."""
    import tensorflow as tf
    from art.attacks.evasion import ProjectedGradientDescent
    from art.estimators.classification import TensorFlowV2Classifier
    from cleverhans.tf2.attacks.fast_gradient_method import fast_gradient_method

    model = tf.keras.Sequential([tf.keras.layers.Dense(6, "relu"), tf.keras.layers.Dense(3)])
    x = drawn(4, 5)
    model(x)
    classifier = TensorFlowV2Classifier(
        model, 3, (5,), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    attack = ProjectedGradientDescent(classifier, eps=0.2, max_iter=3, verbose=False)
    note("attacked", arrays([attack.generate(x), fast_gradient_method(model, x, 0.1, numpy.inf)]))
