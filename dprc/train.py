"""One training run: from typed settings to a result file, through interruptions."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dprc import fingerprints, parallel
from dprc.arguments import complaint_of_delta
from dprc.checkpoints import Snapshot
from dprc.noise import Stream
from dprc.optimization import make_optimizer, make_scheduler
from dprc.privacy_card import privacy_facts, write_card
from dprc.privacy_target import check_target, make_engine
from dprc.processes import Job, OneProcess, Processes
from dprc.progress import Reporter, Reporters, TensorBoard
from dprc.provenance import code_record
from dprc.results import write_result
from dprc.run_folder import RunFolder, contents
from dprc.run_log import RunLog
from dprc.sampling import LogicalBatch
from dprc.saved_models import check_savable, save_model
from dprc.settings import RunSettings
from dprc.termination import Terminated, Termination
from dprc.updates import PlainUpdate, PrivateUpdate, Update
from dprc.workload import Workload, prepare_workload


def train(
    settings: RunSettings,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Train, evaluate on the test split and write the result.

    Args:
        settings: Of the run.
        folder: Gets settings.yaml, steps.csv, evaluations.csv, model/ and, last, metrics.json;
            checkpoints/ until then.
        resume: Go on from the last usable checkpoint, if it is of this run: same settings, data,
            model and code. The result is that of an uninterrupted run. Nothing is done where this
            run is finished.
        overwrite: Replace what is in the folder; with ``resume``, only where it is of another run
            or damaged.
        reporter: Hears how the run goes on.

    Returns:
        The metrics that metrics.json holds.

    Raises:
        PrivacyError: The run would break its guarantee.
        ValueError: A setting out of range; training diverged; the checkpoint is of another run, or
            none is usable.
        FileNotFoundError: Data or model are not prepared.
        FileExistsError: The folder holds a run, and neither resume nor overwrite is given.
        ImportError: output.tensorboard without the package.
        MemoryError: A physical batch does not fit.
        OSError: Something could not be written; checkpoints stay as they were.
        Terminated: SIGTERM came; a checkpoint is saved.

    Guarantee: of a private run, the trained parameters are (ε, δ)-private with the ε and δ of
        metrics.json (see PRIVACY.md beside the model), however often it was interrupted: a resumed
        run draws the same noise for the same samples of the same data. Checkpoints, and whatever
        is named ``nonprivate``, are not covered.
    """
    job = parallel.this_job()
    job.led(lambda: check_target(settings))
    told: Reporter = reporter or Reporters(())
    if settings.output.tensorboard and job.rank == 0:
        told = Reporters((told, TensorBoard(folder / "tensorboard")))
    place = RunFolder(folder, resume=resume, overwrite=overwrite, note_fn=told.noted)
    try:
        with ExitStack() as held:
            job.led(lambda: held.enter_context(place.exclusive()))
            metrics = job.led(lambda: place.finished_metrics(settings))
            return _train(settings, place, told, job) if metrics is None else metrics
    finally:
        told.finished()


def _train(settings: RunSettings, place: RunFolder, reporter: Reporter, job: Job) -> dict[str, Any]:
    about = fingerprints.of_settings(settings) | fingerprints.of_code()
    job.agree(about)
    # The code that runs is the one that was there at the start: later edits do not count.
    code_record("training")

    def continued(step: int | None) -> int | None:
        return step if step is not None and place.is_continued_by(step, about) else None

    step = job.led(lambda: continued(place.resumable_step()))
    workload = prepare_workload(settings)
    if settings.output.save_model:
        check_savable(workload.model)
    privacy, documents = settings.privacy, len(workload.train)
    complaint = None if privacy is None else complaint_of_delta(privacy.delta, documents)
    if complaint is not None:
        reporter.noted(f"warning: privacy.{complaint}")
    about |= contents(
        fingerprints.of_examples(workload.train, workload.test),
        fingerprints.of_model(workload.model),
    )
    job.agree(about)  # a unit that is elsewhere in another copy of the data could be drawn twice
    step = job.led(lambda: continued(step))
    processes = parallel.join(workload.model, settings.parallel.strategy)
    run = Run(settings, workload, processes=processes)
    with Termination() as termination, _own_generators(workload.model, settings.seed):
        if step is None:
            job.led(place.start_anew)
        else:
            run.restore(place.checkpoints.load(step))
        job.led(lambda: place.write_settings(settings))
        reporter.started(run.done, settings.training.steps)
        _loop(run, place, about, termination, reporter)
    return _finish(run, place)


class Run:
    """What changes from step to step: model, optimizer, schedule, engine, log.

    Args:
        settings: Of the run.
        workload: Its model is trained in place.
        make_update: Makes the update of an optimizer; from the settings when None.
        processes: Those that train the model together; None for this one alone.

    Attributes:
        log: Rows so far.
        update: How losses change the model.
    """

    def __init__(
        self,
        settings: RunSettings,
        workload: Workload,
        *,
        make_update: Callable[[torch.optim.Optimizer], Update] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.processes: Processes = processes or OneProcess()
        self.settings, self.workload, self.log = settings, workload, RunLog()
        workload.model.train()
        self._optimizer = make_optimizer(workload.model, settings.training)
        self._scheduler = make_scheduler(self._optimizer, settings.training)
        self.update = (make_update or self._update_of_settings)(self._optimizer)

    def _update_of_settings(self, optimizer: torch.optim.Optimizer) -> Update:
        training = self.settings.training
        # Derived, so that it cannot contradict the sampling rate.
        expected = training.sample_rate * len(self.workload.train)
        if self.settings.method is not None:
            model = self.workload.model
            engine = make_engine(
                model,
                optimizer,
                self.settings,
                expected_batch_size=expected,
                processes=self.processes,
            )
            return PrivateUpdate(engine)
        return PlainUpdate(
            optimizer,
            Stream((self.settings.seed, 0)),
            sample_rate=training.sample_rate,
            expected_batch_size=expected,
            processes=self.processes,
        )

    @property
    def done(self) -> int:
        """Number of steps taken."""
        return len(self.log.steps)

    def epsilon(self) -> float | None:
        """Return what the steps so far cost; None without privacy."""
        privacy = self.settings.privacy
        if privacy is None or not isinstance(self.update, PrivateUpdate):
            return None
        engine, delta = self.update.engine, privacy.delta
        return self.processes.led(lambda: engine.epsilon(delta))

    def batches(self) -> Iterator[LogicalBatch]:
        """Yield the logical batches that are left."""
        training = self.settings.training
        if self.done < training.steps:
            yield from self.update.loader(
                self.workload,
                steps=training.steps - self.done,
                max_physical_batch=training.max_physical_batch,
            )

    def take_step(self, logical_batch: LogicalBatch) -> None:
        """Train on one logical batch and log it.

        Raises:
            MemoryError: It does not fit.
            ValueError: Training diverged.
        """
        started, total, finite, seen = time.perf_counter(), 0.0, 0.0, 0
        rate = float(self._scheduler.get_last_lr()[0])
        if self.processes.world_size > 1:
            parallel.seed_dropout(self.settings.seed, step=self.done, rank=self.processes.rank)
        try:
            for batch in logical_batch:
                losses = self.workload.losses(batch)
                self.update.backward(losses)
                mine = losses.detach()[: len(logical_batch) - seen]  # the rest only keeps step
                counted, seen = mine[mine.isfinite()], seen + len(mine)
                total, finite = total + float(counted.sum()), finite + counted.numel()
            self.update.step()
        except (MemoryError, RuntimeError) as error:
            if _is_out_of_memory(error):
                raise MemoryError(
                    f"out of memory in step {self.done + 1} with training.max_physical_batch="
                    f"{self.settings.training.max_physical_batch}. Lower it (that changes no "
                    "sample and no noise) and go on with --resume"
                ) from error
            raise
        self._scheduler.step()
        total, finite = self.processes.summed((total, finite))
        mean = total / finite if finite else (math.nan if logical_batch.total else None)
        self.log.steps.append(
            {
                "step": self.done + 1,
                "learning_rate": rate,
                "nonprivate_batch_size": logical_batch.total,
                "nonprivate_mean_loss": mean,
                "nonprivate_seconds": round(time.perf_counter() - started, 4),
            }
        )
        if mean is not None and math.isnan(mean):
            self.check_finite()

    def check_finite(self) -> None:
        """Refuse a model that has become useless.

        Raises:
            ValueError: A trained parameter is not finite.
        """
        self.processes.rest()
        trained = [
            (name, parameter.to_local() if hasattr(parameter, "to_local") else parameter)
            for name, parameter in self.workload.model.named_parameters()
            if parameter.requires_grad
        ]
        broken = [not bool(parameter.detach().isfinite().all()) for _, parameter in trained]
        for (name, _), any_broken in zip(trained, self.processes.summed(broken), strict=True):
            if any_broken:
                raise ValueError(
                    f"training diverged: after step {self.done} {name} is not finite; lower "
                    "training.learning_rate"
                )

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model as it is, log and return the row; training does not notice."""
        with _own_generators(self.workload.model, self.settings.seed):
            # All evaluate, rather than wait for one; what one finds counts.
            metrics = self.processes.from_first(self.workload.evaluate())
        self.workload.model.train()
        row = {"step": self.done, "epsilon": self.epsilon(), **metrics}
        self.log.evaluations.append(row)
        return row

    def snapshot(self, about: Mapping[str, Any]) -> Snapshot:
        """Return all that a run needs to go on from here; whole, in process 0 alone."""
        model = self.workload.model
        self.processes.rest()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        lasting = model.state_dict().keys()  # other buffers are made with the model
        buffers = {n: b.clone() for n, b in model.named_buffers() if n in lasting}
        return Snapshot(
            step=self.done,
            about=dict(about),
            log=self.log,
            parameters={n: self.processes.whole(p) for n, p in (trained | buffers).items()},
            state={
                "optimizer": tree_map(self.processes.whole, self._optimizer.state_dict()),
                "scheduler": self._scheduler.state_dict(),
                "update": self.update.state_dict(),
                "generators": _generator_states(model),
            },
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot of the same run; this one has taken no step."""
        model, state = self.workload.model, snapshot.state
        places = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, value in snapshot.parameters.items():
                places[name].copy_(self.processes.own(value, places[name]))
            known = [p for group in self._optimizer.param_groups for p in group["params"]]
            for index, kept in state["optimizer"]["state"].items():
                for name, value in kept.items():
                    if isinstance(value, torch.Tensor) and value.shape == known[index].shape:
                        kept[name] = self.processes.own(value, known[index])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self.update.load_state_dict(state["update"])
        _set_generator_states(model, state["generators"])
        self.log = snapshot.log


def _loop(
    run: Run,
    place: RunFolder,
    about: Mapping[str, Any],
    termination: Termination,
    reporter: Reporter,
) -> None:
    """Take the steps that are left; save and evaluate between them where it is due."""
    output, steps, processes = run.settings.output, run.settings.training.steps, run.processes
    log_every = output.log_every or max(1, steps // 10)
    saved = run.done

    def is_due(every: int | None) -> bool:
        return every is not None and (run.done % every == 0 or run.done == steps)

    def save() -> None:
        nonlocal saved
        if saved != run.done:
            snapshot = run.snapshot(about)
            processes.led(lambda: place.checkpoints.save(snapshot))
            processes.led(lambda: place.write_log(run.log))
            saved = run.done

    def evaluate() -> None:
        due = run.done == steps or (run.done > 0 and is_due(output.evaluate_every))
        if due and not run.log.evaluated(run.done):
            alone = processes.world_size == 1
            if not alone and run.done > 0:
                save()  # nobody can leave the others in the middle of what follows
            # It can be repeated and may take long, so it does not hold up a request to stop.
            with termination.at_once() if alone else nullcontext():
                row = run.evaluate()
            reporter.evaluated(row, run.workload.main_metric)

    try:
        evaluate()  # the one that an interruption may have left out
        for logical_batch in run.batches():
            run.take_step(logical_batch)
            log = is_due(log_every)
            reporter.stepped(run.log.steps[-1], log=log, epsilon=run.epsilon() if log else None)
            if is_due(output.checkpoint_every):
                save()
            if processes.summed([termination.requested])[0]:  # stopped by all after the same step
                raise Terminated
            evaluate()
    except Terminated as stop:
        save()
        stop.step = run.done
        raise


def _finish(run: Run, place: RunFolder) -> dict[str, Any]:
    """Write the results of a run whose steps are all taken; metrics.json comes last."""
    settings, workload, log, job = run.settings, run.workload, run.log, run.processes
    run.check_finite()
    losses = [row["nonprivate_mean_loss"] for row in log.steps]
    if any(loss is not None and math.isnan(loss) for loss in losses[-1:]):
        raise ValueError("training diverged: the last loss is not finite; lower learning_rate")
    evaluation = {k: v for k, v in log.evaluations[-1].items() if k not in ("step", "epsilon")}
    metrics = {
        **evaluation,
        "train_documents": len(workload.train),
        "test_documents": len(workload.test),
        "trained_parameters": sum(
            p.numel() for p in workload.model.parameters() if p.requires_grad
        ),
        "steps": run.done,
        "train_seconds": log.total("nonprivate_seconds"),
    }
    facts = None
    if settings.privacy is not None and isinstance(run.update, PrivateUpdate):
        engine = run.update.engine
        drawn = log.total("nonprivate_batch_size")
        metrics["nonprivate_clipped_fraction"] = engine.clipped_samples / max(drawn, 1)
        target = settings.privacy
        facts = job.led(
            lambda: privacy_facts(engine, delta=target.delta, epsilon_target=target.epsilon)
        )
        engine.detach()
    model = None
    if settings.output.save_model:
        model = parallel.whole_model(workload.model, job, settings)

    def write() -> None:
        place.write_log(log)
        with place.writing("the results"):
            if model is not None:
                save_model(model, workload.tokenizer, place.model)
                write_card(place.model, facts)
            write_result(
                place.metrics,
                config=settings.model_dump(),
                metrics=metrics,
                privacy=facts,
                device=_device_in_words(workload.model),
                processes=job.world_size,
                made_by="training",
            )
        if not settings.output.keep_checkpoints:
            place.checkpoints.remove()

    job.led(write)
    return metrics


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's allocator on a CPU raises a plain RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        "allocate memory" in str(error)
    )


# --- torch's global generators: dropout draws from them -----------------------------------------


def _gpus(model: nn.Module) -> list[torch.device]:
    found = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(found, key=lambda device: device.index or 0)


@contextmanager
def _own_generators(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's generators, and give them back as they were."""
    with torch.random.fork_rng(devices=_gpus(model)):
        torch.manual_seed(seed)
        yield


def _generator_states(model: nn.Module) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus(model))]


def _set_generator_states(model: nn.Module, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for gpu, state in zip(_gpus(model), states[1:], strict=True):
        torch.cuda.set_rng_state(state, gpu)


def _device_in_words(model: nn.Module) -> str:
    gpus = _gpus(model)
    return torch.cuda.get_device_name(gpus[0]) if gpus else "cpu"
