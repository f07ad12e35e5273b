"""One thread that owns the model: requests join a batch, and each fails alone."""

import copy
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.sample_utils import greedy_sampler

from ..lm.generation_checks import check_drafts, checked_tokens, vocabulary
from ..lm.models import is_padded
from ..lm.prompt_cache import beyond_context
from ..lm.ranks import Sampler, ranks_of
from ..lm.routing import bounds, context_length, routing_for
from ..lm.sharing import common
from .disk import PromptStore
from .kept import key_of
from .lanes import Lanes
from .memory import Memory
from .request import BusyError, Event, Request
from .sampling import spared_tokens
from .snapshots import Snapshots, is_cuttable, places

_LOG = logging.getLogger("mlx_h2o")
_AGAIN = 3  # failed steps that a running request survives before it counts as their cause
_TRIAL = 3  # tokens that each then makes alone, since steps are ahead of what was told
_EVERY = 256  # tokens of an answer between two snapshots, if its caches will evict rows
_WORTH = 64  # shared tokens from which waiting for another request's prefill pays
_MOMENT = 0.02  # seconds to wait at most for requests that arrive together, or for other ranks
_News = tuple[list[Request], set[int], bool, bool]
"""New requests, the numbers of those whose client left, whether to end, and to give up."""
_NOTHING: _News = [], set(), False, False


class Engine:
    """Answers requests until it is closed.

    Each rank of a distributed model has its own engine, and all do the same: the first rank sends
    requests and sampled tokens to the others. If one rank fails, all end.

    Args:
        tokenizer: the model's.
        memory: plans for the model, and the draft model if there is one. Nobody else uses them.
        snapshots: caches of earlier prompts; the engine's own from here on.
        store: keeps snapshots across restarts.

    Attributes:
        least_on_disk: snapshots of fewer tokens are not worth a file.
        counts: requests and tokens since the start, by name.
        expected: calls that are about to submit requests; an idle engine waits a moment for them.
        ended, error: ``ended`` is set at the end; ``error`` says why, unless it was closed.
        gave_up: whether ``close`` ran out of time, and requests are lost.
    """

    least_on_disk = 256

    def __init__(
        self, tokenizer: Any, memory: Memory, snapshots: Snapshots, store: PromptStore | None = None
    ) -> None:
        self.models, self.tokenizer, self._fresh = memory.models, tokenizer, memory.make()
        self.model, *self._drafting = memory.models
        self.memory, self.snapshots, self.store = memory, snapshots, store
        self.ranks = ranks_of(self.model)
        # With several ranks, none can go on without the others, so that any failure is final.
        self._bearable: tuple[type[Exception], ...] = () if self.ranks.size > 1 else (Exception,)
        self._early: int | None = None  # who got its first token before the step that returns it
        self._greedy = self._noted(greedy_sampler)
        self.vocabulary = min(map(vocabulary, self.models))
        self.counts = {"finished": 0, "failed": 0, "left": 0, "read": 0, "cached": 0, "answered": 0}
        alone, batches = self._drafting or is_padded(self.model), False
        with suppress(AttributeError, ValueError):  # of caches that cannot be merged
            batches = not alone and bool([one.merge([one, one]) for one in self._fresh])
        mx.eval([model.modules() for model in self.models])  # only the thread that made them can
        # Up to this many tokens, a cache can be trimmed to any prefix.
        lasting = min((first for first, _ in bounds(self._fresh)), default=sys.maxsize)
        lasting = lasting if is_cuttable(self._fresh) else 0
        self._batches, self._lasting = self.ranks.least(batches, lasting)
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        self._boundaries = frozenset(token for token, one in added if one.special)
        self._spared = spared_tokens(tokenizer, self.vocabulary)
        self._batch = self._new_batch()
        self._running: dict[int, Request] = {}
        self._come: list[Request] = []  # filled by other threads
        self.expected = 0
        self._waiting: list[Request] = []  # those that ran when a step failed come first
        self._lone_failures = 0
        self._context = context_length(self.model)  # None once the warning is logged
        self._closing = self.gave_up = False
        self._untold = _NOTHING, mx.array(0)
        self.error: Exception | None = None
        self._wake = threading.Condition()
        self.ended = threading.Event()
        threading.Thread(None, _stay_behind, "mlx_h2o", ([self._live],), daemon=True).start()

    # Called by other threads

    def check(self, request: Request) -> Request:
        """The request; ValueError, which names the field, if the model cannot serve it."""
        checked_tokens("server", "prompt", request.tokens, self.models)
        sampling, size = request.sampling, self.vocabulary
        for name, most in (("top_k", sampling.top_k), ("top_logprobs", request.top_logprobs or 0)):
            if most >= size:
                raise ValueError(f"{name} is {most}, expected 0 to {size - 1}.")
        if wrong := [one for one in request.penalties.get("logit_bias", ()) if not 0 <= one < size]:
            raise ValueError(f"logit_bias names the token {wrong[0]}, expected 0 to {size - 1}.")
        count = len(request.tokens) + request.max_tokens
        if self._drafting:
            check_drafts("server", self._fresh, self.model, count)
        request._nbytes = needed = self.memory.of_request(count)
        if needed > self.memory.free:
            said = f"the prompt has {len(request.tokens):,} tokens, which takes {needed:,} bytes"
            wanted = f"at most {self.memory.free:,}, the server's --memory without weights"
            raise ValueError(f"max_tokens is {request.max_tokens:,} and {said}: expected {wanted}.")
        return request

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests that were checked, all or none.

        Raises:
            BusyError: too many wait, or the engine is about to end.
        """
        with self._wake:
            if self._closing:
                raise BusyError("the server is shutting down")
            if self.running + self.waiting + len(requests) > self.memory.decode + self.memory.queue:
                raise BusyError(f"{self.waiting:,} requests wait already")
            self._come += requests
            self._wake.notify()

    def leave(self, requests: Sequence[Request]) -> None:
        """Drop these requests: their client is gone."""
        for one in requests:
            one.left = True

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._come) + len(self._waiting)

    @property
    def fault(self) -> str:
        """Why no request can be answered; empty while all is well."""
        if self.ended.is_set():
            return "the engine has ended"
        return "every step of the model fails" if self._lone_failures >= _AGAIN else ""

    def close(self, timeout: float = 0) -> bool:
        """Refuse new requests, and end once all others are answered, or after ``timeout`` seconds;
        returns whether none was lost."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        whole = self.ended.wait(timeout) or not (self.running or self.waiting)
        if not (whole or self.gave_up):
            _LOG.warning("%d requests were not completed", self.running + self.waiting)
            self.gave_up = True
            self.ended.wait(10)
        return whole

    # The thread

    def _live(self) -> None:
        try:
            routed = routing_for(self.model, self._fresh, *self._drafting)
            with routed, mx.stream(generation_stream):
                while self._work():
                    pass
        except Exception as error:
            with self._wake:
                self._closing = True  # who submits after this is refused
            if not isinstance(error, BusyError):
                self.error = error
                _LOG.exception("the engine has ended")
            for request in [*self._running.values(), *self._waiting, *self._come]:
                request.sink(Event(error=error))
        finally:
            with suppress(RuntimeError):  # MLX raises it once a connection is lost
                self._batch.close()
                self.snapshots.shrink(0)
                mx.clear_cache()
            self.ended.set()

    def _work(self) -> bool:
        """Run one step for all requests; False at the end."""
        left, closing, giving_up = self._news()
        if giving_up:
            raise BusyError("the server has ended before the answer did")
        try:
            if left:
                self._part_with(left)
            self._let_join()
            if self._running:
                self._step()
            elif self._waiting:  # for memory of caches that are being written
                time.sleep(_MOMENT)
        except self._bearable as error:
            self._recover(error)
        return bool(self._waiting or self._running or not closing)

    def _news(self) -> tuple[set[int], bool, bool]:
        """Let new requests wait, and return the rest; block while there is nothing to do.

        Several ranks act on the first one's news of the step before, so that none has to wait.
        """
        alone = self.ranks.size == 1
        told, there = self._untold
        here = [*self._running.values(), *self._waiting]
        with self._wake:
            if not (here or any(told)):
                self._wake.wait_for(lambda: self._come or self._closing, None if alone else _MOMENT)
                self._wake.wait_for(lambda: not self.expected, _MOMENT)
            come = self._come[len(told[0]) :]
            left = {one.number for one in here + self._come if one.left}
            news = come, left, self._closing, self.gave_up
        if alone:
            told = news
        else:
            self._untold = news, self.ranks.flag(any(news))
            told = self.ranks.told(told) if there.item() else _NOTHING
        with self._wake:
            del self._come[: len(told[0])]  # which is empty in other ranks
            self._waiting += told[0]
        return told[1:]

    def _part_with(self, left: set[int]) -> None:
        gone = [one for one in (*self._running.values(), *self._waiting) if one.number in left]
        self._part([uid for uid, one in self._running.items() if one in gone])
        self._waiting = [one for one in self._waiting if one not in gone]
        for one in gone:
            self._end(one, None)

    def _let_join(self) -> None:
        if any(one._trial for one in self._running.values()):
            return
        suspects = [one for one in self._waiting if one._trial][:1]
        for uid, request in [*self._running.items()] if suspects else ():
            self._keep_row(uid, request)  # who has passed its trial gives way
            self._part([uid])
            self._waiting.insert(0, request)
        step, most = self.memory.step, max(1, self.memory.prompts // 2)  # others are for short ones
        for request in suspects or [*self._waiting]:
            if self.running >= self.memory.decode:
                break
            crowded = len(request.tokens) > step and most <= sum(
                len(one.tokens) > step for one in self._running.values() if not one.answer
            )
            if crowded or self._is_read_by_another(request):
                continue
            if self._give_way(request) < 0:  # only who joins takes the room of snapshots
                break
            self._waiting.remove(request)
            self._join(request)

    def _give_way(self, *joining: Request) -> int:
        """Drop snapshots until running and joining requests fit beside what is being written;
        returns the bytes that these leave, which are negative if they cannot."""
        left = self.memory.free - sum(one._nbytes for one in (*self._running.values(), *joining))
        left -= 0 if self.store is None else self.store.pending
        if left >= 0:
            self.snapshots.shrink(left)
        return left

    def _is_read_by_another(self, request: Request) -> bool:
        """Whether this one had better wait for a prefix that another is prefilling just now."""
        if not (self.snapshots.max_bytes and self.snapshots.max_count):
            return False
        most = 0
        for one in self._running.values():
            if one._places and not one.answer:
                shared = min(common(one.prompt, request.prompt), len(request.tokens) - 1)
                far = max(shared, min(self._lasting, 2 * shared))  # who shares little waits little
                most = max([most, *(min(n, shared) for n in one._places if n <= far)])
        return most >= _WORTH and most >= self.snapshots.best(key_of(request.prompt))[0] + _WORTH

    def _join(self, request: Request) -> None:
        """Add a request to the batch: a new one, or one whose step failed."""
        try:
            seen = request.seen
            caches, read = self.snapshots.find(seen)
            if self.store is not None and (found := self.store.find(seen, read))[0]:
                caches, read = found
            if request.cached is None:
                request.cached = read
                if said := beyond_context(self._context, len(seen)):
                    _LOG.warning("%s", said)
                    self._context = None
            chooses = request.sampler(self._spared)
            chooses = self._greedy if chooses is greedy_sampler else self._noted(chooses)
            request._places = places(seen, self._boundaries, read, self._lasting)
            request._filed = read
            # A batch goes on until the request ends; drafts must not go beyond its last token.
            limit = sys.maxsize if self._batches else request.max_tokens - len(request.answer)
            [uid] = self._batch.insert_segments(
                [[seen[a:b] for a, b in itertools.pairwise([read, *request._places, len(seen)])]],
                max_tokens=[limit], all_tokens=[seen[:read]], samplers=[chooses],
                logits_processors=[request.processors()],
                caches=[caches or copy.deepcopy(self._fresh)],
            )  # fmt: skip
            self._running[uid] = request
        except self._bearable as error:
            self._end(request, Event(error=error))

    # The batch

    def _noted(self, sample: Sampler) -> Sampler:
        """A sampler whose choices all ranks share; the newest are kept, with their logprobs."""
        sample = self.ranks.agreed(sample)

        def choose(logprobs: mx.array) -> mx.array:
            self._drawn = sample(logprobs), logprobs
            return self._drawn[0]

        return choose

    def _new_batch(self) -> Any:
        memory = self.memory
        if not self._batches:
            return Lanes(self.models, memory.step, memory.drafts)
        return BatchGenerator(
            self.model, completion_batch_size=memory.decode, prefill_batch_size=memory.prompts,
            prefill_step_size=memory.step, sampler=self._greedy, stream=generation_stream,
        )  # fmt: skip

    def _step(self) -> None:
        prompts, answers = self._batch.next()
        self._lone_failures = 0
        answers = [one for one in answers if one.uid != self._early]
        self._early = None
        for one in prompts:
            request = self._running[one.uid]
            # Otherwise a snapshot after the first token can be trimmed; that token comes sooner.
            lost = len(request.seen) + 2 + self.memory.drafts > self._lasting
            if lost and one.end_of_segment and not one.end_of_prompt:
                self._keep_row(one.uid, request)
            if one.end_of_prompt and self.running == self.ranks.size == 1:
                # Nobody waits for the next step: its first token goes out before that is prepared.
                drawn, logprobs = self._drawn
                self._early, token = one.uid, drawn.item()
                answers = [SimpleNamespace(uid=one.uid, token=token, logprobs=logprobs[0])]
        ended = []
        for one in answers:
            request = self._running[one.uid]
            # Once its caches evict rows, they cannot be trimmed any more.
            grows = len(request.tokens) + request.max_tokens > self._lasting
            event = self._take(request, one)
            if event.finish is not None or event.error is not None:
                self._end(request, event)
                ended.append(one.uid)
            elif request._places or (grows and len(request.answer) % _EVERY == 0):
                self._keep_row(one.uid, request)
        if ended:
            self._part(ended, keep=True)

    def _keep_row(self, uid: int, request: Request) -> None:
        """Keep a snapshot of a request up to its next place, or of all that it has read.

        Worth a file are the end of a prompt, the place before its last part, and one for as many
        tokens as caches hold rows: together little more than a cache that evicts nothing.
        """
        caches, worth = self._batch.extract_cache([uid])[uid][0], False
        place, *rest = request._places or (None,)
        if place is not None:
            last = rest[-1] if rest else place
            near, apart = last - self.least_on_disk, place - request._filed >= self.memory.rows
            worth = place == last or (place <= near and (apart or near < rest[0]))
            request._places, request._filed = rest, place if worth else request._filed
        self._keep(request.seen[:place], caches, worth)

    def _keep(self, tokens: list[int], caches: list[Any], worth: bool) -> None:
        """Keep a snapshot, which may be ``worth`` a file."""
        try:
            held = self.snapshots.keep(tokens, caches)
            left = self._give_way()
            if self.store is not None and worth and held >= self.least_on_disk:
                self.store.keep(tokens[:held], caches, left)  # at most half of the room
                self._give_way()
        except self._bearable as error:  # the request goes on without
            _LOG.warning("a prompt is not kept: %s", error)

    def _take(self, request: Request, one: Any) -> Event:
        """Turn a token into an event, and report it unless it ends the answer."""
        if not request.answer:  # the prompt has been read
            self.counts["cached"] += request.cached or 0
            self.counts["read"] += len(request.tokens) - (request.cached or 0)
        try:
            event = request.take(self.tokenizer, one.token, one.logprobs)
        except self._bearable as error:
            return Event(error=error)
        self.counts["answered"] += 1
        if request.failure is not None:
            request.left = True  # other ranks do not know of the failure yet
        elif event.finish is None and (event.segments or event.logprobs):
            request.sink(event)
        return event

    def _part(self, uids: Sequence[int], keep: bool = False) -> None:
        """Take requests out of the batch; ``keep`` their caches as snapshots."""
        gone = {uid: self._running.pop(uid) for uid in uids}
        removed = self._batch.remove(uids, return_prompt_caches=keep)
        for uid, request in gone.items() if keep else ():
            self._keep(request.seen, removed[uid][0], worth=True)

    def _end(self, request: Request, event: Event | None) -> None:
        """Report a request's last event, or its failure; None: its client has left."""
        if request.failure is not None:
            event = Event(error=request.failure)
        if event is None:
            self.counts["left"] += 1
            _LOG.info("a client went away before its answer was complete")
            return
        self.counts["finished" if event.error is None else "failed"] += 1
        if event.error is not None:
            _LOG.error("a request has failed: %s", event.error, exc_info=event.error)
        request.sink(event)

    def _recover(self, error: Exception) -> None:
        """Recover from a failed step, which leaves torn caches: each request is tried alone, and
        one that fails alone is the cause; or the last one, if all together fail again and again."""
        running = list(self._running.values())
        self._lone_failures += len(running) < 2
        for one in running:
            one._trial = _TRIAL
            one._failures += 1
        if not running and self._lone_failures > _AGAIN:  # or it would try for ever
            raise error
        _LOG.warning("a step of the model failed: %s", error)
        guilty = [one for one in running if len(running) < 2 or one._failures > _AGAIN][-1:]
        self._batch.close()
        self._running, self._batch, self._early = {}, self._new_batch(), None
        for one in guilty:
            self._end(one, Event(error=error))
        self._waiting = [one for one in running if one not in guilty] + self._waiting


def _stay_behind(life: list[Callable[[], None]]) -> None:
    """Run the engine and release it, but never end the thread: at its end MLX takes Python's lock,
    which may be gone by then."""
    life.pop()()
    threading.Event().wait()
