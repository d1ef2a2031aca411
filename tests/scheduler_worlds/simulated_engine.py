"""An engine of a scheduler world: vLLM's scheduler, our connector, ranks with symbolic memory.

The order of calls is that of vLLM's `EngineCore`: requests and commands are taken only while there
is room for a step; aborts also when a step has ended, before its output is used.
"""

from __future__ import annotations

import itertools
import math
import pickle
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fair_turns import TurnJudge
from simulated_rank import EngineStep, SimulatedRank
from symbol_cache import StepBatch, StepPart, WrongRead
from symbols import OTHER_TOKEN, TokenStory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from world_adapters import adapter_files, adapter_request
from world_config import EngineSetup, engine_config, model_runner, structured_outputs
from world_models import MAX_MODEL_TOKENS, WorldModel, cache_groups, layer_specs, rank_layers

from kv_connectors.metadata import Handshake

if TYPE_CHECKING:
    from scheduler_world import SchedulerWorld


class RequestName(str):
    """A request's id whose hash is the same in each process, so that a seed replays."""

    def __hash__(self) -> int:
        return zlib.crc32(self.encode())


class SimulatedEngine:
    """One instance: the scheduler's process and the worker processes."""

    def __init__(
        self,
        world: SchedulerWorld,
        label: str,
        model: WorldModel,
        setup: EngineSetup,
        data_parallel_rank: int | None,
    ) -> None:
        """Creates the engine and exchanges the handshakes of its ranks."""
        self.world = world
        self.label = label
        self.model = model
        self.setup = setup
        self.config: Any = engine_config(setup, data_parallel_rank)
        specs = layer_specs(model, setup.block_size, setup.tensor_ranks)
        groups = cache_groups(model, specs, self.config)
        cache_config = KVCacheConfig(_count_blocks(setup, groups), [], groups)
        self.config.cache_config.num_gpu_blocks = cache_config.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, self.config)
        scheduler_class: Any = AsyncScheduler if setup.is_async else Scheduler
        with model_runner(setup):
            self.depth = self.config.max_concurrent_batches
            self.scheduler = scheduler_class(
                vllm_config=self.config,
                kv_cache_config=cache_config,
                structured_output_manager=structured_outputs(),
                block_size=block_size,
                hash_block_size=hash_block_size,
            )
        self._hasher = get_request_block_hasher(hash_block_size, sha256)
        self.connector: Any = self.scheduler.connector
        self.ranks: list[SimulatedRank] = []
        self.stages: list[list[SimulatedRank]] = [[] for _ in range(setup.stages)]
        for number in range(setup.stages * setup.tensor_ranks):
            stage, tensor_rank = divmod(number, setup.tensor_ranks)
            layers = rank_layers(
                model,
                groups,
                specs,
                _stage_layers(len(model.layers), stage, setup.stages),
                tensor_rank,
                setup.tensor_ranks,
            )
            rank = SimulatedRank(self, number, layers, cache_config)
            self.ranks.append(rank)
            self.stages[stage].append(rank)
        handshakes: dict[tuple[int, int], Handshake | None] = {
            (rank.stage, rank.number % setup.tensor_ranks): rank.connector.get_handshake_metadata()
            for rank in self.ranks
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, len(self.ranks))
        self._inbox: deque[Callable[[], None]] = deque()
        self._aborts: deque[RequestName] = deque()
        self._in_flight: deque[EngineStep] = deque()
        self._stories: dict[str, TokenStory] = {}
        self._generated: dict[str, list[int]] = {}
        self._last_parts: dict[str, StepPart] = {}  # of steps in flight, by request
        self._steps = 0
        self._blocks_at_start = self._free_blocks()
        self._turns = TurnJudge(self.scheduler, setup, _blocks_of_longest(setup, groups))

    # Requests -------------------------------------------------------------------------------------
    @property
    def info(self) -> Any:
        """The description of the engine, as its proxy has it."""
        return self.connector._scheduler.engine

    @property
    def clock(self) -> float:
        """The engine's own clock, by which grants expire."""
        return float(self.connector._scheduler.clock)

    def add(
        self,
        name: str,
        prompt: list[int],
        answer: int,
        priority: int,
        params: dict[str, Any] | None = None,
        adapter: int = 0,
    ) -> None:
        """Sends a request of `answer` tokens to the engine.

        `params`: of its KV transfer. `adapter`: the number of its LoRA adapter; 0: none.
        """
        sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=RequestName(name),
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            priority=priority,
            arrival_time=self.world.now,
            lora_request=adapter_request(self.setup, adapter),
        )
        self._inbox.append(lambda: self.scheduler.add_request(request))

    def abort(self, name: str) -> None:
        """Aborts a request, at the next moment at which vLLM takes aborts."""
        self._aborts.append(RequestName(name))

    def request_names(self) -> list[str]:
        """Returns the ids of all requests that have not ended."""
        requests = self.scheduler.requests
        return [name for name, request in requests.items() if not request.is_finished()]

    def command(self, name: str) -> None:
        """Runs a command of vLLM's API between two steps: a reset of the cache, or a pause."""
        self._inbox.append(lambda: self._run_command(name))

    def _run_command(self, name: str) -> None:
        self.world.note(self.label, "command", name)
        match name:
            case "reset":
                self.scheduler.reset_prefix_cache()
            case "reset with running requests":
                try:
                    self.scheduler.reset_prefix_cache(reset_running_requests=True)
                except RuntimeError:  # some blocks are held for transfers
                    self.world.counts["resets in part"] += 1
            case "pause and keep":
                self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            case "pause and wait":
                self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            case "pause and abort":
                self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
                self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            case "resume":
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.world.counts[name] += 1

    # vLLM's loop ----------------------------------------------------------------------------------
    def take_turn(self) -> None:
        """Does one of the things that the engine's process can do now."""
        choices: list[Callable[[], None]] = []
        has_room = len(self._in_flight) < self.depth
        if has_room and (self._inbox or self._aborts):
            choices.append(self._take_commands)
        if has_room and self.scheduler.has_requests():
            choices.append(self._schedule)
        if self._in_flight and len(self._in_flight[0].results) == len(self.ranks):
            choices.append(self._update)
        if choices:
            self.world.random.choice(choices)()

    @property
    def is_busy(self) -> bool:
        """Whether requests, steps or commands are left."""
        is_asked = bool(self._inbox or self._aborts or self._in_flight)
        return is_asked or bool(self.scheduler.requests) or self.scheduler.has_requests()

    def _take_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._take_aborts()

    def _take_aborts(self) -> None:
        if self._aborts:
            names = list(self._aborts)
            self._aborts.clear()
            self.world.note(self.label, "abort", names)
            for name in names:
                if name in self.scheduler.requests:
                    self.world.counts[f"aborts: {self._moment(name)}"] += 1
            self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def _moment(self, name: str) -> str:
        """Returns what a request is doing, for the counts of aborts."""
        request = self.scheduler.requests[name]
        if request.is_finished():
            return "ended, blocks are kept"
        if request.status is not RequestStatus.RUNNING:
            return str(request.status.name.lower())
        return "prefill" if request.num_output_tokens == 0 else "decode"

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        self.connector._scheduler._legs.validate()
        self._turns.on_step(output)
        for name in output.preempted_req_ids or ():
            self._last_parts.pop(name, None)  # computed again from what is in the cache
        parts = [
            self._part(name, count, output.scheduled_spec_decode_tokens.get(name, []))
            for name, count in output.num_scheduled_tokens.items()
        ]
        step = EngineStep(
            number=self._steps,
            output=output,
            metadata=pickle.dumps(output.kv_connector_metadata),
            batch=StepBatch(self.model, parts),
        )
        self._steps += 1
        self.world.counts["preemptions"] += len(output.preempted_req_ids or ())
        self.world.counts["steps"] += bool(parts)
        self.world.note(self.label, "step", (step.number, output.num_scheduled_tokens))
        self._in_flight.append(step)
        for rank in self.ranks:
            rank.steps.append(step)

    def _part(self, name: str, count: int, drafts: list[int]) -> StepPart:
        """Returns what a step computes of one request, just after it was scheduled."""
        request = self.scheduler.requests[name]
        if name not in self._stories:
            # Now and not on arrival: the connector may leave out the last token of a prompt.
            prompt = request.prompt_token_ids
            ahead = (self.depth + 1) * (1 + self.setup.drafted_tokens)
            adapter = request.lora_request.lora_int_id if request.lora_request else 0
            files = adapter_files(self.setup, adapter)
            self._stories[name] = TokenStory(prompt, request.max_tokens + ahead, files)
        story = self._stories[name]
        known = len(request.all_token_ids)
        assert list(request.all_token_ids) == story.tokens[:known], f"wrong tokens: {name}"
        start = request.num_computed_tokens - count
        # Asynchronously vLLM takes all drafts in flight as accepted, and its runner corrects that.
        if name in self._last_parts:
            start = self._last_parts[name].right_end
        end = start + count
        accepted = self._count_accepted(story.tokens[end - len(drafts) : end], drafts)
        part = StepPart(
            request=name,
            start=start,
            end=end,
            right_end=end - len(drafts) + accepted,
            written_end=min(end + self.config.num_lookahead_tokens, MAX_MODEL_TOKENS),
            blocks=self.scheduler.kv_cache_manager.get_block_ids(name),
            samples=not request.is_prefill_chunk,
            drafts=len(drafts),
            story=story,
        )
        self._last_parts[name] = part
        return part

    def _count_accepted(self, right: list[int], drafts: list[int]) -> int:
        """Returns how many drafts of a step are right."""
        if self.setup.is_async:  # the scheduler has placeholders, and the runner the tokens
            return self.world.random.randint(0, len(drafts))
        pairs = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(right, drafts, strict=True)
        )
        return len(list(pairs))

    def _update(self) -> None:
        step = self._in_flight.popleft()
        for part in step.batch.parts:
            if self._last_parts.get(part.request) is part:
                del self._last_parts[part.request]
        if self.world.random.random() < 0.5:
            self._take_aborts()
        for name, wrong in step.wrong.items():
            self._check_unused(step, name, wrong)
        output = self._join_results(step)
        for outputs in self.scheduler.update_from_output(step.output, output).values():
            for one in outputs.outputs:
                generated = self._generated.setdefault(one.request_id, [])
                generated += one.new_token_ids
                if one.finish_reason is not None:
                    self._on_ended(one.request_id, one.kv_transfer_params)
        self.scheduler.kv_cache_manager.take_events()
        if self.setup.drafted_tokens and not self.setup.is_async:
            self._draft(step)

    def _draft(self, step: EngineStep) -> None:
        """Gives vLLM's scheduler drafts for the next step, some of them wrong."""
        names = [part.request for part in step.batch.parts if part.samples]
        drafts = [self._draft_one(name) for name in names]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _draft_one(self, name: str) -> list[int]:
        request = self.scheduler.requests.get(name)
        if request is None or request.is_finished() or self.world.random.random() < 0.2:
            return []
        known = len(request.all_token_ids)
        right = self._stories[name].tokens[known : known + self.setup.drafted_tokens]
        count = self.world.random.randint(0, len(right))
        return right[:count] + [OTHER_TOKEN] * (len(right) - count)

    def _check_unused(self, step: EngineStep, name: str, wrong: WrongRead) -> None:
        """Raises AssertionError if vLLM uses a request's part of a step with a wrong read.

        It does not if the request has ended, or was preempted since the step was scheduled.
        """
        request = self.scheduler.requests.get(name)
        if request is None or request.is_finished():
            return
        samples = any(part.request == name and part.samples for part in step.batch.parts)
        if request.num_stale_output_tokens and (request.drop_stale_output or not samples):
            return
        raise AssertionError(self.world.describe_wrong_read(self, wrong))

    def _join_results(self, step: EngineStep) -> ModelRunnerOutput:
        """Returns the output of a step as vLLM's executor joins it from all ranks."""
        names = [part.request for part in step.batch.parts]
        tokens = [part.sampled_tokens() for part in step.batch.parts]
        self.world.counts["accepted drafts"] += sum(max(0, len(own) - 1) for own in tokens)
        outputs: list[ModelRunnerOutput | None] = []
        for rank in self.ranks:
            own = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[list(sampled) for sampled in tokens],
                kv_connector_output=step.results[rank.number],
            )
            outputs.append(own)
        last_stage = self.stages[-1][0].number
        joined = self._aggregator.aggregate(outputs, output_rank=last_stage)
        assert joined is not None
        kv = joined.kv_connector_output
        if kv is not None and (kv.finished_recving or kv.finished_sending):
            failed = getattr(kv, "failed_recving", None)  # since vLLM 0.32
            done = (kv.finished_recving, failed, kv.finished_sending)
            self.world.note(self.label, "received, failed, sent", done)
        return joined

    def _on_ended(self, name: str, params: dict[str, Any] | None) -> None:
        story = self._stories.pop(name)
        generated = self._generated.pop(name)
        end = story.prompt_tokens + len(generated)
        expected = story.tokens[story.prompt_tokens : end]
        assert generated == expected, f"{self.label} {name}: {generated}, expected {expected}"
        self.world.note(self.label, "ended", name)
        self.world.on_answer(name, story.tokens[:end], params)

    # End ------------------------------------------------------------------------------------------
    def _free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def leftovers(self) -> dict[str, object]:
        """Returns what is left by name after all requests should have ended; empty if nothing."""
        scheduler = self.scheduler
        side = self.connector._scheduler
        aggregator = self._aggregator
        found: dict[str, object] = {
            "requests": list(scheduler.requests),
            "deferred frees": scheduler.deferred_frees,
            "blocks": self._blocks_at_start - self._free_blocks(),
            "loads that ended": scheduler.finished_recving_kv_req_ids,
            "loads that failed": scheduler.failed_recving_kv_req_ids,
            "in-flight prefills": scheduler._inflight_prefills,
            "aggregated loads": aggregator._recv_remaining_count,
            "aggregated sends": aggregator._send_remaining_count,
            "aggregated failures": getattr(aggregator, "_failed_recving_pending", None),
            "legs": side._legs.legs,
            "lookups": side._legs._lookups,
            "legs that await their turn": side._legs._awaiting_turn,
            "admitted requests": side._admitted,
            "aborted loads": side._aborted_loads,
            "blocks of handed-over prompts": side._legs._handover_blocks,
            "handed-over prompts by block": side._legs._handovers_by_block,
        }
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            found[f"tables of group {manager.kv_cache_group_id}"] = dict(manager.req_to_blocks)
        for rank in self.ranks:
            found[f"rank {rank.number}"] = rank.leftovers()
        return {f"{self.label}: {name}": value for name, value in found.items() if value}


def _count_blocks(setup: EngineSetup, groups: list[KVCacheGroupSpec]) -> int:
    """Returns the blocks of an engine, which are enough for one longest request."""
    blocks = _blocks_of_longest(setup, groups)
    return 1 + math.ceil(blocks * setup.pool_factor)  # and the null block


def _blocks_of_longest(setup: EngineSetup, groups: list[KVCacheGroupSpec]) -> int:
    """Returns the blocks of one longest request."""
    blocks = 0
    for group in groups:
        if isinstance(group.kv_cache_spec, MambaSpec):
            blocks += 1
        else:
            blocks += math.ceil(MAX_MODEL_TOKENS / setup.block_size) + 1
    return blocks


def _stage_layers(layers: int, stage: int, stages: int) -> range:
    """Returns the layers of a pipeline stage."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)
