"""The files in deploy/ pass their own validators and use options that exist."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from falconet.config.commands import ServeOptions, TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import parse, read_line
from falconet.config.settings import from_line
from falconet.serve.access import HEALTH
from falconet.serve.app import FrontEnd
from falconet.serve.bodies import Memory
from falconet.serve.repository import Repository

DEPLOY = Path(__file__).parents[1] / "deploy"
SCRIPT, JOB, IMAGE = DEPLOY / "slurm.sbatch", DEPLOY / "pytorchjob.yaml", DEPLOY / "Dockerfile"
SERVING = DEPLOY / "serving.yaml"
SCHEMA = Path(__file__).parent / "data/pytorchjob_schema.json"  # Kubeflow's own, see the .md beside it
SERVING_SCHEMA = Path(__file__).parent / "data/serving_schema.json"  # Kubernetes' own, likewise


def complaints(linter, file):
    """What a linter, which the test extra installs, says about a file."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    checker = shutil.which(linter, path=here)
    if not checker:
        pytest.skip(f"{linter} is not installed")
    return subprocess.run([checker, str(file)], capture_output=True, text=True, timeout=300).stdout


def test_the_slurm_script_passes_shellcheck():
    assert complaints("shellcheck", SCRIPT) == ""


def test_the_dockerfile_passes_hadolint():
    assert complaints("hadolint", IMAGE) == ""


def test_the_image_runs_falconet_as_another_user_than_root():
    steps = re.findall(r"^([A-Z]+) (.+)$", IMAGE.read_text(), re.M)
    assert [value for step, value in steps if step == "USER"] == ["10001"]
    assert [json.loads(value) for step, value in steps if step == "ENTRYPOINT"] == [
        ["falconet"],
        ["falconet", "serve", "--host", "0.0.0.0"],
    ]
    assert [value for step, value in steps if step == "FROM"][-1] == "falconet", "what is built by default"


def test_the_image_has_a_base_for_each_device():
    text = IMAGE.read_text()
    stages = dict(re.findall(r"^FROM \$\{(\w+)\} AS (\w+)$", text, re.M))
    assert stages == {"CPU_BASE": "cpu", "CUDA_BASE": "cuda", "DEVICE": "falconet"}
    assert all(re.search(rf"^ARG {name}=\S+$", text, re.M) for name in stages)


def test_the_image_is_built_from_all_that_the_package_needs():
    """`COPY .` takes what the ignore file admits."""
    admitted = set(re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    assert all((DEPLOY.parent / name).exists() for name in admitted)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    named = {"pyproject.toml", "setup.py", "falconet", "compat/examples_utils", "constraints.txt"}
    assert named | {project["readme"], *project["license-files"]} == admitted
    extras = re.search(r"/tmp/falconet\[([a-z,]+)\]", IMAGE.read_text())[1].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()


def test_the_oldest_versions_that_are_tested_are_those_that_may_be_installed():
    lines = re.findall(r"^([\w-]+)==(\S+)$", (DEPLOY.parent / "constraints-oldest.txt").read_text(), re.M)
    pinned = {name.lower().replace("_", "-"): version for name, version in lines}
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = [each for name in extras.keys() - {"aim", "lint", "test"} for each in extras[name]]  # aim: not in the tests
    for name, least in (each.partition(",")[0].split(">=") for each in (*project["dependencies"], *own)):
        assert f"{pinned[name.lower().replace('_', '-')]}.".startswith(f"{least}."), name


def test_the_slurm_script_asks_for_as_many_tasks_as_gpus():
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", SCRIPT.read_text(), re.M))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def test_slurm_accepts_the_script():
    if not shutil.which("sinfo") or subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode:
        pytest.skip("SLURM is missing: sbatch is not installed, or no controller answers")
    small = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]  # for small clusters
    line = ["sbatch", "--test-only", *small, str(SCRIPT)]
    found = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert re.search(r"Job \d+ to start at", found.stderr)


def strict(schema):
    """The same schema with unknown fields refused, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(value) for name, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found


def mistakes(job):
    validator = jsonschema.Draft7Validator(strict(json.loads(SCHEMA.read_text())))
    return [error.message for error in validator.iter_errors(job)]


def test_the_kubernetes_job_matches_kubeflows_schema():
    assert mistakes(yaml.safe_load(JOB.read_text())) == []


SLIPS = {
    "minReplicas: 2": ("minReplica: 2", "'minReplica' was unexpected"),
    "maxRestarts: 10": ("maxRestarts: ten", "'ten' is not of type 'integer'"),
    "mountPath: /data,": ("mount: /data,", "'mountPath' is a required property"),
    "restartPolicy: OnFailure": ("restartPolicy: [OnFailure]", "is not of type 'string'"),
}


@pytest.mark.parametrize(("right", "slip"), SLIPS.items())
def test_the_schema_finds_mistakes(right, slip):
    text = JOB.read_text()
    assert right in text
    found = mistakes(yaml.safe_load(text.replace(right, slip[0])))
    assert any(slip[1] in message for message in found), found


def test_the_kubernetes_job_starts_falconet_with_options_that_exist_and_resumes_after_a_restart():
    job = yaml.safe_load(JOB.read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "falconet.parallel.torchrun", "-m", "falconet", "train"]
    options = parse(TrainOptions, from_line(container["args"], options_of(TrainOptions))).options
    assert options.run.run_dir != "auto", "restarts look for their checkpoints in it"
    assert options.run.resume, "a restarted pod runs the same line"
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def manifests(text):
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def mistakes_in_serving(text):
    schema = strict(json.loads(SERVING_SCHEMA.read_text()))
    found = []
    for kind, manifest in manifests(text).items():
        validator = jsonschema.Draft7Validator({**schema["kinds"][kind], "$defs": schema["$defs"]})
        found += [f"{kind}: {error.message}" for error in validator.iter_errors(manifest)]
    return found


def test_the_serving_manifests_match_kubernetes_schemas():
    assert mistakes_in_serving(SERVING.read_text()) == []


SERVING_SLIPS = {
    "readinessProbe:": ("readyProbe:", "'readyProbe' was unexpected"),
    "replicas: 2": ("replicas: two", "'two' is not of type 'integer'"),
    "mountPath: /keys,": ("mount: /keys,", "'mountPath' is a required property"),
    "apiVersion: autoscaling/v2": ("apiVersion: autoscaling/v1", "'autoscaling/v1' is not one of"),
    "maxReplicas: 6": ("maximum: 6", "'maxReplicas' is a required property"),
    "policyTypes: [Ingress, Egress]": ("policyTypes: Ingress", "'Ingress' is not of type 'array'"),
    "drop: [ALL]": ("drops: [ALL]", "'drops' was unexpected"),
    "targetPort: grpc,": ("targetPort: [grpc],", "is not valid under any of the given schemas"),
}


@pytest.mark.parametrize(("right", "slip"), SERVING_SLIPS.items())
def test_the_schemas_find_mistakes_in_serving(right, slip):
    text = SERVING.read_text()
    assert right in text
    found = mistakes_in_serving(text.replace(right, slip[0], 1))
    assert any(slip[1] in message for message in found), found


@pytest.fixture
def pod():
    return manifests(SERVING.read_text())["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture
def container(pod):
    (found,) = pod["containers"]
    return found


def test_the_servers_options_exist_and_their_drain_ends_before_the_pod_is_killed(pod, container):
    assert container["command"] == ["falconet", "serve"]
    options = parse(ServeOptions, read_line(ServeOptions, container["args"])).options
    (_, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + options.serving.drain_timeout
    assert options.serving.port == container["ports"][0]["containerPort"]
    assert str(options.machine.threads) == container["resources"]["limits"]["cpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options.access.api_key_file.parent) == mounts["keys"]
    assert options.input.checkpoint_input_path.is_relative_to(mounts["runs"])
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}


def routes():
    repository = Repository(sources=dict, policy=lambda _: None)
    front = FrontEnd(repository, memory=Memory(1), most_body=1, seconds=1)
    return {resource.canonical for resource in front.application().router.resources()}


def test_probes_ask_routes_that_need_no_key(container):
    ports = {port["name"] for port in container["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        assert asked["path"] in routes() & HEALTH
        assert asked["port"] in ports


def test_the_images_health_is_asked_at_a_route_that_needs_no_key():
    text = IMAGE.read_text()
    asked = re.search(r"urlopen\('http://127\.0\.0\.1:8000([^']+)'", text)[1]
    assert asked in routes() & HEALTH
    exposed = {int(port) for port in re.search(r"^EXPOSE (.+)$", text, re.M)[1].split()}
    service = manifests(SERVING.read_text())["Service"]["spec"]["ports"]
    assert exposed == {port["port"] for port in service}


def test_the_keys_are_mounted_for_the_servers_group_only(pod):
    (keys,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "keys")
    assert keys["defaultMode"] & 0o777 == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_the_server_runs_without_privileges(pod, container):
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"USER {pod['securityContext']['runAsUser']}" in IMAGE.read_text()
    inside = container["securityContext"]
    assert inside["readOnlyRootFilesystem"]
    assert inside["capabilities"] == {"drop": ["ALL"]}
    assert not inside["allowPrivilegeEscalation"]


def test_every_object_selects_the_same_pods():
    found = manifests(SERVING.read_text())
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
