from __future__ import annotations

import json
import re
import resource
import time

import pytest
from rich.console import Console

from moeflow.cli import doctor
from moeflow.cli.doctor import machine, packages, report, surroundings, trials, trying
from moeflow.cli.doctor.finding import Finding, size
from moeflow.cli.doctor.trying import REST, Outcome
from moeflow.errors import ConfigError

GIB = 1 << 30
CPU_TORCH = {"version": "2.13.0", "cuda": None, "devices": [], "detail": "2.13.0"}
GPU_TORCH = {"version": "2.13.0", "cuda": "13.0", "devices": ["H200"], "detail": "2.13.0"}


# Each planted fault: what was found, the status it must get, and the mend that must be named.
FAULTS = {
    "old python": (lambda: machine.check_python((3, 9, 2), "/usr/bin/python3", True), "fault", "PYTHON="),
    "too many threads": (lambda: machine.check_cores(2, 8, "16"), "warn", "unset OMP_NUM_THREADS"),
    "odd threads": (lambda: machine.check_cores(2, 2, "many"), "warn", "unset OMP_NUM_THREADS"),
    "little memory": (lambda: machine.check_memory(16 * GIB, GIB), "warn", "end other programs"),
    "few open files": (lambda: machine.check_descriptors(256, 4096), "warn", "ulimit -n 4096"),
    "few open files, no hard limit": (
        lambda: machine.check_descriptors(256, resource.RLIM_INFINITY), "warn", "ulimit -n 1024",
    ),
    "docker's /dev/shm": (lambda: machine.check_shm(64 << 20), "warn", "--shm-size"),
    "no mpirun": (lambda: machine.check_tool("mpirun", None, "starts ranks"), "note", "apt install openmpi-bin"),
    "no compiler": (lambda: machine.check_tool("g++", None, "compiles"), "note", "apt install g++"),
    "driver broken": (lambda: machine.check_gpus([], "couldn't communicate", CPU_TORCH)[0], "warn", "modprobe nvidia"),
    "CPU torch on a GPU": (
        lambda: machine.check_gpus(["H200"], None, CPU_TORCH)[1], "warn", "pip install --force-reinstall torch",
    ),
    "torch sees no GPU": (
        lambda: machine.check_gpus(["H200"], None, {**GPU_TORCH, "devices": []})[1], "warn", "CUDA_VISIBLE_DEVICES",
    ),
    "package missing": (
        lambda: packages.check_packages(["rich<15,>=13"], {}.get)[0], "fault", 'pip install "rich<15,>=13"',
    ),
    "package too old": (
        lambda: packages.check_packages(["torch>=2.9"], {"torch": "2.8.1"}.get)[0], "fault", 'pip install "torch>=2.9"',
    ),
    "optional package missing": (
        lambda: packages.check_packages(["deepspeed>=0.18; extra == 'deepspeed'"], {}.get)[0],
        "note", 'pip install "moeflow[deepspeed]" --no-build-isolation',
    ),
    "optional package too old": (
        lambda: packages.check_packages(["wandb>=0.19; extra == 'wandb'"], {"wandb": "0.1"}.get)[0],
        "warn", 'pip install "wandb>=0.19"',
    ),
    "two CuPys": (
        lambda: packages.check_cupy_builds(["cupy-cuda12x", "cupy-cuda13x"])[0],
        "warn", "pip uninstall -y cupy-cuda12x cupy-cuda13x",
    ),
    "disk full": (lambda: surroundings.check_disk(10 << 20), "warn", "run.root="),
    "nameless host": (lambda: surroundings.check_hostname("box", None), "warn", '127.0.1.1 box" >> /etc/hosts'),
    "wrong interface": (
        lambda: surroundings.check_interface("eth9", ["lo", "eth0"]), "fault", "unset GLOO_SOCKET_IFNAME",
    ),
    "launcher's variables": (
        lambda: surroundings.check_launcher_variables({"RANK": "0", "WORLD_SIZE": "2", "HOME": "/"}),
        "warn", "unset RANK WORLD_SIZE",
    ),
    "accelerate launch --cpu": (surroundings.about_accelerate, "note", "launch.processes=N"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_gets_its_mend(name):
    look, status, mend = FAULTS[name]
    finding = look()
    assert finding.status == status
    assert mend in finding.mend
    assert "\n" not in finding.detail + finding.mend


# Each way a trial can fail: trial, what its process printed, status, mend.
FAILURES = [
    ("torch", "ModuleNotFoundError: No module named 'torch'", "fault", 'pip install "torch>=2.9"'),
    ("config", "ModuleNotFoundError: No module named 'moeflow.configs'", "fault", "pip install -e ."),
    ("layer", "AssertionError: a gradient is missing", "fault", "python -m moeflow.cli.doctor.trials layer"),
    ("accelerate", "ModuleNotFoundError: No module named 'accelerate'", "fault", "pip install accelerate"),
    ("gloo", "RuntimeError: Unable to find address for: eth9", "fault", "unset GLOO_SOCKET_IFNAME"),
    ("gloo", "RuntimeError: Timed out waiting 30000ms", "fault", "export GLOO_SOCKET_IFNAME=lo"),
    ("gloo", "DistNetworkError: getaddrinfo failed: Name or service not known", "fault", "GLOO_SOCKET_IFNAME=lo"),
    ("nccl", "DistBackendError: Bootstrap : no socket interface found", "warn", "unset NCCL_SOCKET_IFNAME"),
    ("nccl", "DistBackendError: error creating shared memory segment /dev/shm", "warn", "remount,size=2G /dev/shm"),
    ("nccl", "DistBackendError: unhandled cuda error", "warn", "NCCL_DEBUG=INFO"),
    ("cupy", "ModuleNotFoundError: No module named 'cupy'", "note", 'pip install "moeflow[cuda12]"'),
    ("cupy", "RuntimeError: NVRTC cannot be loaded (libnvrtc.so.12)", "warn", "pip install nvidia-cuda-nvrtc-cu12"),
    ("cupy", "CUDARuntimeError: CUDA driver version is insufficient for runtime", "warn", "moeflow[cuda12]"),
    ("nvrtc", "ModuleNotFoundError: No module named 'cupy_backends'", "note", 'pip install "moeflow[cuda12]"'),
    ("nvrtc", 'RuntimeError: trial.cu(1): cannot open source file "cuda_bf16.h"', "warn", "nvidia-cuda-runtime-cu12"),
    ("deepspeed", "ModuleNotFoundError: No module named 'deepspeed'", "note", "--no-build-isolation"),
    ("deepspeed", "MissingCUDAException: CUDA_HOME does not exist", "warn", "export DS_ACCELERATOR=cpu"),
    ("deepspeed", "AttributeError: partially initialized module", "warn", "--force-reinstall"),
    ("trackers", "ModuleNotFoundError: No module named 'tensorboard'", "note", 'pip install "moeflow[tensorboard]"'),
    ("data", "OSError: Stale file handle", "warn", "python -m moeflow.cli.doctor.trials data"),
]
TRIAL = {trial.name: trial for trial in (trying._TORCH, *REST)}


@pytest.mark.parametrize(("name", "said", "status", "mend"), FAILURES)
def test_a_failed_trial_gets_its_mend(name, said, status, mend):
    output = f"Traceback (most recent call last):\n  File ...\n{said}\n"
    finding = trying.judge(TRIAL[name], Outcome(None, output, 1.0), 60)
    assert (finding.status, mend in str(finding.mend)) == (status, True), finding
    assert said.startswith(finding.detail) or finding.status == "note"


def test_every_trial_has_a_failure_above_and_a_body():
    assert {name for name, *_ in FAILURES} == set(TRIAL) == set(trials.TRIALS)


def test_a_late_trial_says_so():
    finding = trying.judge(TRIAL["gloo"], Outcome(None, "", 5.0, late=True), 5)
    assert (finding.status, finding.detail) == ("fault", "not done after 5 s")
    assert "export GLOO_SOCKET_IFNAME=lo" in finding.mend


def test_missing_data_are_no_fault():
    finding = trying.judge(TRIAL["data"], Outcome({"detail": "no CIFAR-10", "found": False}, "", 1.0), 60)
    assert finding.status == "warn"
    assert "data.root=FOLDER" in finding.mend


def test_the_cupy_of_torchs_cuda_is_named():
    def run(name, limit_s):
        if name == "torch":
            return Outcome(GPU_TORCH, "", 0.1)
        return Outcome(None, "ModuleNotFoundError: No module named 'cupy'", 0.1)

    findings, _ = trying.try_all(60, lambda title: None, run)
    assert [f.mend for f in findings if f.name == "CuPy"] == ['pip install "moeflow[cuda13]"']


def test_gpu_trials_only_with_a_gpu():
    def run(name, limit_s):
        return Outcome(CPU_TORCH | {"found": True}, "", 0.1)

    titles = [finding.name for finding in trying.try_all(60, lambda title: None, run)[0]]
    assert "NCCL" not in titles
    assert "gloo" in titles


def test_nothing_more_is_tried_without_torch():
    tried = []

    def run(name, limit_s):
        tried.append(name)
        return Outcome(None, "ModuleNotFoundError: No module named 'torch'", 0.1)

    findings, torch = trying.try_all(60, lambda title: None, run)
    assert (tried, torch, [finding.status for finding in findings]) == (["torch"], None, ["fault"])


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = surroundings.check_outputs(tmp_path / "file" / "outputs")
    assert [(finding.status, "run.root=" in finding.mend) for finding in blocked] == [("fault", True)]
    fine = surroundings.check_outputs(tmp_path / "outputs")
    assert fine[0].status == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "the doctor left something behind"


def test_what_is_in_order_is_ok():
    looks = [
        machine.check_python((3, 12, 1), "/venv/bin/python", True),
        machine.check_cores(2, 2, None),
        machine.check_cores(2, 2, "2"),
        machine.check_memory(16 * GIB, 8 * GIB),
        machine.check_descriptors(resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        machine.check_descriptors(65536, 65536),
        machine.check_shm(GIB),
        machine.check_gpus(["H200"], None, GPU_TORCH)[0],
        packages.check_packages(["torch>=2.9"], {"torch": "2.13.0+cpu"}.get)[0],
        packages.check_packages(["torch>=2.9"], {"torch": "2.14.0rc1"}.get)[0],
        surroundings.check_interface("eth0", ["lo", "eth0"]),
        surroundings.check_hostname("box", "10.0.0.2"),
        surroundings.check_launcher_variables({}),
        surroundings.check_disk(20 * GIB),
    ]
    assert [finding for finding in looks if finding.status != "ok" or finding.mend] == []
    assert len(machine.check_gpus(["H200"], None, GPU_TORCH)) == 1
    assert packages.check_cupy_builds(["cupy-cuda12x"]) == []


def test_requirements_of_extras_that_nobody_runs_are_not_shown():
    requires = ["ruff; extra == 'dev'", "cupy-cuda12x; extra == 'cuda12'", "moeflow[hf]; extra == 'all'"]
    assert packages.check_packages(requires, {}.get) == []
    assert [f.name for f in packages.check_packages(requires, {"cupy-cuda12x": "14.2.0"}.get)] == ["cupy-cuda12x"]


def test_a_trial_runs_in_its_own_process_and_is_ended_in_time(monkeypatch, tmp_path):
    package = tmp_path / "slow_trials.py"
    package.write_text(
        "import sys, time\n"
        "if sys.argv[1] == 'good': print('noise'); print('trial-result {\"detail\": \"d\"}')\n"
        "elif sys.argv[1] == 'crash': print('trial-result {\"detail\": \"d\"}', flush=True); import os; os.abort()\n"
        "else: time.sleep(60)\n"
    )
    monkeypatch.setattr(trying, "MODULE", "slow_trials")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert trying.attempt("good", 30).result == {"detail": "d"}
    assert trying.attempt("crash", 30).result is None
    start = time.monotonic()
    outcome = trying.attempt("sleep", 1.5)
    assert (outcome.late, outcome.result) == (True, None)
    assert time.monotonic() - start < 15


def test_trials_do_not_see_a_launchers_variables(monkeypatch, tmp_path):
    (tmp_path / "rank_trials.py").write_text(
        "import os\nprint('trial-result {\"detail\": \"%s\"}' % ('RANK' in os.environ))\n"
    )
    monkeypatch.setattr(trying, "MODULE", "rank_trials")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    assert trying.attempt("any", 30).result == {"detail": "False"}


def test_the_report_names_faults_and_the_next_step():
    good, bad = Finding("a", "x", "ok", "fine"), Finding("b", "y", "fault", "broken", "do this")

    def text(findings):
        console = Console(record=True, width=60, file=open("/dev/null", "w"))  # noqa: SIM115
        report.print_report(findings, console)
        return console.export_text()

    assert "moeflow train +recipe=cifar_moe" in text([good])
    said = text([good, bad])
    assert re.search(r"fault +y +broken", said)
    assert "y: do this" in said
    assert "Training on CPU will not work: y" in said
    assert not report.works([good, bad])
    assert json.loads(report.as_json([good, bad]))["works"] is False


def test_a_bad_time_limit_is_named():
    for text in ("0", "-3", "soon", "inf", "nan"):
        with pytest.raises(ConfigError, match="--timeout"):
            doctor.main(["--timeout", text])


def test_sizes_are_readable():
    assert [size(n) for n in (12, 1536, 3 << 20, 5 << 30, 7 << 40)] == [
        "12 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "7.0 TiB",
    ]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_real_examination(cli, tmp_path):
    """On the machine that runs the tests, all that CPU training needs works, by real trials."""
    run = cli("doctor", "--json", "--timeout", "200", timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    findings = {finding["name"]: finding for finding in json.loads(run.stdout)["findings"]}
    for name in ("torch", "configuration", "MoE layer", "Accelerate", "gloo"):
        assert findings[name]["status"] == "ok", findings[name]
    assert "uneven all-to-all, 2 processes" in findings["gloo"]["detail"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.distributed
def test_a_real_fault_is_found_and_mended_by_what_it_says(monkeypatch):
    """An interface that does not exist: gloo itself fails, and the mend is to unset the variable."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    finding = trying.judge(TRIAL["gloo"], trying.attempt("gloo", 100), 100)
    assert (finding.status, finding.mend) == ("fault", "unset GLOO_SOCKET_IFNAME")
