"""The worker's part: what is kept at sleep, put back at wake-up, and made right after a weight transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from . import diagnosis, seams, staging
from .base_view import checkpoint_name
from .lifecycle import State, Transfer
from .runner import LoRAReloadModelRunner
from .session import WorkerState

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what its own loggers say


class LoRAReloadWorker:
    """Mixed in before the class of a worker whose engine has LoRA enabled."""

    model_runner: Any
    vllm_config: Any
    lora_reload: WorkerState
    _in_own_call = False  # something that unmaps or maps the pool is under way
    _stop_watching: Callable[[], None] | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        seams.extend(self.model_runner, LoRAReloadModelRunner)
        with seams.loading_observed(self.model_runner.watch_first_load, self.model_runner.watch_processing):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.lora_reload = self.model_runner.lora_reload
        self.lora_reload.started()
        self._stop_watching = seams.pool_watched(self.vllm_config, self._unmapping, self._mapped)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        done = super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]
        if self.lora_reload.keeper is not None:
            self.lora_reload.keeper.started()
        return done

    def sleep(self, level: int = 1) -> None:
        state = self.lora_reload
        self._end_transfer(level)
        try:
            state.save(level)
            with self._own_call(), seams.unmapping_noticed(self.vllm_config) as begun:
                try:
                    super().sleep(level)  # type: ignore[misc]
                except BaseException as error:  # vLLM asserts at the end that others have not taken what was freed
                    if begun():
                        state.slept(level, error)
                        state.lifecycle.cache_slept(level)
                    raise
            state.slept(level)
            state.lifecycle.cache_slept(level)
        finally:
            state.settle()

    def _end_transfer(self, level: int) -> None:
        """An open session ends: its layers may be on the meta device, and what it has buffered in memory that goes."""
        lifecycle = self.lora_reload.lifecycle
        if not level or lifecycle.transfer is None or lifecycle.asleep:
            return
        if lifecycle.transfer is Transfer.DRAFT and (draft := seams.draft_model(self)) is not None:
            seams.abort_layerwise_reload(draft)
        self.lora_reload.end_transfer(f"sleep(level={level})")
        seams.close_weight_update(self)

    @contextmanager
    def _own_call(self) -> Iterator[None]:
        self._in_own_call = True
        try:
            yield
        finally:
            self._in_own_call = False

    @contextmanager
    def _unmapping(self, level: int, pools: set[str]) -> Iterator[None]:
        """Around what unmaps memory: not through `sleep` if a framework drives the allocator itself."""
        state = self.lora_reload
        if not self._in_own_call and "kv_cache" in pools:
            state.lifecycle.cache_slept(level)
        if self._in_own_call or state.lifecycle.asleep or "weights" not in pools:
            yield
            return
        self._end_transfer(level)
        try:
            state.save(level)
            if level >= 2:
                state.save_buffers()
            try:
                with self._own_call():
                    yield
            except BaseException as error:
                state.slept(level, error)
                raise
            state.slept(level)
        finally:
            state.settle()

    def _mapped(self, pools: set[str]) -> None:
        """Memory is mapped again; by `wake_up`, which then goes on, or not."""
        state = self.lora_reload
        if not self._in_own_call and "kv_cache" in pools:
            state.lifecycle.cache_woke()
        if not self._in_own_call and "weights" in pools and state.lifecycle.asleep:
            seams.take_saved_buffers(self)
            state.mapped(self.model_runner.reset_lora_state)
            state.settle()

    def wake_up(self, tags: list[str] | None = None) -> None:
        state = self.lora_reload
        weights = tags is None or "weights" in tags
        try:
            with self._own_call():
                super().wake_up(tags)  # type: ignore[misc]
            if tags is None or "kv_cache" in tags:
                state.lifecycle.cache_woke()
        except Exception:  # a trainer has the memory still, say
            if weights:
                state.absent()
            raise
        if weights and not state.lifecycle.asleep:
            state.absent()  # the last wake-up failed on another rank, say
        elif weights:
            discarded = state.lifecycle.state is State.DISCARDED
            state.woke(self.model_runner.reset_lora_state)
            if state.restore(discarded, by_itself=state.settings.on_missing == "reload"):
                state.has_to_load = True
                try:
                    self.model_runner.reload_weights()
                except Exception:
                    # vLLM's executor has to learn that the memory is mapped; requests are told what happened.
                    logger.exception("The checkpoint could not be loaded at wake-up")
                finally:
                    state.has_to_load = False
            state.settle()

    def shutdown(self) -> None:
        state = vars(self).get("lora_reload")  # not there if the model could not be loaded
        if state is not None:
            if self._stop_watching is not None:
                self._stop_watching()
            if state.keeper is not None:
                state.keeper.close()
            state.ring.close()
        super().shutdown()  # type: ignore[misc]

    def lora_reload_status(self) -> dict[str, Any]:
        """For ``collective_rpc``: how this rank stands.

        Returns:
            ``state``; ``error``, what every request is told now, or None; ``waits``, whether that is only a sleep at
            level 1, which loses nothing; ``depth`` of that error, see
            `Lifecycle.depth`; ``apart``, what requests are told that do not queue, or None, see `WorkerState.apart`;
            ``adapters``, what requests for an adapter are told, by id;
            ``snapshot``, see `lora_reload_take_snapshot`, or None without ``snapshot_dir``;
            ``replay``, see `LoadPlan.state`, or None where it is switched off;
            ``last_restore``, how this package brought the base weights back after level 2, or None: ``source``
            (``snapshot`` or ``checkpoint``), ``bytes``, ``seconds``, and ``verify_seconds`` of these; ``ring_bytes``,
            pinned now.
        """
        state = self.lora_reload
        return {
            "state": state.lifecycle.state.value,
            "error": state.lifecycle.error(),
            "depth": state.lifecycle.depth,
            "apart": state.apart(),
            "waits": state.lifecycle.waits,
            "adapters": {str(number): why for number, why in state.adapters.broken.items()},
            "snapshot": state.keeper.state() if state.keeper is not None else None,
            "replay": state.plan.state() if state.plan is not None else None,
            "last_restore": state.last_restore,
            "ring_bytes": state.ring.nbytes,
        }

    def lora_reload_take_snapshot(self) -> dict[str, Any]:
        """For ``collective_rpc``: have this rank's base weights in a snapshot as they are now, and wait for the disk.

        Returns:
            ``state`` (``valid``, ``none``, or ``writing`` if another engine is), ``path`` of the file, its ``bytes``,
            ``seconds`` that writing took (None if one was there), ``reason`` why there is none.
        """
        keeper = self.lora_reload.keeper
        if keeper is None:
            reason = "the setting snapshot_dir is empty"
            return {"state": "none", "path": "", "bytes": 0, "seconds": None, "reason": reason}
        return keeper.take()

    def lora_reload_free_buffers(self) -> int:
        """For ``collective_rpc``: give the pinned buffers back; the next restore takes new ones.

        Returns:
            Bytes freed.
        """
        ring = self.lora_reload.ring
        nbytes = ring.nbytes
        ring.close()
        return nbytes

    def lora_reload_adapters(self) -> dict[str, dict[str, int]]:
        """For ``collective_rpc``: ``lora_int_id`` and ``version`` of every adapter that is known, by name."""
        return self.lora_reload.adapters.known()

    def lora_reload_adapter(self, name: str) -> dict[str, int | None]:
        """For ``collective_rpc``: of one adapter ``lora_int_id``, None if it is not known, and ``version``.

        ``free`` is an id that no adapter of this engine has or had.
        """
        adapters = self.lora_reload.adapters
        known = adapters.known(name)
        return {"lora_int_id": None, "version": 0, **known.get(name, {}), "free": adapters.free_number()}

    def lora_reload_admit(self, lora_request: Any, live: list[int]) -> dict[str, Any]:
        """For ``collective_rpc``: have the adapter of a request in host memory, so that no step has to look for it.

        Args:
            lora_request: the ``LoRARequest``.
            live: ids of the adapters of all requests in the engine. These stay at hand, also when they are removed.

        Returns:
            ``why`` it cannot be had, or None; ``changed``, whether it is there, but the request wants its files read
            again and they are not those that were read; ``held``, ids of all adapters that stay at hand until the next
            call.
        """
        adapters, why, changed = self.lora_reload.adapters, None, False
        try:
            changed = adapters.admit(lora_request, live)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        return {"why": why, "changed": changed, "held": adapters.held()}

    def lora_reload_stage_adapter(
        self,
        token: str,
        name: str,
        lora_int_id: int,
        folder: str,
        lasting: bool = False,
        files: dict[str, bytes] | None = None,
    ) -> str | None:
        """For ``collective_rpc``: read and check new weights of an adapter; nothing that serves changes.

        Args:
            token: any string; `lora_reload_commit_adapter` of the same one swaps the weights in.
            name: name of the adapter.
            lora_int_id: its id.
            folder: a PEFT folder. It can be deleted afterwards unless `lasting`.
            lasting: whether the folder is where the adapter lives, to be looked at after a sleep.
            files: contents by file name, for workers that do not see `folder`.

        Returns:
            Why this rank refuses; None if it does not.
        """
        try:
            with nullcontext(folder) if lasting else staging.folder(folder, files) as seen:
                self.lora_reload.adapters.stage(token, name, lora_int_id, seen, lasting)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def lora_reload_commit_adapter(self, token: str) -> int | str:
        """For ``collective_rpc`` on all ranks: swap in what was staged. Asleep, the slot is written at wake-up.

        Returns:
            The adapter's version; 0 if its id has gone to another name meanwhile, and nothing was changed; or why it
            could not be written, here or on another rank, and all have what they had.
        """
        return self.lora_reload.adapters.commit(token, together=seams.one_front_end(self.vllm_config))

    def lora_reload_discard_adapter(self, token: str) -> None:
        """For ``collective_rpc``: forget what was staged."""
        self.lora_reload.adapters.discard(token)


def _with_checkpoint_names(update_info: Any) -> Any:
    """What a transfer brings, under names as without LoRA: not all of it passes through ``load_weights``.

    `update_info` is a dict of the transfer backend's, or a list with one for every rank.
    """
    if isinstance(update_info, list):
        return [_with_checkpoint_names(of_rank) for of_rank in update_info]
    if isinstance(update_info, dict) and "names" in update_info:
        return update_info | {"names": [checkpoint_name(name) for name in update_info["names"]]}
    return update_info


def _check_shapes(worker: Any, update_info: Any) -> None:
    """For tensors that vLLM copies as they are; in the base view.

    Raises:
        ValueError: one has another shape than its parameter.
    """
    if seams.takes_kernel_format(worker, update_info):
        for name, shape in zip(update_info.get("names", ()), update_info.get("shapes", ()), strict=False):
            worker.model_runner.check_shape(name, torch.Size(shape))


def _is_sparse(update_info: Any) -> bool:
    if isinstance(update_info, list):
        return any(_is_sparse(of_rank) for of_rank in update_info)
    return isinstance(update_info, dict) and bool(update_info.get("num_updates_list"))


class SingleShotTransfer:
    """Where a weight transfer is one call of ``update_weights`` (before 0.21)."""

    model_runner: Any
    lora_reload: WorkerState

    def update_weights(self, update_info: Any, *args: Any, **kwargs: Any) -> None:
        update_info = _with_checkpoint_names(update_info)
        with self.lora_reload.loading(anew=True):
            _check_shapes(self, update_info)
            super().update_weights(update_info, *args, **kwargs)  # type: ignore[misc]
            self.model_runner.reset_lora_state()


class TransferSessions:
    """Where a weight transfer is a session of several calls."""

    model_runner: Any
    lora_reload: WorkerState
    _patched = False

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Ends a session that its trainer left open: shards that it buffered would count twice."""
        if self.lora_reload.lifecycle.transfer is Transfer.MAIN:
            self.lora_reload.end_transfer("reload_weights")
            seams.close_weight_update(self)
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self.lora_reload.must_be_mapped()
        self.lora_reload.hold()
        opened = self.lora_reload.lifecycle.transfer is not None
        try:
            with self.lora_reload.starting_transfer():
                super().start_weight_update(*args, **kwargs)  # type: ignore[misc]
            self.lora_reload.lifecycle.started(Transfer.MAIN)
        except BaseException:
            if not opened:  # it may have moved some layers to the meta device
                seams.abort_layerwise_reload(self.lora_reload.model)
            raise
        finally:
            self.lora_reload.settle()
        self._patched = False

    def update_weights(self, update_info: Any, *args: Any, **kwargs: Any) -> None:
        """One chunk. Outside a session vLLM refuses it, and nothing was written."""
        if self.lora_reload.lifecycle.transfer is not Transfer.MAIN:
            with self._ended_session_named():
                super().update_weights(update_info, *args, **kwargs)  # type: ignore[misc]
            return
        patches = _is_sparse(update_info)
        self._patched |= patches
        update_info = _with_checkpoint_names(update_info)
        try:
            with self.lora_reload.loading(completes=False, patches=patches, anew=True):
                if not patches:
                    _check_shapes(self, update_info)
                super().update_weights(update_info, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            seams.close_weight_update(self)  # before 0.24 it stays open
            raise

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """End the session. A draft model's session leaves LoRA state alone."""
        lifecycle = self.lora_reload.lifecycle
        if lifecycle.transfer is not Transfer.MAIN:
            with self._ended_session_named():
                super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
            lifecycle.transfer = None
            return
        try:
            completes = not self._patched or self.lora_reload.coverage.total > 0
            with self.lora_reload.loading(completes, anew=True):
                super().finish_weight_update(*args, **kwargs)  # type: ignore[misc]
                if not seams.engine_resets_lora():
                    self.model_runner.reset_lora_state()
        except BaseException:
            seams.close_weight_update(self)
            raise
        lifecycle.transfer = None
        self.lora_reload.settle()

    @contextmanager
    def _ended_session_named(self) -> Iterator[None]:
        """vLLM says only that no session is open, which a trainer that has opened one does not expect."""
        try:
            yield
        except Exception as error:
            lifecycle = self.lora_reload.lifecycle
            if lifecycle.ended and lifecycle.transfer is None:
                diagnosis.annotate(
                    error,
                    f"{lifecycle.ended} has ended the session: call start_weight_update and send all weights again",
                )
            raise


class DraftSessions:
    """Where a session can update the draft model instead (from 0.26)."""

    lora_reload: WorkerState

    def start_draft_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self.lora_reload.must_be_mapped()
        super().start_draft_weight_update(*args, **kwargs)  # type: ignore[misc]
        self.lora_reload.lifecycle.started(Transfer.DRAFT)


class DiscardsCache:
    """Where a worker can be told to give up the KV cache alone (from 0.32)."""

    lora_reload: WorkerState

    def discard(self, tags: tuple[str, ...]) -> None:
        super().discard(tags)  # type: ignore[misc]
        if "kv_cache" in tags:
            self.lora_reload.lifecycle.cache_slept(1)


class ZeroesWeights:
    """Where a worker can be told to zero its weights (from 0.32)."""

    lora_reload: WorkerState

    def reset_weights(self) -> None:
        """As vLLM's; base weights are missing afterwards. What no load brings keeps its values."""
        state = self.lora_reload
        state.must_be_mapped()
        state.hold()
        state.unregistered.save()
        try:
            super().reset_weights()  # type: ignore[misc]
        finally:
            state.unregistered.restore()
            state.zeroed()
            state.settle()


def extend(worker: Any) -> None:
    """Mix in what fits the worker's class: frameworks tell by ``hasattr`` what a release can do."""
    mixins: list[type] = [LoRAReloadWorker]
    if hasattr(worker, "finish_weight_update"):
        mixins.append(TransferSessions)
    elif hasattr(worker, "update_weights"):
        mixins.append(SingleShotTransfer)
    if hasattr(worker, "start_draft_weight_update"):
        mixins.append(DraftSessions)
    if hasattr(worker, "discard"):
        mixins.append(DiscardsCache)
    if hasattr(worker, "reset_weights"):
        mixins.append(ZeroesWeights)
    for mixin in mixins:
        seams.extend(worker, mixin)
