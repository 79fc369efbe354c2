"""What tests read from golden files: sizes, key names and settings, whatever they are."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_data import choices_of, golden_name, loss_of, model_of, optimizer_of, spaces_of
from golden_files import FOLDER, load, numbered, part

from dreamfleet import Space


def file_of(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A file with parameters of these shapes; two underscores stand for a slash."""
    return {
        f"param/{name.replace('__', '/')}": np.zeros(shape, np.float32)
        for name, shape in shapes.items()
    }


def numbers(**settings: Any) -> dict[str, np.ndarray]:
    return {f"cfg/{name}": np.asarray(value) for name, value in settings.items()}


def test_sizes_follow_from_parameters_and_settings() -> None:
    data = file_of(
        dyn__dynin0__kernel=(30, 7),
        dyn__dyngru__kernel=(5, 6, 18),
        dyn__dynhid0__kernel=(5, 27, 6),
        dyn__dynhid1__kernel=(5, 6, 6),
        dyn__obs0__kernel=(41, 7),
        enc__cnn0__kernel=(3, 3, 1, 6),
        enc__cnn0__bias=(6,),
        enc__cnn1__kernel=(3, 3, 6, 9),
        enc__cnn1__bias=(9,),
        rew__mlp__linear0__kernel=(36, 11),
        rew__mlp__linear1__kernel=(11, 11),
        rew__head__logits__kernel=(11, 41),
        dec__sp0__kernel=(3, 10, 12),
    )
    model = model_of(data | numbers(stoch=2, classes=3, unimix=np.float32(0.5), imglayers=4))
    assert (model.deter, model.hidden, model.blocks, model.decoder_blocks) == (30, 7, 5, 3)
    assert (model.stoch, model.classes, model.unimix) == (2, 3, 0.5)
    layers = (model.dynamics_layers, model.prior_layers, model.posterior_layers)
    assert layers == (2, 4, 1)
    assert (model.units, model.reward_layers, model.bins, model.kernel) == (11, 2, 41, 3)
    assert [model.depth * mult for mult in model.mults] == [6, 9]
    decoder = file_of(dec__conv0__bias=(6,), dec__conv1__bias=(8,), dec__spnorm__scale=(9,))
    assert model_of(decoder).mults == (6, 8, 9)
    stated = model_of(data | numbers(depth=3, mults=[2, 3]))
    assert (stated.depth, stated.mults) == (3, (2, 3))


def test_settings_have_the_types_of_ours() -> None:
    loss = loss_of(numbers(contdisc=0.0, slowtar=1.0, horizon=100, lam=np.float32(0.5), perclo=2.0))
    assert (loss.continue_discount, loss.slow_target) == (False, True)
    assert (loss.horizon, loss.return_lambda, loss.return_low) == (100.0, 0.5, 2.0)
    optimizer = optimizer_of(numbers(lr=0.5, warmup=np.float32(3.0), anneal=0.0, agc=0.25, wd=0.5))
    assert (optimizer.warmup, optimizer.decay, optimizer.clip) == (3, 0, 0.25)
    assert isinstance(optimizer.warmup, int)
    assert optimizer.weight_decay == 0.5


def test_spaces_follow_from_arrays_and_choices_from_whatever_tells_them() -> None:
    arrays = {
        "picture": np.zeros((2, 3, 8, 12, 1), np.uint8),
        "goal": np.zeros((2, 3), np.int32),
        "cards": np.zeros((2, 3, 4), np.int32),
        "die": np.zeros((2, 3, 2), np.int32),
        "speed": np.zeros((2, 3, 5), np.float32),
    }
    data = numbers(**{"classes/goal": 9}) | file_of(dec__vec__cards__logits__bias=(28,))
    vectors = {name: value for name, value in arrays.items() if name != "picture"}
    # 9 for the goal, 28 for the cards, 5 for the speed: 12 are left for two dice.
    choices = choices_of(data, vectors, 54)
    assert choices == {"goal": 9, "cards": 7, "die": 6}
    spaces = spaces_of(arrays, choices)
    assert spaces == {
        "picture": Space(np.uint8, (8, 12, 1)),
        "goal": Space(np.int32, (), 0, 9),
        "cards": Space(np.int32, (4,), 0, 7),
        "die": Space(np.int32, (2,), 0, 6),
        "speed": Space(np.float32, (5,)),
    }
    with pytest.raises(AssertionError, match="choices of"):
        choices_of({}, vectors, 54)


def test_names_follow_from_those_that_a_file_has() -> None:
    known = {"dec/imgout/kernel", "dec/conv0/kernel", "dec/vec/goal/logits/bias"}
    assert golden_name("decoder/image/stages/0/kernel", known) == "dec/conv0/kernel"
    assert golden_name("decoder/image/stages/1/kernel", known) == "dec/imgout/kernel"
    assert golden_name("decoder/outputs/goal/bias", known) == "dec/vec/goal/logits/bias"
    assert golden_name("decoder/outputs/speed/bias", known) == "dec/vec/speed/pred/bias"
    assert golden_name("actor/outputs/arm.joint.mean/bias", ()) == "pol/head/arm.joint/mean/bias"
    data = {f"trace{n}/op": np.zeros(1) for n in (0, 1, 10)}
    assert numbered(data, "trace") == [0, 1, 10]


def test_another_folder_of_files_replaces_ours(tmp_path: Path) -> None:
    np.savez(tmp_path / "04_kl.npz", **{"cfg/unimix": np.float32(0.25)})
    code = "from golden_files import load; print(float(load('04_kl')['cfg/unimix']))"
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "DREAMFLEET_GOLDEN": str(tmp_path), "PYTHONPATH": tests}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "0.25\n"
    assert {"in/post_logit", "cfg/unimix"} < load("04_kl").keys()
    assert part(load("04_kl"), "cfg/").keys() == {"unimix", "free_nats"}
    assert FOLDER.is_dir()
