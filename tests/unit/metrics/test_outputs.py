import logging
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from event_files import events

from dreamfleet.errors import MissingExtraError, install_command
from dreamfleet.metrics import (
    JsonlOutput,
    MediaOutput,
    Output,
    Outputs,
    TensorBoardOutput,
    WandbOutput,
    kind_of,
    read_jsonl,
)

EVERYTHING = {
    "loss": np.float32(0.5),
    "count": 3,
    "returns": np.array([1.0, 2.0, np.nan, 2.0]),
    "frame": np.zeros((8, 6, 3), np.uint8),
    "openloop": np.zeros((4, 8, 6, 1), np.uint8),
    "note": "hello",
    "strange": np.zeros((2, 2, 2)),
}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "scalar"), (0.5, "scalar"), (True, "scalar"), (np.float32(1), "scalar"),
        (np.array(2), "scalar"),
        (ml_dtypes.bfloat16(1), "scalar"), (np.arange(3), "histogram"), ([1.0, 2.0], "histogram"),
        (np.zeros((4, 4, 3), np.uint8), "image"), (np.zeros((4, 4, 1), np.uint8), "image"),
        (np.zeros((2, 4, 4, 3), np.uint8), "video"), ("text", "text"),
        (np.zeros((4, 4, 3)), "image"), (np.zeros((2, 4, 4, 1), ml_dtypes.bfloat16), "video"),
        (np.zeros((4, 4, 3), np.int32), None), (np.zeros((4, 4, 2), np.uint8), None),
        (np.zeros(0), None), (None, None), (object(), None),
    ],
)  # fmt: skip
def test_kinds(value: object, kind: str | None) -> None:
    assert kind_of(value) == kind


def test_tensorboard_files_hold_every_kind(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    output = TensorBoardOutput(tmp_path)
    output.write(7, EVERYTHING)
    output.flush()
    output.write(8, {"loss": 0.25, "nothing": np.array([np.nan])})
    output.close()
    found = events(tmp_path)
    assert found.keys() == {"loss", "count", "returns", "frame", "openloop", "note"}
    assert [(step, value.simple_value) for step, value in found["loss"]] == [(7, 0.5), (8, 0.25)]
    histogram = found["returns"][0][1].histo
    assert (histogram.num, histogram.min, histogram.max) == (3, 1, 2)
    frame, video = found["frame"][0][1].image, found["openloop"][0][1].image
    assert (frame.height, frame.width, frame.colorspace) == (8, 6, 3)
    assert frame.encoded_image_string.startswith(b"\x89PNG")
    assert (video.height, video.width, video.colorspace) == (8, 6, 1)
    assert video.encoded_image_string.startswith(b"GIF89a")


@pytest.mark.parametrize(
    ("package", "make", "extra"),
    [
        ("tensorboardX", lambda path: TensorBoardOutput(path), "tensorboard"),
        ("wandb", lambda path: WandbOutput(), "wandb"),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_command(
    tmp_path: Path, monkeypatch, package: str, make, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'dreamfleet\[{extra}\]'"):
        make(tmp_path)


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []
        self.axes: dict[str, str] = {}
        self.finished = False

    def log(self, row: dict, step: int) -> None:
        for value in row.values():
            if isinstance(value, tuple) and value[0] == "video":
                assert Path(value[1]).read_bytes().startswith(b"GIF89a"), "the file is there"
        self.rows.append((step, row))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch) -> FakeRun:
    run = FakeRun()
    module = types.ModuleType("wandb")
    module.init = lambda **options: vars(run).update(options=options) or run
    module.Histogram = lambda samples: ("histogram", samples.tolist())
    module.Image = lambda image: ("image", image.shape)
    module.Video = lambda path, **options: ("video", path, options["format"])
    monkeypatch.setitem(sys.modules, "wandb", module)
    return run


def test_wandb_draws_evaluations_over_their_own_step(wandb: FakeRun) -> None:
    """The package drops a row whose step is lower than one before."""
    output = WandbOutput()
    output.write(700, {"loss": 1.0})
    output.write(500, {"eval/score": 3.0, "eval/step": 500.0})
    output.write(800, {"loss": 1.0})
    assert [step for step, _ in wandb.rows] == [700, 700, 800]
    assert wandb.rows[1][1]["eval/step"] == 500
    assert wandb.axes == {"eval/*": "eval/step"}


def test_tensorboard_gets_hyperparameters(tmp_path: Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    settings = {"seed": 3, "dreamer": {"loss": {"horizon": 100.0}}, "outputs": ["jsonl"]}
    output = TensorBoardOutput(tmp_path, settings=settings)
    output.write(5, {"eval/score": 2.0})
    output.close()
    found = events(tmp_path)
    (_, start), (_, experiment) = (
        found[f"_hparams_/{name}"][0] for name in ("session_start_info", "experiment")
    )
    told = HParamsPluginData.FromString(start.metadata.plugin_data.content)
    hparams = told.session_start_info.hparams
    assert hparams["dreamer.loss.horizon"].number_value == 100
    assert hparams["seed"].number_value == 3
    shown = HParamsPluginData.FromString(experiment.metadata.plugin_data.content).experiment
    assert "eval/score" in [each.name.tag for each in shown.metric_infos]
    assert found["eval/score"][0][0] == 5


def test_wandb_gets_every_kind(wandb: FakeRun) -> None:
    output = WandbOutput(project="p", name="n")
    output.write(7, EVERYTHING)
    output.write(8, {"strange": np.zeros((2, 2, 2))})
    output.close()
    ((step, row),) = wandb.rows
    assert wandb.options == {"project": "p", "name": "n"}
    assert step == 7
    assert row["loss"] == 0.5
    assert row["returns"] == ("histogram", [1.0, 2.0, 2.0])  # the package raises for NaN
    assert row["frame"] == ("image", (8, 6, 3))
    assert row["openloop"][0] == "video"
    assert row["note"] == "hello"
    assert "strange" not in row
    assert wandb.finished


def test_the_real_package_takes_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"wandb is not installed: {install_command('wandb')}"
    package = pytest.importorskip("wandb", reason=reason)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    output = WandbOutput(project="p", dir=str(tmp_path), config={"seed": 3}, allow_val_change=True)
    output.write(7, EVERYTHING)
    output.write(8, {"loss": 0.25, "nothing": np.array([np.nan])})
    output.close()
    package.teardown()  # waits until its own process has written the last of it
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"openloop" in run.read_bytes()
    assert len(list(tmp_path.rglob("*.gif"))) == len(list(tmp_path.rglob("*.png"))) == 1


class Broken:
    def write(self, step: int, metrics: dict) -> None:
        raise ConnectionError("no network")

    def flush(self) -> None:
        raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("no network")


def test_one_broken_output_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    outputs = Outputs([Broken(), JsonlOutput(path)])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            outputs.write(step, {"x": step})
        outputs.flush()
        outputs.close()
    assert len(list(read_jsonl(path))) == 3
    assert caplog.text.count("Broken failed") == 1, "reported once"


@pytest.fixture(params=["media", "jsonl", "tensorboard", "wandb", "several"])
def output(request: pytest.FixtureRequest, tmp_path: Path, wandb: FakeRun) -> Output:
    if request.param == "tensorboard":
        pytest.importorskip("tensorboardX")
    makers = {
        "media": lambda: MediaOutput(tmp_path),
        "jsonl": lambda: JsonlOutput(tmp_path / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardOutput(tmp_path),
        "wandb": WandbOutput,
        "several": lambda: Outputs([JsonlOutput(tmp_path / "metrics.jsonl")]),
    }
    return makers[request.param]()


def test_every_output_takes_everything(output: Output) -> None:
    output.write(0, {})
    output.write(1, EVERYTHING)
    output.write(2, {"loss": float("nan"), "unknown": object(), "nothing": None})
    output.flush()
    output.close()
