"""What is deployed with: every file is valid for the tool that reads it, and its commands exist.

Docker and Kubernetes themselves are not needed: the tools bring their schemas along.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dreamfleet.cli import COMMANDS, find
from dreamfleet.cli.arguments import function_options, parse
from dreamfleet.cli.train import config_of
from dreamfleet.fleet.binding import JOIN_PORT

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))

# What KubeRay's reference of its API says; no package brings the schema of these kinds along.
RAY_JOB = {"entrypoint": str, "submissionMode": str, "shutdownAfterJobFinishes": bool,
           "backoffLimit": int, "rayClusterSpec": dict}  # fmt: skip
RAY_CLUSTER = {"rayVersion": str, "authOptions": dict, "headGroupSpec": dict,
               "workerGroupSpecs": list}  # fmt: skip
HEAD_GROUP = {"rayStartParams": dict, "template": dict}
WORKER_GROUP = {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int,
                **HEAD_GROUP}  # fmt: skip


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).parent
    program = shutil.which("hadolint", path=str(beside)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: make setup-dev")
    return subprocess.run(
        [program, "--no-color", str(path)], capture_output=True, text=True, check=False
    )


# --- the image ------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(r"^([A-Z]+) +(.*)$", text, re.MULTILINE)


def test_the_dockerfile_is_in_order(tmp_path: Path) -> None:
    found = hadolint(ROOT / "Dockerfile")
    assert found.returncode == 0, found.stdout
    worse = tmp_path / "Dockerfile"
    worse.write_text((ROOT / "Dockerfile").read_text().replace("USER 1000:1000", "USER root"))
    assert "DL3002" in hadolint(worse).stdout


def test_what_the_dockerfile_copies_reaches_it_and_nothing_else() -> None:
    copied = {
        source for name, words in instructions() if name == "COPY" for source in words.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_has_a_user_and_a_health_check_that_exists() -> None:
    found = dict(instructions())
    assert found["USER"] == "1000:1000"
    check = found["HEALTHCHECK"].partition("CMD ")[2]
    _, _, command = json.loads(check)
    understood(command.replace("$LOGDIR", "/runs/run"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in ("Dockerfile", "compose.yaml", "deploy/kubernetes/ray.yaml"):
        for extras in re.findall(r"EXTRAS=(\w[\w,]*)", (ROOT / page).read_text()):
            assert set(extras.split(",")) <= set(project["optional-dependencies"])


# --- commands -------------------------------------------------------------------------------------


def understood(command: str) -> None:
    """Fails if this version does not know the command, or one of its options."""
    words = [word for word in shlex.split(command) if word != "exec"]
    assert words.pop(0) == "dreamfleet"
    name, *arguments = words
    if name == "train":
        config_of(arguments)
    else:
        parse(function_options(find(COMMANDS[name])), arguments)


def test_commands_that_do_not_exist_are_noticed() -> None:
    for command in ("dreamfleet train --binds x", "dreamfleet join x --enws 4"):
        with pytest.raises(ValueError, match="no option"):
            understood(command)


# --- compose --------------------------------------------------------------------------------------


def test_compose_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")

    def check(path: Path) -> subprocess.CompletedProcess[str]:
        schema = ["--builtin-schema", "vendor.compose-spec"]
        words = [sys.executable, "-m", "check_jsonschema", *schema, str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    found = check(ROOT / "compose.yaml")
    assert found.returncode == 0, found.stdout
    worse = tmp_path / "compose.yaml"
    worse.write_text((ROOT / "compose.yaml").read_text().replace("depends_on:", "depend_on:"))
    assert "depend_on" in check(worse).stdout


def test_compose_runs_an_agent_a_replay_and_two_environment_machines() -> None:
    (project,) = documents(ROOT / "compose.yaml")
    services = project["services"]
    assert {name: service.get("scale", 1) for name, service in services.items()} == {
        "agent": 1,
        "replay": 1,
        "envs": 2,
    }
    for service in services.values():
        command = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["command"])
        understood(f"dreamfleet {command}")
    # Environments see the invitations, and neither the run's key nor its data.
    assert services["envs"]["volumes"] == ["invitations:/runs/run/invitations:ro"]


# --- Kubernetes -----------------------------------------------------------------------------------


def validate(document: dict[str, Any]) -> None:
    module = pytest.importorskip("kubernetes_validate")
    module.validate(document, module.latest_version(), strict=True)


def pod_templates(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The templates inside of a manifest, at any depth."""
    for key, value in document.items():
        if key == "template":
            yield value
        elif isinstance(value, dict):
            yield from pod_templates(value)
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, dict):
                    yield from pod_templates(each)


def known(document: dict[str, Any], fields: dict[str, type]) -> None:
    assert document.keys() <= fields.keys()
    for key, value in document.items():
        assert isinstance(value, fields[key]), key


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    for document in documents(path):
        if document["apiVersion"] != "ray.io/v1":
            validate(document)
            continue
        assert document["kind"] == "RayJob"
        spec = document["spec"]
        known(spec, RAY_JOB)
        cluster = spec["rayClusterSpec"]
        known(cluster, RAY_CLUSTER)
        locked = (ROOT / "locks" / "dev.txt").read_text()
        assert f"\nray=={cluster['rayVersion']} " in locked  # what was tried
        known(cluster["headGroupSpec"], HEAD_GROUP)
        for group in cluster["workerGroupSpecs"]:
            known(group, WORKER_GROUP)
        templates = list(pod_templates(spec))
        assert len(templates) == 3
        for template in templates:
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}}
            validate({**pod, "template": template})


def test_a_manifest_that_is_not_valid_is_noticed() -> None:
    module = pytest.importorskip("kubernetes_validate")
    (_, _, job) = documents(ROOT / "deploy" / "kubernetes" / "agent.yaml")
    job["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(module.ValidationError):
        validate(job)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_no_pod_is_root_and_its_commands_exist(path: Path) -> None:
    for document in documents(path):
        for template in pod_templates(document):
            spec = template["spec"]
            assert spec["securityContext"]["runAsUser"] == 1000
            for container in spec["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                if container.get("args", ["-"])[0] == "join":
                    understood(shlex.join(["dreamfleet", *container["args"]]))
                if probe := container.get("livenessProbe", {}).get("exec"):
                    understood(shlex.join(probe["command"]))
        if entrypoint := document["spec"].get("entrypoint"):
            understood(entrypoint)
    for line in re.findall(r"exec (dreamfleet .*)", path.read_text()):
        understood(line)


def test_the_ports_of_two_actors_are_open() -> None:
    (policy,) = (
        each
        for each in documents(ROOT / "deploy/kubernetes/envs.yaml")
        if each["kind"] == "NetworkPolicy"
    )
    (ports,) = policy["spec"]["ingress"][0]["ports"]
    joining, actors = 1, 2
    last = JOIN_PORT + joining + actors - 1
    assert (ports["port"], ports["endPort"]) == (JOIN_PORT, last)
    assert f"`{JOIN_PORT}-{last}`" in (ROOT / "docs/machines.md").read_text()


def test_compose_and_its_page_scale_with_the_same_command() -> None:
    texts = ((ROOT / name).read_text() for name in ("compose.yaml", "docs/machines.md"))
    first, second = (re.findall(r"docker compose up --scale[^#\n]*", text) for text in texts)
    assert [each.strip() for each in first] == [each.strip() for each in second] != []


def test_environment_pods_hold_an_invitation_and_nothing_else_of_the_run() -> None:
    deployment, _ = documents(ROOT / "deploy" / "kubernetes" / "envs.yaml")
    (volume,) = deployment["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"]["secretName"] == "dreamfleet-invitation"


# --- Slurm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy" / "slurm").iterdir()), ids=lambda p: p.name
)
def test_scripts_are_shell(path: Path) -> None:
    """`try.sh` runs them for real."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in re.findall(r"dreamfleet (?:train|join) [^&\n]*--\w[^&\n]*", path.read_text()):
        understood(re.sub(r'"?\$\w+"?', "1", command.replace('"$@"', "")))


def test_workflows_are_valid_and_name_what_exists() -> None:
    """They run at GitHub only; here their schema, their targets and their Pythons are checked."""
    pytest.importorskip("check_jsonschema")
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [each.name for each in workflows] == ["ci.yml", "release.yml"]
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    done = subprocess.run(
        [*words, "vendor.github-workflows", *map(str, workflows)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each.split("::")[-1].strip() for each in project["classifiers"] if "3." in each]
    ci = workflows[0].read_text()
    assert f"python: {json.dumps(named)}" in ci
    assert "macos-latest" in ci
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make ([a-z-]+)", ci):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert f"dist/{project['name']}-" in workflows[1].read_text()
