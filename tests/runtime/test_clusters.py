"""The examples for Slurm and Kubernetes: their syntax, and what jax needs of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SBATCH, JOBSET = DOCS / "clusters" / "train.sbatch", DOCS / "clusters" / "jobset.yaml"

# Options of sbatch and what their values look like; None for those without.
NUMBER, WORD = r"[1-9]\d*", r"[\w.%/-]+"
OPTIONS = {
    "job-name": WORD,
    "nodes": NUMBER,
    "gpus-per-node": NUMBER,
    "ntasks-per-node": NUMBER,
    "cpus-per-task": NUMBER,
    "time": r"(\d+-)?\d\d:\d\d:\d\d",
    "signal": r"(B:)?(TERM|INT|USR1|USR2)@\d{1,5}",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": WORD,
}


def sbatch_options(text):
    """Those that sbatch reads: it stops at the first line that is no comment."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            option = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
            assert option, f"sbatch does not understand: {line}"
            found[option[1]] = option[2]
    assert text.count("#SBATCH") == len(found), "an option comes twice, or after the first command"
    return found


def test_the_script_is_bash():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    done = subprocess.run([bash, "-n", SBATCH], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_sbatch_understands_its_options():
    options = sbatch_options(SBATCH.read_text(encoding="utf-8"))
    for name, value in options.items():
        form = OPTIONS[name]
        assert value is None if form is None else re.fullmatch(form, value), (name, value)
    # jax gives each process the one GPU of its local number: as many processes as GPUs, all visible.
    assert options["ntasks-per-node"] == options["gpus-per-node"]


@pytest.mark.parametrize(
    ("codes", "runs", "ends"),
    [("0", 1, 0), ("1", 1, 1), ("75 0", 2, 0), ("137 75 1", 3, 1), ("75 75 75 75 0", 4, 75)],
)
def test_the_script_restarts_what_a_restart_mends(tmp_path, codes, runs, ends):
    """With an srun that ends with one code after the other."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n", encoding="utf-8")
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/sh\necho "$@" >> calls\nhead -1 codes > code\nsed -i 1d codes\nexit $(cat code)\n',
        encoding="utf-8",
    )
    srun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "12"}
    done = subprocess.run(
        [bash, SBATCH], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert (done.returncode, len(calls), done.stderr) == (ends, runs, "")
    assert done.stdout.splitlines() == [f"restart {i} of 3" for i in range(1, runs)]
    assert all("--kill-on-bad-exit=1 " in call for call in calls)


def test_the_jobset_has_what_jax_looks_for():
    yaml = pytest.importorskip("yaml")
    objects = list(yaml.safe_load_all(JOBSET.read_text(encoding="utf-8")))
    assert [o["kind"] for o in objects] == ["JobSet", "ServiceAccount", "Role", "RoleBinding"]
    jobset, account, role, binding = objects
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    # jax calls pod 0 <job>-0.<name of the JobSet>, and counts the pods of one job.
    network = spec["network"]
    assert network["subdomain"] == name
    assert network["enableDNSHostnames"] is network["publishNotReadyAddresses"] is True
    (jobs,) = spec["replicatedJobs"]
    assert jobs["replicas"] == 1
    job = jobs["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert "subdomain" not in pod
    (container,) = pod["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) > 0
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    # jax lists pods and services, and reads the job, in the name of the pod's account.
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert [s["name"] for s in binding["subjects"]] == [account["metadata"]["name"]]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    may = {
        (resource, verb)
        for r in role["rules"]
        for resource in r["resources"]
        for verb in r["verbs"]
    }
    assert {("pods", "list"), ("services", "list"), ("jobs", "get")} <= may
    names = [f"{name}-{jobs['name']}-0-{job['parallelism'] - 1}", name]
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", n) for n in names)


def test_the_page_shows_the_files_as_they_are():
    page = (DOCS / "hosts.md").read_text(encoding="utf-8")
    for path in (SBATCH, JOBSET):
        assert path.read_text(encoding="utf-8") in page, f"docs/hosts.md shows another {path.name}"
