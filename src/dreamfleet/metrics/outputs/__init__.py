"""Outputs: JSON lines, media files, TensorBoard, Weights & Biases. A new one is a class (see
`Output`) in a module of its own."""

from dreamfleet.metrics.outputs.base import Kind, Output, Outputs, kind_of
from dreamfleet.metrics.outputs.jsonl import (
    JsonlFile,
    JsonlOutput,
    JsonlTail,
    ScoresFile,
    last_rows,
    read_jsonl,
)
from dreamfleet.metrics.outputs.media import MediaOutput
from dreamfleet.metrics.outputs.tensorboard import TensorBoardOutput
from dreamfleet.metrics.outputs.wandb import WandbOutput

__all__ = [
    "JsonlFile",
    "JsonlOutput",
    "JsonlTail",
    "Kind",
    "MediaOutput",
    "Output",
    "Outputs",
    "ScoresFile",
    "TensorBoardOutput",
    "WandbOutput",
    "kind_of",
    "last_rows",
    "read_jsonl",
]
