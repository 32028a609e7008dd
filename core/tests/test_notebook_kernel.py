"""notebook_launcher in a real kernel: output, values, failures, interrupts, and a kernel that stays usable."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from drivetrain.testing.launching import marked_processes

client = pytest.importorskip("jupyter_client")


class Kernel:
    """A kernel, and what its cells show."""

    def __init__(self):
        self.manager, self.client = client.manager.start_new_kernel(kernel_name="python3")

    def start(self, code):
        return self.client.execute(code)

    def finish(self, message, seconds=90):
        """What the cell printed, its value as text, and its error as shown."""
        printed, value, error = "", "", ""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if found["parent_header"].get("msg_id") != message:
                continue
            kind, content = found["msg_type"], found["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_result":
                value = content["data"]["text/plain"]
            elif kind == "error":
                error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, value, error
        raise TimeoutError(printed)

    def run(self, code):
        return self.finish(self.start(code))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(
        "import os\nos.environ['MARK'] = 'notebook-kernel'\nfrom drivetrain import notebook_launcher, debug_launcher"
    )
    yield kernel
    kernel.close()


TRAIN = """
scale = 3
def train(x):
    import os
    def inner(y):
        return y * scale
    print("hello from", os.environ["RANK"])
    return inner(x) + int(os.environ["RANK"])
"""


def test_a_function_of_a_cell_runs_on_ranks_whose_lines_are_labelled_twice_in_a_row(kernel):
    kernel.run(TRAIN)
    for _ in range(2):
        printed, value, error = kernel.run("notebook_launcher(train, (5,), num_processes=2, returns='all')")
        assert (value, error) == ("[15, 16]", "")
        assert sorted(printed.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert kernel.run("notebook_launcher(train, (5,), num_processes=2)")[1] == "15"


def test_lambdas_labels_of_ones_own_and_the_cpu(kernel):
    code = "debug_launcher(lambda: (print('x'), os.environ['DRIVETRAIN_CPU'])[1], num_processes=2)"
    printed, value, _ = kernel.run(code)
    assert value == "'true'"
    assert sorted(printed.splitlines()) == ["[rank 0] x", "[rank 1] x"]
    code = "notebook_launcher(lambda: print('x'), num_processes=2, log_line_prefix_template='<${role_name} ${local_rank}> ')"
    assert sorted(kernel.run(code)[0].splitlines()) == ["<default 0> x", "<default 1> x"]


def test_a_kernel_that_has_used_torch_is_no_obstacle(kernel):
    code = (
        "import torch\n"
        "(torch.randn(300, 300) @ torch.randn(300, 300)).sum()\n"
        "def work():\n"
        "    import torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    dist.destroy_process_group()\n"
        "    return x.item()\n"
        "notebook_launcher(work, num_processes=2)"
    )
    assert kernel.run(code)[1:] == ("2.0", "")


def test_a_failing_ranks_traceback_is_shown_and_the_kernel_goes_on(kernel):
    code = (
        "def fail():\n"
        "    import os, time\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('planted')\n"
        "    time.sleep(60)\n"
        "notebook_launcher(fail, num_processes=2)"
    )
    _, _, error = kernel.run(code)
    assert "LaunchError" in error
    assert "raise ValueError('planted')" in error  # the line of the cell
    assert "rank 1 of 2 failed with exit code 1" in error
    assert kernel.run("1 + 1")[1] == "2"
    assert marked_processes("notebook-kernel", within=5) == []


def test_an_interrupt_ends_the_ranks_and_the_kernel_goes_on(kernel):
    message = kernel.start("import time\nnotebook_launcher(lambda: (print('up'), time.sleep(60)), num_processes=2)")
    deadline = time.monotonic() + 30
    while len(marked_processes("notebook-kernel")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    _, _, error = kernel.finish(message)
    assert "KeyboardInterrupt" in error
    assert kernel.run("2 + 2")[1] == "4"
    assert marked_processes("notebook-kernel", within=10) == []


def test_progress_bars_stay_on_their_lines(kernel):
    code = (
        "def bar():\n"
        "    from drivetrain.utils import tqdm\n"
        "    for _ in tqdm(range(3), desc='epoch'):\n"
        "        pass\n"
        "notebook_launcher(bar, num_processes=2)"
    )
    printed, _, error = kernel.run(code)
    assert error == ""
    assert re.search(r"\[rank 0\] epoch: 100%", printed)
    assert "[rank 1]" not in printed  # one bar, that of the main process


def test_plain_ipython():
    code = (
        "from drivetrain import notebook_launcher\nprint(notebook_launcher(lambda: 7, num_processes=2, returns='all'))"
    )
    result = subprocess.run([sys.executable, "-m", "IPython", "-c", code], capture_output=True, text=True, timeout=90)
    assert result.stdout.splitlines()[-1] == "[7, 7]", result.stderr
