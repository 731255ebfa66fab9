"""The worker's part: what is kept at sleep, put back at wake-up, and made right after a weight transfer."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch

from . import seams, staging
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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        seams.extend(self.model_runner, LoRAReloadModelRunner)
        with seams.loading_observed(self.model_runner.watch_first_load, self.model_runner.watch_processing):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.lora_reload = self.model_runner.lora_reload

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        done = super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]
        if self.lora_reload.keeper is not None:
            self.lora_reload.keeper.started()
        return done

    def sleep(self, level: int = 1) -> None:
        state = self.lora_reload
        try:
            state.save(level)
            with seams.unmapping_noticed(self.vllm_config) as begun:
                try:
                    super().sleep(level)  # type: ignore[misc]
                except BaseException as error:  # vLLM asserts at the end that others have not taken what was freed
                    if begun():
                        state.slept(level, error)
                    raise
            state.slept(level)
        finally:
            state.settle()

    def wake_up(self, tags: list[str] | None = None) -> None:
        state = self.lora_reload
        weights = tags is None or "weights" in tags
        try:
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
            if state.keeper is not None:
                state.keeper.close()
            state.ring.close()
        super().shutdown()  # type: ignore[misc]

    def lora_reload_status(self) -> dict[str, Any]:
        """For ``collective_rpc``: how this rank stands.

        Returns:
            ``state``; ``error``, what every request is told now, or None; ``waits``, whether that is only a sleep at
            level 1, which loses nothing; ``adapters``, what requests for an adapter
            are told, by id; ``snapshot``, see `lora_reload_take_snapshot`, or None without ``snapshot_dir``;
            ``replay``, see `LoadPlan.state`, or None where it is switched off;
            ``last_restore``, how this package brought the base weights back after level 2, or None: ``source``
            (``snapshot`` or ``checkpoint``), ``bytes``, ``seconds``, and ``verify_seconds`` of these; ``ring_bytes``,
            pinned now.
        """
        state = self.lora_reload
        return {
            "state": state.lifecycle.state.value,
            "error": state.lifecycle.error(),
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
        """For ``collective_rpc``: ``lora_int_id`` and ``version`` of every adapter that was ever known, by name."""
        return self.lora_reload.adapters.known()

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

    def lora_reload_commit_adapter(self, token: str) -> int:
        """For ``collective_rpc``: swap in what was staged. Asleep, the slot is written at wake-up.

        Returns:
            The adapter's version; 0 if its id has gone to another name meanwhile, and nothing was changed.
        """
        return self.lora_reload.adapters.commit(token)

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
            self.lora_reload.drop_transfer()
            seams.close_weight_update(self)
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self.lora_reload.must_be_mapped()
        self.lora_reload.hold()
        try:
            super().start_weight_update(*args, **kwargs)  # type: ignore[misc]
            self.lora_reload.lifecycle.transfer = Transfer.MAIN
        except BaseException:
            if self.lora_reload.lifecycle.transfer is None:  # it may have moved some layers to the meta device
                self.lora_reload.drop_transfer()
            raise
        finally:
            self.lora_reload.settle()
        self._patched = False

    def update_weights(self, update_info: Any, *args: Any, **kwargs: Any) -> None:
        """One chunk. Outside a session vLLM refuses it, and nothing was written."""
        if self.lora_reload.lifecycle.transfer is not Transfer.MAIN:
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


class DraftSessions:
    """Where a session can update the draft model instead (from 0.26)."""

    lora_reload: WorkerState

    def start_draft_weight_update(self, *args: Any, **kwargs: Any) -> None:
        super().start_draft_weight_update(*args, **kwargs)  # type: ignore[misc]
        self.lora_reload.lifecycle.transfer = Transfer.DRAFT


class DiscardsCache:
    """Where a worker can be told to give up the KV cache alone (from 0.32)."""

    lora_reload: WorkerState

    def discard(self, tags: tuple[str, ...]) -> None:
        super().discard(tags)  # type: ignore[misc]
        if "kv_cache" in tags:
            self.lora_reload.lifecycle.cache_asleep = max(1, self.lora_reload.lifecycle.cache_asleep)


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
