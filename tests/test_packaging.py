"""The wheel: what is in it, and that stock vLLM finds the plugin in it, away from this checkout."""

import configparser
import email.message
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import vtoken

SOURCE = Path(__file__).parents[1]
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
BUILT_OR_HIDDEN = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


def run(*command: str | Path, cwd: Path, **settings: str) -> str:
    """Run a command as a user would, away from the source tree and from what this run has set for Python."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env | settings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def pip(*arguments: str | Path, python: Path | str = sys.executable, cwd: Path) -> str:
    """No index: whatever is asked for is here, or the test fails."""
    return run(python, "-m", "pip", "--disable-pip-version-check", *arguments, "--no-index", cwd=cwd)


def build_wheel(source: Path, directory: Path) -> Path:
    """With the setuptools that is here, which has to be one that pyproject.toml allows."""
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--check-build-dependencies",
        "-w",
        directory,
        source,
        cwd=directory,
    )
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: building leaves its traces there, and what an earlier build left here is not found."""
    return Path(shutil.copytree(SOURCE, tmp_path_factory.mktemp("tree") / "vtoken", ignore=BUILT_OR_HIDDEN))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def described(wheel: Path) -> email.message.Message:
    info = f"vtoken-{vtoken.__version__}.dist-info"
    return Parser().parsestr(zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, tree: Path) -> None:
    info = f"vtoken-{vtoken.__version__}.dist-info"
    modules = {str(path.relative_to(tree)) for path in (tree / "vtoken").rglob("*") if path.is_file()}
    assert {"vtoken/__init__.py", "vtoken/kernels/gpu/__init__.py", "vtoken/vllm_plugin/plugin.py"} <= modules
    about = ["METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"]
    assert names(wheel) == modules | {f"{info}/{name}" for name in about}
    assert wheel.name == f"vtoken-{vtoken.__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    assert archive.read(f"{info}/licenses/LICENSE") == (SOURCE / "LICENSE").read_bytes()
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert {section: dict(entries[section]) for section in entries.sections()} == {
        "console_scripts": {"vtoken": "vtoken.cli:main"},
        "vllm.general_plugins": {"vtoken": "vtoken.vllm_plugin.plugin:register"},
        "vllm.endpoint_plugins": {"vtoken": "vtoken.vllm_plugin.endpoints:Endpoints"},
    }


def test_what_a_package_index_shows(wheel: Path) -> None:
    about = described(wheel)
    assert (about["Name"], about["Version"]) == ("vtoken", vtoken.__version__)
    assert about["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Summary"] == PROJECT["description"]
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().strip() == (SOURCE / "README.md").read_text().strip()
    assert set(about["Keywords"].split(",")) >= {"vllm", "kv-cache", "eviction"}
    assert "Operating System :: POSIX :: Linux" in about.get_all("Classifier", [])
    # Neither torch nor vLLM: either of two packages is vLLM, and naming one would install it over the other.
    required = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split("<")[0].split(">")[0] for line in required) == [
        "numba",
        "numpy",
        "pydantic",
        "rich",
        "typer",
    ]
    assert about.get_all("Provides-Extra") == ["demo", "bench", "dev"]


def test_the_sdist_builds_the_same_wheel(wheel: Path, tree: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("vtoken", "tests", "docs", "requirements", "benchmarks"):
        here = {str(path.relative_to(tree)) for path in (tree / folder).rglob("*") if path.is_file()}
        assert {name for name in files if name.startswith(f"{folder}/") and "." in name} == here
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"} <= files
    rebuilt = build_wheel(sdist, tmp_path)
    assert names(rebuilt) == names(wheel)


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has vLLM, and then the wheel: what is here of vtoken is not there."""
    root = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", root / "venv", cwd=root)
    python = root / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=root).strip())
    others = root / "others"
    others.mkdir()
    for path in Path(str(metadata.distribution("pip").locate_file(""))).iterdir():
        if "vtoken" not in path.name and path.suffix != ".pth":
            (others / path.name).symlink_to(path)
    (site / "others.pth").write_text(f"{others}\n")
    assert run(python, "-c", FIND_VTOKEN, cwd=root) == "None []\n"
    pip("install", wheel, python=python, cwd=root)  # with its dependencies, which vLLM's environment has to satisfy
    assert run(python, "-c", FIND_VTOKEN, cwd=root) == f"{site}/vtoken/__init__.py ['{vtoken.__version__}']\n"
    return python


FIND_VTOKEN = """
from importlib import metadata, util
found = util.find_spec("vtoken")
print(found and found.origin, [d.version for d in metadata.distributions() if d.metadata["Name"] == "vtoken"])
"""

STOCK_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

def run(options, eager=True):
    llm = LLM(
        sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=eager, block_size=32, max_model_len=256,
        num_gpu_blocks_override=17, kv_cache_memory_bytes=1 << 28, max_num_seqs=4,
        distributed_executor_backend="uni", additional_config=options,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": list(range(3, 203))}], params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    scheduler, worker = core.scheduler, core.model_executor.driver_worker.worker
    evicted = scheduler.vtoken.stats.tokens_evicted if hasattr(scheduler, "vtoken") else None
    return [answer.outputs[0].token_ids, evicted, type(scheduler).__module__, type(worker).__module__]

def loaded():
    return sorted(name for name in sys.modules if name.startswith("vtoken.vllm_plugin."))

said = [run({}), loaded()]
if len(sys.argv) > 2:
    options = {"vtoken": json.loads(sys.argv[2])}
    said += [run(options), sys.modules["vtoken"].__file__]
    try:
        run(options, eager=False)
    except ValueError as error:
        said += [str(error)]
print(json.dumps(said))
"""


def test_stock_vllm_finds_the_plugin_where_the_wheel_is_installed(
    elsewhere: Path, tiny_gqa: Path, tmp_path: Path
) -> None:
    """A user who never imports vtoken, first unconfigured, then configured; with no compiler on this machine."""
    (tmp_path / "lscpu").symlink_to(str(shutil.which("lscpu")))  # all that vLLM calls there
    settings = json.dumps({"policy": "streaming_llm", "budget": 64})
    arguments = (elsewhere, "-c", STOCK_VLLM, tiny_gqa)
    without = json.loads(run(*arguments, cwd=tmp_path, VLLM_PLUGINS="").splitlines()[-1])
    output = run(*arguments, settings, cwd=tmp_path, PATH=str(tmp_path), CXX="c++-of-nobody")
    stock, modules, evicting, file, refusal = json.loads(output.splitlines()[-1])
    assert stock[1:] == [None, "vllm.v1.core.sched.scheduler", "vllm.v1.worker.cpu_worker"]
    assert [stock, []] == without
    assert modules == ["vtoken.vllm_plugin.plugin", "vtoken.vllm_plugin.request_settings"]
    # A prompt of 200 goes to 63, to have room for the next query; 7 more come in, and each sends one away.
    assert evicting[1:] == [200 - 63 + 7, "vtoken.vllm_plugin.compat", "vtoken.vllm_plugin.compat"]
    assert len(stock[0]) == len(evicting[0]) == 8
    assert stock[0] != evicting[0]
    assert Path(file).is_relative_to(elsewhere.parents[1])
    assert "vtoken: vLLM's compilation calls the C++ compiler 'c++-of-nobody', which is not to be found;" in refusal


def test_the_command_is_installed(elsewhere: Path) -> None:
    output = run(elsewhere.parent / "vtoken", "--version", cwd=elsewhere.parents[2])
    assert output == f"vtoken {vtoken.__version__}\n"
