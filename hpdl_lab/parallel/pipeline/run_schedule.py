"""The execution of a schedule on one rank: actions in order, messages posted ahead, over any communicator.

    row       1F0        1F1        1B0        1F2    ...
    receives  x0 x1      x2         g0 ...                  posted up to AHEAD actions before they are needed
    sends          y0         y1         g0                 never waited for, until they must have arrived

Messages between two ranks arrive in the order of the sender's row: no tags are needed to tell them apart. A rank waits
for nothing but what its next action needs. So if a schedule can be carried out at all, which schedules.validate
proves, its ranks do not deadlock, whatever the network does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from ...comm.base import Comm, Work
from ...schedules import KINDS, Action, Schedule, TimedAction, validate
from ...trace import Event
from ...units import counted
from ..data_parallel import as_sent
from .stage import Loss, Spec, Stage

ResultT = TypeVar("ResultT")
Steps: TypeAlias = Generator[Work, None, ResultT]  # yields what it waits for
Inputs: TypeAlias = Callable[[int], Sequence[Tensor]]
LossOfPart: TypeAlias = Callable[[int, Tensor], Tensor]  # f(micro_batch, output)
OnAction: TypeAlias = Callable[[Action, int, int], object]  # f(action, t0_ns, t1_ns)
Drive: TypeAlias = Callable[..., list[tuple[Tensor, ...]]]  # of programs of two stages


class AnyStage(Protocol):
    """A stage.Stage, or what has its methods."""

    @property
    def takes(self) -> Sequence[Spec]: ...

    @property
    def gives(self) -> Sequence[Spec]: ...

    def forward(self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None) -> tuple[Tensor, ...]: ...

    def backward(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]: ...

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]: ...

    def weight_gradient(self, micro_batch: int) -> None: ...

    def forget(self) -> None: ...


class _SteppedStage(AnyStage, Protocol):
    """A stage whose actions can be done in turns with another's."""

    def steps(self, action: Action, given: Sequence[Tensor], loss: Loss | None = None) -> Steps[tuple[Tensor, ...]]: ...


LETTERS = {word: letter for letter, word in KINDS.items()}
NAME = re.compile(rf"({'|'.join(LETTERS)}) (\d+) stage (\d+)")


def name_of(action: Action) -> str:
    """Return the name of the event of an action: "forward 5 stage 2", of micro-batch 5."""
    return f"{KINDS[action.kind]} {action.micro_batch} stage {action.stage}"


def action_of(op: str) -> Action | None:
    """Return the Action of an event that is called `op`; None if it is something else."""
    found = NAME.fullmatch(op)
    return found and Action(int(found[3]), LETTERS[found[1]], int(found[2]))


def timed_actions(events: Iterable[Event], ranks: int) -> list[list[TimedAction]]:
    """Return what each rank did and when: [schedules.Timed] for each of `ranks` ranks, in s since the first action.

    `schedules.summary` makes makespan, bubble and live activations of it.   Args: events: of one step.
    """
    found = [(e, action) for e in events if (action := action_of(e.op))]
    origin = min((e.t0_ns for e, _ in found), default=0)
    rows: list[list[TimedAction]] = [[] for _ in range(ranks)]
    for e, action in sorted(found, key=lambda pair: (pair[0].t0_ns, pair[0].step)):
        rows[e.rank].append(TimedAction(action, (e.t0_ns - origin) / 1e9, (e.t1_ns - origin) / 1e9))
    return rows


class _Arrival(NamedTuple):
    """The inputs of a forward, kind "F", or the gradients of a backward, kind "B", for which a stage waits."""

    stage: int
    kind: str
    micro_batch: int


class Message(NamedTuple):
    """A message: what it is, the ranks, and the positions in their rows at which it is made and used."""

    arrival: _Arrival
    source: int
    to: int
    made: int
    used: int


class Routes:
    """The messages of one rank in `schedule`.

    incoming: {rank: [Message]} in the order in which that rank sends them; outgoing: [Message or None] for each action
    of the row. last: {stage: position of its last backward in the row}. units: the positions of each action, or pair.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.row = schedule.rows[rank]
        used = {_needed_by(action): position for row in schedule.rows for position, action in enumerate(row)}
        self.outgoing = [self._message(schedule, rank, position, used) for position in range(len(self.row))]
        self.incoming: dict[int, list[Message]] = {}
        for peer in range(schedule.ranks):
            sent = (self._message(schedule, peer, position, used) for position in range(len(schedule.rows[peer])))
            mine = [message for message in sent if message is not None and message.to == rank != peer]
            if mine:
                self.incoming[peer] = mine
        self.source_of = {message.arrival: peer for peer, mine in self.incoming.items() for message in mine}
        self.last = {action.stage: position for position, action in enumerate(self.row) if action.kind in "BW"}
        paired, second = schedule.paired, {*schedule.partner.values()}
        self.units = [(n, n + 1) if a in paired else (n,) for n, a in enumerate(self.row) if a not in second]

    @staticmethod
    def _message(schedule: Schedule, rank: int, position: int, used: dict[_Arrival | None, int]) -> Message | None:
        """Return what the action at `position` of the row of `rank` sends; None if no action waits for its result."""
        arrival = _result_of(schedule, schedule.rows[rank][position])
        if arrival is None:
            return None
        return Message(arrival, rank, schedule.rank_of(arrival.stage), position, used[arrival])


def _needed_by(action: Action) -> _Arrival | None:
    """Return the Arrival that `action` waits for; None for the second half of a backward."""
    kind = {"F": "F", "B": "B", "I": "B"}.get(action.kind)
    return _Arrival(action.stage, kind, action.micro_batch) if kind else None


def _result_of(schedule: Schedule, action: Action) -> _Arrival | None:
    """Return the Arrival that `action` makes possible; None if its result goes nowhere."""
    if action.kind == "W":
        return None
    stage = schedule.next(action.stage) if action.kind == "F" else schedule.previous(action.stage)
    return None if stage is None else _Arrival(stage, "F" if action.kind == "F" else "B", action.micro_batch)


@lru_cache(maxsize=64)
def routes(schedule: Schedule, rank: int) -> Routes:
    """Return the Routes of one rank in a schedule that has been found valid.

    Raises:  ValueError, one sentence, for a schedule that is not: the same on every rank, before any message.
    """
    return Routes(validate(schedule), rank)


AHEAD = 2  # actions whose inputs are being received while another one computes: each holds the memory of its inputs


def run_schedule(
    comm: Comm,
    schedule: Schedule,
    stages: Mapping[int, AnyStage],
    inputs: Inputs | None = None,
    loss: LossOfPart | None = None,
    done: Callable[[int], object] | None = None,
    on_action: OnAction | None = None,
    drive: Drive | None = None,
) -> dict[int, Tensor]:
    """Carry out this rank's row of `schedule`. Collective: every rank of `comm` calls it.

    Args:    stages: {number: Stage} of this rank, or of anything that has the methods of one. inputs: f(micro_batch) ->
             tuple of tensors that a first stage takes. loss: f(micro_batch, output) -> scalar, for a last stage, from
             which its backward starts: divide it so that all micro-batches' add up to the loss of the batch.
             done: f(number of a stage), called once its last gradients of this step are there.
             on_action: f(action, t0_ns, t1_ns), called when an action of this rank has ended.
             drive: overlap.alternate, if stages are overlap._ExpertStage: it does the two of a pair in turns; by
             default the forward comes first, and then the backward.
    Returns: {micro_batch: loss} without a graph, of the last stages that this rank has.
    Raises:  ValueError on every rank, before the first message, if the schedule is not valid, or not for these ranks
             or stages; MemoryError or torch.OutOfMemoryError that says where.
    Steps: one message per tensor that passes from one rank to another.   Bytes per rank: as the tensors have.
    """
    require_valid(comm, schedule)
    needed = schedule.stages_of(comm.rank)
    if sorted(stages) != needed:
        raise ValueError(f"rank {comm.rank} of {schedule.name} has stages {needed}, and was given {sorted(stages)}")
    return Execution(comm, schedule, stages, inputs, loss, done, on_action, drive).run()


def require_valid(comm: Comm, schedule: object) -> None:
    """Raise ValueError unless `schedule` is valid, and for as many ranks as `comm` has."""
    if not isinstance(schedule, Schedule):
        example = f'schedules.build("1f1b", ranks={comm.size}, micro_batches=8)'
        raise ValueError(f"a Schedule is needed, got {schedule!r:.40}: {example} makes one")
    if comm.size != schedule.ranks:
        raise ValueError(f"{schedule.name} is a schedule for {schedule.ranks} ranks, and there are {comm.size}")
    routes(schedule, comm.rank)


@dataclass(eq=False)
class Execution:
    """A step of one rank."""

    comm: Comm
    schedule: Schedule
    stages: Mapping[int, AnyStage]
    inputs: Inputs | None = None
    loss: LossOfPart | None = None
    done: Callable[[int], object] | None = None
    on_action: OnAction | None = None
    drive: Drive | None = None

    def __post_init__(self) -> None:
        self.routes = routes(self.schedule, self.comm.rank)
        # under way to this rank, or, without Work, of this rank itself
        self.posted: dict[_Arrival, list[tuple[Tensor, Work | None]]] = {}
        self.unposted = {peer: list(reversed(messages)) for peer, messages in self.routes.incoming.items()}
        self.sends: dict[int, list[tuple[int, Work]]] = {}  # rank -> [(position in its row at which it is used, Work)]
        self.made = {message.arrival: message.made for mine in self.routes.incoming.values() for message in mine}
        self.losses: dict[int, Tensor] = {}

    def run(self) -> dict[int, Tensor]:
        try:
            for positions in self.routes.units:
                for ahead in self.routes.row[positions[0] : positions[-1] + 1 + AHEAD]:
                    self.post(_needed_by(ahead))
                self.do(positions)
                for position in positions:
                    stage = self.routes.row[position].stage
                    if self.done is not None and self.routes.last[stage] == position:
                        self.done(stage)
            for works in self.sends.values():
                for _, work in works:
                    work.wait()
        except BaseException:
            for stage in self.stages.values():
                stage.forget()
            raise
        return self.losses

    # -- messages ---------------------------------------------------------------------------------------------------

    def post(self, arrival: _Arrival | None) -> None:
        """Begin to receive `arrival` if it comes from another rank, and what that rank sends before it."""
        if arrival is None or arrival not in self.routes.source_of:
            return
        peer = self.routes.source_of[arrival]
        waiting = self.unposted[peer]
        while waiting and waiting[-1].made <= self.made[arrival]:
            message = waiting.pop()
            tensors = [self.empty(spec) for spec in self.specs(message.arrival)]
            self.posted[message.arrival] = [(x, self.comm.irecv(as_sent(x.view(-1)), peer)) for x in tensors]

    def receive(self, arrival: _Arrival) -> list[Tensor]:
        """Return the tensors of `arrival`, once they are here."""
        received = self.posted.pop(arrival)
        for _, work in received:
            if work is not None:
                work.wait()
        if arrival in self.made:
            self.wait_for_sends(self.routes.source_of[arrival], self.made[arrival])
        return [x for x, _ in received]

    def send(self, stage: AnyStage, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send `tensors`, which `stage` has made, as `message` says; they are not waited for."""
        kind = message.arrival.kind
        _require_specs(stage.gives if kind == "F" else [spec for spec in stage.takes if spec.requires_grad], tensors)
        if message.to == self.comm.rank:
            self.posted[message.arrival] = [(x, None) for x in tensors]
            return
        works = [self.comm.isend(as_sent(x.reshape(-1)), message.to) for x in tensors]
        self.sends.setdefault(message.to, []).extend((message.used, work) for work in works)

    def wait_for_sends(self, peer: int, position: int) -> None:
        """Wait for the sends that rank `peer` has used before `position` in its row: they have arrived there."""
        left: list[tuple[int, Work]] = []
        for used, work in self.sends.get(peer, ()):
            if used <= position:
                work.wait()
            else:
                left.append((used, work))
        self.sends[peer] = left

    def specs(self, arrival: _Arrival) -> Sequence[Spec]:
        """Return the Specs of the tensors of `arrival`."""
        stage = self.stages[arrival.stage]
        return stage.takes if arrival.kind == "F" else [spec for spec in stage.gives if spec.requires_grad]

    def empty(self, spec: Spec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.comm.device)

    # -- actions ----------------------------------------------------------------------------------------------------

    def do(self, positions: Sequence[int]) -> None:
        """Wait for what the actions at `positions` need, do them, send what they have made."""
        actions = [self.routes.row[position] for position in positions]
        given = [self.given(action) for action in actions]
        if self.drive is not None and len(actions) == 2:
            made = self.in_turns(self.drive, actions, given)
        else:
            made = [self.timed(action, given.pop(0)) for action in actions]
        for position, action, tensors in zip(positions, actions, made, strict=True):
            message = self.routes.outgoing[position]
            if message is not None:
                self.send(self.stages[action.stage], message, tensors)
            elif action.kind == "F" and self.loss is not None:
                self.losses[action.micro_batch] = tensors[0]

    def in_turns(
        self, drive: Drive, actions: Sequence[Action], given: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """Return what a pair makes. The backward begins: it has messages at once, the forward computes first."""
        clock = self.comm.trace.clock
        begin, (forward, backward) = clock(), actions
        stages = [cast(_SteppedStage, self.stages[action.stage]) for action in actions]
        pairs = zip(stages, actions, given, strict=True)
        programs = [stage.steps(action, x, self.loss_of(action)) for stage, action, x in pairs]
        with self.comm.trace.span(name_of(forward)), self.comm.trace.span(name_of(backward)):
            made = drive(*reversed(programs))
        if self.on_action is not None:
            for action in actions:
                self.on_action(action, begin, clock())
        return made[::-1]

    def timed(self, action: Action, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what `action` makes of `given`, recorded and reported."""
        clock = self.comm.trace.clock
        begin = clock()
        with self.comm.trace.span(name_of(action)):
            made = self.compute(self.stages[action.stage], action, given)
        if self.on_action is not None:
            self.on_action(action, begin, clock())
        return made

    def given(self, action: Action) -> Sequence[Tensor]:
        """Return the tensors that `action` works on."""
        needed = _needed_by(action)
        if needed is None:
            return ()
        if action.kind == "F" and self.schedule.is_first(action.stage):
            return () if self.inputs is None else self.inputs(action.micro_batch)
        if action.kind != "F" and self.schedule.is_last(action.stage):
            return ()
        return self.receive(needed)

    def compute(self, stage: AnyStage, action: Action, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what `stage` makes of `given`; an error of memory says where it came up."""
        try:
            if action.kind == "F":
                return stage.forward(action.micro_batch, given, self.loss_of(action))
            if action.kind == "B":
                return stage.backward(action.micro_batch, given)
            if action.kind == "I":
                return stage.input_gradient(action.micro_batch, given)
            stage.weight_gradient(action.micro_batch)
            return ()
        except (MemoryError, RuntimeError) as error:
            known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            if not known and "can't allocate memory" not in str(error):
                raise
            live = sum(len(stage.saved) for stage in self.stages.values() if isinstance(stage, Stage))
            raise (type(error) if known else MemoryError)(
                f"rank {self.comm.trace.rank} is out of memory in {name_of(action)}, holding the activations of "
                f"{counted(live, 'micro-batch', 'micro-batches')}: recompute=True, smaller micro-batches or more "
                f"stages need less ({(str(error) or type(error).__name__).splitlines()[0]})"
            ) from error

    def loss_of(self, action: Action) -> Loss | None:
        """Return f(output) -> loss of this micro-batch, if `action` is of a last stage."""
        loss = self.loss
        if loss is None or not self.schedule.is_last(action.stage):
            return None
        return lambda output: loss(action.micro_batch, output)


def _require_specs(specs: Sequence[Spec], tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless `tensors` are what the stage has said that it makes."""
    made, said = ([(tuple(x.shape), x.dtype) for x in found] for found in (tensors, specs))
    if made != said:
        raise ValueError(f"a stage returned {made}, but was built for {said}: has autocast or a shape changed since?")
