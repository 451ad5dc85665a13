"""The notebook in examples/ runs from its first cell to its last, and a kernel survives an interrupted training."""

import sys
import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
SLOW = "import falconet as fn\nrun = fn.train(data='digits', epoch=10_000, run_dir='r')"


class OwnKernel(KernelManager):
    """The kernel of this environment, whether or not Jupyter knows it."""

    @property
    def kernel_spec(self):
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
        )


@pytest.fixture
def kernel_environment(monkeypatch, tmp_path):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def texts(cell):
    outputs = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return "".join(outputs)


@pytest.mark.run
@pytest.mark.filterwarnings("default")
def test_the_notebook_runs(kernel_environment):
    notebook = nbformat.read(EXAMPLES / "digits.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs of a notebook are not committed"
    client = NotebookClient(
        notebook, timeout=300, kernel_manager_class=OwnKernel, resources={"metadata": {"path": str(kernel_environment)}}
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "best 9" in texts(cells[0])
    assert "of 360 images" in texts(cells[-2])


def answer(client, request):
    """The kernel's answer to one request, whatever else it answers before."""
    while True:
        message = client.get_shell_msg(timeout=120)
        if message["parent_header"].get("msg_id") == request:
            return message["content"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_an_interrupted_cell_saves_the_run_and_the_kernel_goes_on(kernel_environment):
    manager = OwnKernel()
    manager.start_kernel(cwd=str(kernel_environment))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        slow = client.execute(SLOW)
        saved = kernel_environment / "r/checkpoints"
        deadline = time.monotonic() + 120
        while not (saved.is_dir() and list(saved.glob("resnet*"))):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        manager.interrupt_kernel()
        stopped = answer(client, slow)
        assert (stopped["status"], stopped.get("ename")) == ("error", "KeyboardInterrupt")
        again = client.execute(
            "print('loss', fn.Run('r').metrics[-1]['train/loss'])\nfn.train(data='digits', epoch=1, run_dir='s')"
        )
        assert answer(client, again)["status"] == "ok"
        assert (kernel_environment / "s/summary.json").exists()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
