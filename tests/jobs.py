"""A job of several processes that is started once and then asked again and again."""

import multiprocessing
import traceback
from contextlib import contextmanager
from datetime import timedelta

import torch

SECONDS = 300  # for one question, on a machine that has much else to do


def _serve(rank, world_size, meeting, pipe):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    pipe.send("ready")
    while True:
        question = pipe.recv()
        if question is None:
            break
        ask_fn, arguments = question
        try:
            pipe.send((ask_fn(*arguments), None))
        except Exception as error:
            # Without its traceback, which may not be sent; with it for whoever reads the output.
            traceback.print_exc()
            pipe.send((None, (type(error).__name__, str(error))))
    torch.distributed.destroy_process_group()


class Job:
    """Processes that each answer the same question.

    Args:
        world_size: How many.
        folder: Where they meet.
    """

    def __init__(self, world_size, folder):
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            mine, its = context.Pipe()
            arguments = (rank, world_size, str(folder / "meeting"), its)
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._processes[-1].start()
            self._pipes.append(mine)
        for pipe in self._pipes:
            assert pipe.poll(SECONDS), "a process did not start"
            pipe.recv()

    def ask(self, ask_fn, *arguments):
        """Give what the processes return, by rank; all must."""
        answers = self._ask(ask_fn, arguments)
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"process {rank}: {error[0]}: {error[1]}"
        return [value for value, _ in answers]

    def refusals(self, ask_fn, *arguments):
        """Give the error messages of the processes, by rank; all must refuse with PrivacyError."""
        answers = self._ask(ask_fn, arguments)
        for rank, (value, error) in enumerate(answers):
            assert error is not None, f"process {rank} accepted: {value}"
            assert error[0] == "PrivacyError", f"process {rank}: {error}"
        return [error[1] for _, error in answers]

    def _ask(self, ask_fn, arguments):
        for pipe in self._pipes:
            pipe.send((ask_fn, arguments))
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                self.kill()
                raise AssertionError(f"process {rank} did not answer {ask_fn.__name__}")
        return [pipe.recv() for pipe in self._pipes]

    def stop(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(SECONDS)
        self.kill()

    def kill(self):
        for process in self._processes:
            process.kill()


@contextmanager
def job_of(world_size, folder):
    job = Job(world_size, folder)
    try:
        yield job
    finally:
        job.stop()


@contextmanager
def alone_in_a_job(backend, folder):
    """Let this process be a job of one."""
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/alone", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
