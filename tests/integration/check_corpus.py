"""Run the corpus under a library for itself, to know that the scripts are right: ``python tests/integration/check_corpus.py``.

In an environment with Accelerate this shows that each script works as its author meant it, and where Accelerate's numbers
are not those of plain PyTorch. It is no test of Drivetrain: `test_accelerate_scripts.py` is.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from corpus import SCRIPTS, namespace, result_of, source
from corpus_reference import expected

EXTRA = {
    "experiment_tracking": ["--with_tracking", "--project_dir", "runs"],
    "image_classification_resume": ["--checkpointing_steps", "29", "--output_dir", "runs"],
}

# Known differences of Accelerate 1.15 from plain PyTorch, by script and key.
KNOWN = {
    ("nlp_classification", 2): "the scheduler steps once per process; rows of the last batch are repeated",
    ("gradient_accumulation", 1): "the last, shorter window is divided by the full number of steps",
    ("gradient_accumulation", 2): "as above, and the scheduler steps once per process",
    ("trainer_class", 1): "the last, shorter window is divided by the full number of steps",
    ("mixed_precision_options", 2): "half-precision rounding differs between the two batch splits",
}


def run(name, library, processes, folder):
    script = Path(folder) / f"{name}.py"
    script.write_text(source(name, library))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(script), "--cpu", *EXTRA.get(name, [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=180)
    if done.returncode:
        raise SystemExit(f"{name} failed with {processes} processes:\n{done.stderr[-3000:]}")
    return result_of(done.stdout)


def close(a, b, rel=2e-4):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=rel, abs_tol=1e-6)
    return a == b


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", default="accelerate")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS, choices=SCRIPTS)
    args = parser.parse_args()
    unexpected = 0
    for name in args.scripts:
        for n in args.processes:
            with tempfile.TemporaryDirectory() as folder:
                found = run(name, args.library, n, folder)
            wanted = expected(name, namespace(name, args.library), n, found)
            differs = [key for key, value in wanted.items() if not close(value, found[key])]
            known = KNOWN.get((name, n)) if args.library == "accelerate" else None
            unexpected += bool(differs) and known is None
            verdict = "equal" if not differs else f"differs in {', '.join(differs)} ({known or 'NOT EXPECTED'})"
            print(f"{name:28} {n} process(es): {verdict}", flush=True)
            for key in differs if known is None else []:
                print(f"    {key}: plain PyTorch {wanted[key]}, {args.library} {found[key]}")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
