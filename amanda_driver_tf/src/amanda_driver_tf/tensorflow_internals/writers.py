"""The names of functions that write, read or export a model, in TensorFlow and in Keras.

Owns the names only: those that a release lacks do no harm.
"""

from __future__ import annotations

__all__ = ["QUIET_FUNCTIONS", "WRITERS"]

#: Module -> functions whose operators are none of the program's.
QUIET_FUNCTIONS = {
    "tensorflow.python.checkpoint.checkpoint": (
        *("TrackableSaver.restore", "Checkpoint.read", "Checkpoint.restore"),
        *("CheckpointV1.restore",),
    ),
    "tensorflow.python.saved_model.load": ("load", "load_partial"),
    "tensorflow.python.training.saver": ("Saver.restore",),
    "tensorflow.python.ops.resource_variable_ops": ("BaseResourceVariable.__deepcopy__",),
    "keras.src.layers.layer": ("Layer.set_weights",),
    "keras.src.models.model": ("Model.load_weights",),
    "keras.src.saving.saving_api": ("load_model", "load_weights"),
    "keras.src.saving.saving_lib": ("load_model", "load_weights_only"),
}
#: Module -> such a function that writes the model for other programs -> what it is called there.
WRITERS = {
    "tensorflow.python.checkpoint.checkpoint": {
        "Checkpoint.save": "tf.train.Checkpoint",
        "Checkpoint.write": "tf.train.Checkpoint",
        "CheckpointV1.save": "tf.train.Checkpoint",
        "TrackableSaver.save": "tf.train.Checkpoint",
    },
    "tensorflow.python.checkpoint.checkpoint_management": {
        "CheckpointManager.save": "tf.train.CheckpointManager"
    },
    "tensorflow.python.saved_model.save": {
        "save": "tf.saved_model.save",
        "save_and_return_nodes": "tf.saved_model.save",
        "export_meta_graph": "tf.saved_model.save",
    },
    "tensorflow.python.training.saver": {"Saver.save": "tf.compat.v1.train.Saver"},
    "tensorflow.python.framework.convert_to_constants": dict.fromkeys(
        (
            "_construct_concrete_function",
            "convert_variables_to_constants_v2",
            "convert_variables_to_constants_v2_as_graph",
            "convert_variables_to_constants_from_session_graph",
        ),
        "freezing of variables",
    ),
    "tensorflow.lite.python.lite": {
        f"{kind}.convert": "TFLiteConverter"
        for kind in (
            *("TFLiteConverterV2", "TFLiteFrozenGraphConverterV2", "TFLiteKerasModelConverterV2"),
            *("TFLiteSavedModelConverterV2",),
        )
    },
    "tensorflow.python.ops.resource_variable_ops": {"BaseResourceVariable.__reduce__": "pickle"},
    "keras.src.layers.layer": {"Layer.get_weights": "get_weights"},
    "keras.src.models.model": {
        "Model.save": "model.save",
        "Model.save_weights": "model.save_weights",
        "Model.export": "model.export",
    },
    "keras.src.saving.saving_api": {"save_model": "save_model", "save_weights": "save_weights"},
    "keras.src.saving.saving_lib": {
        "save_model": "save_model",
        "_save_model_to_fileobj": "save_model",
        "save_weights_only": "save_weights",
    },
    "keras.src.saving.keras_saveable": {"KerasSaveable.__reduce__": "pickle"},
    "keras.src.legacy.saving.legacy_h5_format": {
        "save_model_to_hdf5": "save_model",
        "save_weights_to_hdf5_group": "save_weights",
    },
    "keras.src.export.saved_model": {"export_saved_model": "model.export"},
    "keras.src.export.onnx": {"export_onnx": "model.export"},
}
