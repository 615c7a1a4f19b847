"""Do jobs in several processes, and keep what is done, so that an interrupted run goes on."""

import hashlib
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.process import BaseProcess
from pathlib import Path

from training.evaluator import Job, Setup, run_job, weight_hashes

log = logging.getLogger("training.evaluate")
DATA = Path(__file__).parent / "data"
Results = dict[str, object]  # by the name of the job


class Partial:
    """Finished jobs on disk, one JSON line each below a first line that says what they are of."""

    def __init__(self, path: Path, about: Mapping[str, object]) -> None:
        """Results of something else are thrown away; so is a line that was not written whole."""
        self.path, self.about, self.results = path, about, Results()
        head = json.dumps(about, sort_keys=True)
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        if lines and lines[0] != head:
            log.info("%s is of another checkpoint or other data: begun again", path)
        elif lines:
            self.results = dict(_entries(lines[1:]))
            log.info("%s: %d jobs are done already", path, len(self.results))
        done = [json.dumps(entry) for entry in self.results.items()]
        path.write_text("\n".join([head, *done]) + "\n", encoding="utf-8")

    def add(self, name: str, result: object) -> None:
        self.results[name] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, result]) + "\n")


def _entries(lines: Sequence[str]) -> Iterator[tuple[str, object]]:
    for line in lines:
        try:
            name, result = json.loads(line)
        except ValueError:
            continue
        yield name, result


def about(setup: Setup) -> dict[str, object]:
    """What results depend on: checkpoint, judge, activations, and the maker of the items."""
    digest = hashlib.sha256()
    for path in sorted(each for each in DATA.rglob("*") if each.suffix not in (".pyc", ".md")):
        if path.is_file():
            digest.update(path.read_bytes())
    return {
        "files": weight_hashes(setup.folder),
        "through": setup.through,
        "device": setup.device,
        "activations": setup.activations,
        "data": digest.hexdigest(),
    }


def run_jobs(
    setup: Setup, jobs: Sequence[Job], processes: int, partial: Partial | None = None
) -> Results:
    """All results by name. With one process everything is done in this one.

    Raises RuntimeError when checkpoint or data are changed meanwhile: a process reads them when it
    needs them, so the results would be of two checkpoints under one name.
    """
    results = Results() if partial is None else partial.results
    begun = about(setup) if partial is None else partial.about
    todo = [job for job in jobs if job.name not in results]
    todo.sort(key=lambda job: -job.cost)
    start = time.monotonic()
    for count, (job, result) in enumerate(_run(setup, todo, processes), 1):
        if about(setup) != begun:
            raise RuntimeError(f"{setup.folder} or training/data changed during the evaluation")
        if partial is None:
            results[job.name] = result
        else:
            partial.add(job.name, result)
        spent = time.monotonic() - start
        log.info("%7.1f s  %d of %d  %s", spent, count, len(todo), job.name)
    return results


def _run(setup: Setup, jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, object]]:
    if processes == 1:
        for job in jobs:
            yield job, run_job(setup, job)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the workers when they load torch
    # Not forked: a process that has used threads is not safe to fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(run_job, setup, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """In a worker: end when the process that hands out the jobs does, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_outlive, args=(parent,), daemon=True).start()


def _outlive(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
