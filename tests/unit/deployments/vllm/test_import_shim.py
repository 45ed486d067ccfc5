"""The import hook for torch's media packages, in processes of its own with stand-ins for the packages.

The stand-ins fail as the CUDA builds fail beside a CPU-only torch; healthy ones must not be touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.resolve import PROJECT_ROOT
from deployments.vllm import import_shim

# Asks the dispatcher for an operator's schema at import, as torchvision does when it registers its meta functions.
BROKEN_TORCHVISION = """
import torch
from torchvision import _meta
ready = True
"""
BROKEN_META = """
import torch
@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold):
    return dets
"""
NEEDS_A_LIBRARY = """
loaded = "before"
raise OSError("Could not load this library: /somewhere/_lib.so")
"""


def write(folder: Path, **packages: str) -> Path:
    """Packages by name; `name__module` is a module in one."""
    for name, source in packages.items():
        package, _, module = name.partition("__")
        (folder / package).mkdir(exist_ok=True)
        (folder / package / f"{module or '__init__'}.py").write_text(source)
    return folder


def run(program: str, *, site: Path, shim_on_path: bool = False) -> subprocess.CompletedProcess[str]:
    path = [str(site), str(PROJECT_ROOT)]
    if shim_on_path:
        path.insert(0, str(import_shim.FOLDER))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=site, env=environment, capture_output=True, text=True, check=False
    )


def told(program: str, *, site: Path, shim_on_path: bool = False) -> str:
    done = run(program, site=site, shim_on_path=shim_on_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ACTIVATE = "from deployments.vllm import import_shim; import_shim.activate(); "


def test_the_stand_in_fails_as_the_real_one_does(tmp_path: Path) -> None:
    """Without the hook; else the tests below would prove nothing."""
    site = write(tmp_path, torchvision=BROKEN_TORCHVISION, torchvision___meta=BROKEN_META)
    done = run("import torchvision", site=site)
    assert done.returncode != 0
    assert "operator torchvision::nms does not exist" in done.stderr


def test_a_broken_torchvision_can_be_imported(tmp_path: Path) -> None:
    site = write(tmp_path, torchvision=BROKEN_TORCHVISION, torchvision___meta=BROKEN_META)
    for program, on_path in (
        (ACTIVATE + "import torchvision; print(torchvision.ready)", False),
        (ACTIVATE * 2 + "import torchvision; print(torchvision.ready)", True),
        ("import torchvision; print(torchvision.ready)", True),
    ):
        assert told(program, site=site, shim_on_path=on_path) == "True"


def test_processes_started_from_here_have_the_hook_too(tmp_path: Path) -> None:
    """vLLM starts its engine in a process of its own."""
    site = write(tmp_path, torchvision=BROKEN_TORCHVISION, torchvision___meta=BROKEN_META)
    inner = "import torchvision; print(torchvision.ready)"
    program = ACTIVATE + f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    assert told(program, site=site) == "True"


def test_activating_twice_changes_nothing_more(tmp_path: Path) -> None:
    count = "import os, sys; print(os.environ['PYTHONPATH'].count('import_shim'), len(sys.meta_path))"
    assert told(ACTIVATE + count, site=tmp_path) == told(ACTIVATE * 3 + count, site=tmp_path)


def test_the_sites_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    """The hook's `sitecustomize` comes first on PYTHONPATH and must not shadow a company's own (certificates)."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = str(int(os.environ.get('OWN', 0)) + 1)")
    show = "import os; print(os.environ.get('OWN'))"
    assert told(show, site=tmp_path, shim_on_path=True) == "1"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}], check=True)"
    assert told(ACTIVATE + inner, site=tmp_path) == "2", "once here, once in the process started from here"


def test_a_healthy_torchvision_is_untouched(tmp_path: Path) -> None:
    """It runs once, with its own spec, and no operator is defined for it."""
    site = write(tmp_path, torchvision="runs = globals().get('runs', 0) + 1")
    program = (
        ACTIVATE
        + "import torch, torchvision; "
        + "print(torchvision.runs, torchvision.__file__, hasattr(torch.ops.torchvision, 'nms'))"
    )
    assert told(program, site=site) == f"1 {site / 'torchvision' / '__init__.py'} False"


def test_what_torchvision_defines_itself_is_not_defined_twice(tmp_path: Path) -> None:
    source = """
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
    site = write(tmp_path, torchvision=source)
    program = ACTIVATE + "import torch, torchvision; print(torch.ops.torchvision.nms.default)"
    assert told(program, site=site) == "torchvision.nms.default"


@pytest.mark.parametrize("error", ["RuntimeError('operator other::op does not exist')", "ValueError('torchvision::')"])
def test_other_failures_of_torchvision_stay_failures(tmp_path: Path, error: str) -> None:
    site = write(tmp_path, torchvision=f"raise {error}")
    done = run(ACTIVATE + "import torchvision", site=site)
    assert done.returncode != 0
    assert error.split("(")[0] in done.stderr


def test_torchaudio_without_its_library_is_there_without_its_operators(tmp_path: Path) -> None:
    """transformers imports it unguarded."""
    site = write(tmp_path, torchaudio=NEEDS_A_LIBRARY)
    assert told(ACTIVATE + "import torchaudio; print(torchaudio.loaded)", site=site) == "before"


def test_torchcodec_without_its_library_is_not_installed(tmp_path: Path) -> None:
    """Who imports it takes an ImportError for an answer, and nothing else."""
    site = write(tmp_path, torchcodec=NEEDS_A_LIBRARY)
    program = ACTIVATE + "\ntry:\n import torchcodec\nexcept ImportError as error:\n print('missing', error)"
    assert told(program, site=site) == "missing Could not load this library: /somewhere/_lib.so"


@pytest.mark.parametrize("package", ["torchvision", "torchaudio", "torchcodec"])
def test_a_package_that_is_not_installed_stays_so(tmp_path: Path, package: str) -> None:
    program = (
        ACTIVATE
        + "import sys, importlib.util as util; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
        + f"print(util.find_spec('{package}'))"
    )
    assert told(program, site=tmp_path) == "None"


def test_other_packages_pass_by(tmp_path: Path) -> None:
    site = write(tmp_path, torchvisionary="raise RuntimeError('torchvision::nms')")
    done = run(ACTIVATE + "import torchvisionary", site=site)
    assert "RuntimeError: torchvision::nms" in done.stderr


def test_the_hook_itself_imports_nothing_heavy(tmp_path: Path) -> None:
    """It runs in every process that Python starts."""
    program = "import sys; print([name for name in ('torch', 'numpy', 'ray', 'vllm') if name in sys.modules])"
    assert told(program, site=tmp_path, shim_on_path=True) == "[]"
