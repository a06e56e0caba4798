"""A stage's data: text in, sequences of tokens on disk, batches out in an order that any step can resume."""

from palimpsa_surgery.stages.data.lanes import ContinuedOrder, training_order
from palimpsa_surgery.stages.data.order import IGNORED, Sequences, TrainingOrder, collate
from palimpsa_surgery.stages.data.preparation import check_data, data_bytes, prepare, vocabulary_hash, wanted_sequences

__all__ = [
    "IGNORED",
    "ContinuedOrder",
    "Sequences",
    "TrainingOrder",
    "check_data",
    "collate",
    "data_bytes",
    "prepare",
    "training_order",
    "vocabulary_hash",
    "wanted_sequences",
]
