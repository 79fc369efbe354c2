import logging
import sys
import types
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from event_files import events

from dreamfleet.errors import ConfigError, MissingExtraError, install_command
from dreamfleet.metrics import (
    JsonlOutput,
    MediaOutput,
    MlflowOutput,
    Output,
    Outputs,
    PrometheusOutput,
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
        ("mlflow", lambda path: MlflowOutput(path), "mlflow"),
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


class FakeMlflow:
    """Takes what a server of MLflow takes."""

    def __init__(self) -> None:
        self.metrics: list[tuple] = []
        self.params: list[tuple] = []
        self.artifacts: list[tuple[str, str]] = []
        self.runs = 0
        self.states: list[str] = []
        self.options: dict = {}

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        return name

    def create_run(self, experiment: str, run_name: str):
        self.runs += 1
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run-{self.runs}"))

    def update_run(self, run: str, status: str) -> None:
        self.states.append(f"{run} {status}")

    def log_batch(self, run: str, metrics=(), params=()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.metrics += [(run, key, value, step) for key, value, _, step in metrics]
        self.params += params

    def log_artifact(self, run: str, path: str, folder: str) -> None:
        assert Path(path).stat().st_size > 0
        self.artifacts.append((folder, Path(path).name))

    def set_terminated(self, run: str) -> None:
        self.states.append(f"{run} ended")


@pytest.fixture
def mlflow(monkeypatch) -> FakeMlflow:
    server = FakeMlflow()
    module = types.ModuleType("mlflow")
    module.MlflowClient = lambda **options: vars(server).update(options=options) or server
    module.entities = types.SimpleNamespace(Metric=lambda *row: row, Param=lambda *row: row)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return server


def test_mlflow_gets_numbers_pictures_and_settings(mlflow: FakeMlflow, tmp_path: Path) -> None:
    settings = {f"group.setting{n}": n for n in range(150)}
    output = MlflowOutput(tmp_path, settings=settings)
    output.write(7, EVERYTHING)
    output.close()
    assert ("run-1", "loss", 0.5, 7) in mlflow.metrics
    assert len(mlflow.params) == 150
    assert ("frame", "000000007.png") in mlflow.artifacts
    assert ("openloop", "000000007.gif") in mlflow.artifacts
    again = MlflowOutput(tmp_path, settings=settings)
    again.write(9, {"loss": 0.1})
    assert mlflow.metrics[-1] == ("run-1", "loss", 0.1, 9)
    assert mlflow.states == ["run-1 ended", "run-1 RUNNING"]
    assert mlflow.options["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"


def test_mlflow_itself_keeps_a_run(tmp_path: Path, monkeypatch) -> None:
    reason = f"MLflow is not installed: {install_command('mlflow')}"
    package = pytest.importorskip("mlflow", reason=reason)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with warnings.catch_warnings():  # of the package's own packages
        warnings.simplefilter("ignore")
        for step in (1, 2):
            output = MlflowOutput(tmp_path, settings={"seed": 3})
            output.write(step, {"train/loss": 0.5 * step, "frame": EVERYTHING["frame"]})
            output.close()
        client = package.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
        run = (tmp_path / "mlflow_run").read_text().strip()
        rows = client.get_metric_history(run, "train/loss")
        assert [(row.step, row.value) for row in rows] == [(1, 0.5), (2, 1.0)]
        assert client.get_run(run).data.params == {"seed": "3"}
    assert len(list((tmp_path / "mlflow").rglob("*.png"))) == 2


def test_prometheus_reads_the_newest_numbers() -> None:
    output = PrometheusOutput(0, {"run": 'a "run"'})
    address = f"http://127.0.0.1:{output.port}"
    try:
        output.write(5, {"train/loss": 0.5, "returns": [1.0, 2.0], "episode/score": float("nan")})
        output.write(4, {"train/loss": 0.25})
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "# TYPE dreamfleet_train_loss gauge\n" in text
        assert 'dreamfleet_train_loss{run="a \\"run\\""} 0.25\n' in text
        assert 'dreamfleet_step{run="a \\"run\\""} 5.0\n' in text
        assert "NaN" in text
        assert "returns" not in text
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"{address}/")
        refused.value.close()
        with pytest.raises(ConfigError, match="choose another"):
            PrometheusOutput(output.port)
    finally:
        output.close()


def test_tensorboard_gets_hyperparameters(tmp_path: Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    settings = {"seed": 3, "dreamer.loss.horizon": 100.0, "outputs": ["jsonl"]}
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


@pytest.fixture(
    params=["media", "jsonl", "tensorboard", "wandb", "mlflow", "prometheus", "several"]
)
def output(
    request: pytest.FixtureRequest, tmp_path: Path, wandb: FakeRun, mlflow: FakeMlflow
) -> Output:
    if request.param == "tensorboard":
        pytest.importorskip("tensorboardX")
    makers = {
        "media": lambda: MediaOutput(tmp_path),
        "jsonl": lambda: JsonlOutput(tmp_path / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardOutput(tmp_path),
        "wandb": WandbOutput,
        "mlflow": lambda: MlflowOutput(tmp_path),
        "prometheus": lambda: PrometheusOutput(0),
        "several": lambda: Outputs([JsonlOutput(tmp_path / "metrics.jsonl")]),
    }
    return makers[request.param]()


def test_every_output_takes_everything(output: Output) -> None:
    output.write(0, {})
    output.write(1, EVERYTHING)
    output.write(2, {"loss": float("nan"), "unknown": object(), "nothing": None})
    output.flush()
    output.close()
