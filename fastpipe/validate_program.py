"""The proof that a program cannot hang, mismatch a transfer or misuse a buffer.

Structure first (every rank by itself, then every channel), then one run of the abstract machine in which no send is
complete before its receive is posted (a SEND returns; its WAIT_SEND waits). The machine is monotone, so one run that
ends shows that every run does. docs/guarantees.md says what the proof does not cover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastpipe import native_plan
from fastpipe.action import NONE, ActionKind
from fastpipe.checks import check_type
from fastpipe.dependencies import Event, feeds, needs, produces
from fastpipe.errors import ProgramError
from fastpipe.machine import COALESCED, Lanes, Machine, Outcome, Transfer, lane_numbers
from fastpipe.program import COMPUTE_OPS, Channel, ChannelKind, Instruction, Op, Program
from fastpipe.shared_queue import check_one_queue, streams_share

_STAGE_OPS = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)

Key = tuple[ChannelKind, int, int]
"""(kind, consumer stage, microbatch): which message."""


def validate_program(program: Program, *, lanes: Lanes = "directed", queues: int | None = None) -> Program:
    """Prove that every rank reaches the end of its program, whatever the timing.

    On every channel the order of sends is the order of receives, every slot is filled, read and freed in turn, and
    nothing waits in a cycle, even if a send completes only when its receive is posted. If every channel has its own
    lane, that is also proved with receives that are posted only when they are waited for, as in a step whose messages
    have headers. Such steps do not use coalesced lanes, so for these both are proved: the coalesced lanes, and a lane
    for each channel.

    Args:
        program: lowered, or loaded from elsewhere.
        lanes: which channels a transport executes in one order; see `fastpipe.machine.lane_numbers`.
        queues: the number of hardware queues for the streams of a rank (``CUDA_DEVICE_MAX_CONNECTIONS``), if lanes are
            streams, as with NCCL; None if each has its own. With fewer than 32, any streams may share a queue, and the
            proof assumes that all do; see `fastpipe.shared_queue`. It assumes that a message is one tensor.

    Returns:
        The program.

    Raises:
        ProgramError: naming rank, position and instruction; for a program that can hang, the cycle of waits.
    """
    check_type(Program, "lower gives one", program=program)
    numbers = lane_numbers(lanes, program.channels)
    _check_distinct(program)
    if lanes == COALESCED:
        validate_program(program)  # announced messages have a lane for each channel
        _check_end(program, lanes, numbers)
    elif not native_plan.is_valid_program(program, numbers):
        _validate(program, lanes, numbers)
    if streams_share(program, queues):
        if lanes != COALESCED and not _are_apart(numbers):
            raise ValueError(
                f"queues = {queues}: lanes must be 'directed' or 'coalesced' with it, as NCCL's streams are"
            )
        check_one_queue(program, coalesced=lanes == COALESCED)
        check_one_queue(program, late=True)
    return program


def _are_apart(lanes: Sequence[int]) -> bool:
    """Whether every channel has a lane of its own."""
    return len(set(lanes)) == len(lanes)


def _validate(program: Program, lanes: Lanes, numbers: list[int]) -> None:
    """The proof in Python: what csrc/plan does too, and where the errors come from."""
    _check_form(program)
    checks = [_RankCheck(program, rank) for rank in range(program.num_ranks)]
    for check in checks:
        check.run()
    _check_channels(program, checks)
    for late in (False, True) if _are_apart(numbers) else (False,):
        _check_end(program, lanes, numbers, late)


def _check_end(program: Program, lanes: Lanes, numbers: list[int], late: bool = False) -> None:
    """Run it to its end."""
    outcome = Machine(program, lanes, late=late).run()
    if outcome.blocked:
        where = ", in a step that makes its receives at their waits" if late else ""
        raise ProgramError(f"the program can hang{where}, {_describe_cycle(program, outcome, numbers)}")


def _check_distinct(program: Program) -> None:
    """Channels between ranks of the program, each once."""
    ranks = range(program.num_ranks)
    seen: dict[Channel, int] = {}
    for number, channel in enumerate(program.channels):
        if channel.source not in ranks or channel.destination not in ranks:
            raise ProgramError(f"channel {number} ({channel}): ranks are 0 to {program.num_ranks - 1}")
        if seen.setdefault(channel, number) != number:
            raise ProgramError(f"channel {number} ({channel}) is channel {seen[channel]} again: one FIFO, not two")


def _check_form(program: Program) -> None:
    """Instructions whose fields are those of their kind."""
    for rank, columns in enumerate(program.columns):
        for position, row in enumerate(zip(*columns.tolist(), strict=True)):
            wrong = _wrong_form(row, program.channels)
            if wrong:
                raise ProgramError(f"rank {rank}, position {position}, {row}: {wrong}")


def _wrong_form(row: tuple[int, ...], channels: tuple[Channel, ...]) -> str:
    op, _, microbatch, pair_stage, pair_microbatch, channel, slot = row
    if not 0 <= op < len(Op):
        return f"{op} is no operation"
    if op != Op.OVERLAP_F_B and (pair_stage, pair_microbatch) != (NONE, NONE):
        return f"{Op(op).name} has no pair; leave its fields {NONE}"
    if op in _STAGE_OPS and microbatch != NONE:
        return f"{Op(op).name} has no microbatch; leave it {NONE}"
    if op < Op.POST_RECV:
        return "" if (channel, slot) == (NONE, NONE) else f"{Op(op).name} has no channel and no slot; leave them {NONE}"
    if not 0 <= channel < len(channels):
        return f"channel {channel} is not one of 0 to {len(channels) - 1}"
    return "" if slot >= 0 else f"slot {slot} is no slot"


def _message_text(key: Key) -> str:
    kind, stage, microbatch = key
    return f"the {kind.name.lower()} for stage {stage} of microbatch {microbatch}"


@dataclass
class _Slot:
    """A receive slot in use."""

    key: Key
    channel: int
    full: bool


@dataclass
class _RankCheck:
    """Runs one rank's instructions over the states of its slots, sends and stages."""

    program: Program
    rank: int
    slots: dict[int, _Slot] = field(default_factory=dict)
    sends: dict[int, tuple[Key, int]] = field(default_factory=dict)
    arrived: dict[Key, int] = field(default_factory=dict)
    happened: set[tuple[Event, int, int]] = field(default_factory=set)
    unsent: dict[Key, int] = field(default_factory=dict)
    sent: dict[int, list[tuple[Key, int]]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[tuple[Key, int]]] = field(default_factory=lambda: defaultdict(list))
    position: int = 0
    instruction: Instruction = Instruction(Op.F)

    def run(self) -> None:
        """Check every instruction, then that nothing is left."""
        handlers = {
            Op.POST_RECV: self._post,
            Op.WAIT_RECV: self._wait,
            Op.SEND: self._send,
            Op.WAIT_SEND: self._wait_send,
            Op.HAND_OVER: self._hand_over,
            Op.FREE: self._free,
        }
        for position, instruction in enumerate(self.program[self.rank]):
            self.position, self.instruction = position, instruction
            self._check_channel()
            handler = handlers.get(self.instruction.op)
            if handler is not None:
                handler()
            elif self.instruction.op in COMPUTE_OPS:
                self._compute()
            elif self.instruction.stage not in self.program.placement.stages_of(self.rank):
                raise self._error(f"rank {self.rank} does not hold stage {self.instruction.stage}")
        self._check_end()

    def _error(self, what: str) -> ProgramError:
        text = self.program[self.rank].text(self.instruction)
        return ProgramError(f"rank {self.rank}, position {self.position}, {text}: {what}")

    def _check_channel(self) -> None:
        instruction = self.instruction
        if instruction.op < Op.POST_RECV:
            return
        channel = self.program.channels[instruction.channel]
        sends = instruction.op in (Op.SEND, Op.WAIT_SEND)
        if (channel.source if sends else channel.destination) != self.rank:
            raise self._error(f"rank {self.rank} is not the {'source' if sends else 'destination'} of {channel}")
        if (channel.source == channel.destination) != (instruction.op == Op.HAND_OVER) and instruction.op != Op.FREE:
            raise self._error("a hand-over stays on its rank, and a transfer goes to another one")

    def _key(self) -> Key:
        """The message an instruction is about, by its consumer."""
        instruction = self.instruction
        kind = self.program.channels[instruction.channel].kind
        stage = instruction.stage
        if instruction.op in (Op.SEND, Op.WAIT_SEND):
            stage += kind.direction
        return kind, stage, instruction.microbatch

    def _occupy(self, full: bool) -> None:
        slot, key = self.instruction.slot, self._key()
        if slot in self.slots:
            raise self._error(f"slot {slot} still holds {_message_text(self.slots[slot].key)}")
        self.slots[slot] = _Slot(key, self.instruction.channel, full)
        if full:
            self.arrived[key] = slot

    def _post(self) -> None:
        self._occupy(full=False)
        self.received[self.instruction.channel].append((self._key(), self.position))

    def _wait(self) -> None:
        slot, key = self.slots.get(self.instruction.slot), self._key()
        if slot is None or (slot.key, slot.channel) != (key, self.instruction.channel):
            raise self._error(f"no receive of {_message_text(key)} is posted to slot {self.instruction.slot}")
        if slot.full:
            raise self._error("it was already waited for")
        slot.full = True
        self.arrived[key] = self.instruction.slot

    def _take_product(self) -> Key:
        key = self._key()
        if key not in self.unsent:
            raise self._error(f"{_message_text(key)} is not there to hand on: it was not computed, or went already")
        del self.unsent[key]
        return key

    def _send(self) -> None:
        if self.instruction.slot in self.sends:
            raise self._error(f"send {self.instruction.slot} is still under way; wait for it first")
        key = self._take_product()
        self.sends[self.instruction.slot] = (key, self.instruction.channel)
        self.sent[self.instruction.channel].append((key, self.position))

    def _wait_send(self) -> None:
        if self.sends.get(self.instruction.slot) != (self._key(), self.instruction.channel):
            raise self._error(f"send {self.instruction.slot} is not under way with it")
        del self.sends[self.instruction.slot]

    def _hand_over(self) -> None:
        self._take_product()
        self._occupy(full=True)

    def _free(self) -> None:
        slot, key = self.slots.get(self.instruction.slot), self._key()
        if slot is None or (slot.key, slot.channel) != (key, self.instruction.channel):
            raise self._error(f"slot {self.instruction.slot} does not hold {_message_text(key)}")
        if not slot.full:
            raise self._error("its message was not waited for")
        _, stage, microbatch = key
        last = Event.FORWARD if self.program.forward_only else Event.WEIGHT
        if (last, stage, microbatch) not in self.happened:
            raise self._error(
                f"stage {stage} still reads it: free it after the last compute of microbatch {microbatch}"
            )
        del self.slots[self.instruction.slot]
        del self.arrived[key]

    def _compute(self) -> None:
        action = self.instruction.action
        assert action is not None
        placement, num_stages = self.program.placement, self.program.num_stages
        if self.program.forward_only and action.kind is not ActionKind.F:
            raise self._error("the program is forward-only: its inputs are freed after F")
        for part in action.parts:
            if not (0 <= part.stage < num_stages and 0 <= part.microbatch < self.program.num_microbatches):
                raise self._error(f"{part} names no stage or microbatch of the program")
            route = placement.route_of(part.microbatch, self.program.num_microbatches)
            if placement.rank_of(part.stage, route) != self.rank:
                raise self._error(f"{part} does not belong to rank {self.rank}")
            for event, stage in needs(part.kind, part.stage, num_stages):
                self._check_need(event, stage, part.stage, part.microbatch)
        for part in action.parts:
            for event in produces(part.kind):
                if (event, part.stage, part.microbatch) in self.happened:
                    raise self._error(f"{part} was already done")
                self.happened.add((event, part.stage, part.microbatch))
            target = feeds(part.kind, part.stage, num_stages)
            if target != NONE:
                self.unsent[ChannelKind.of(part.kind), target, part.microbatch] = self.position

    def _check_need(self, event: Event, stage: int, own: int, microbatch: int) -> None:
        if stage == own:
            if (event, stage, microbatch) not in self.happened:
                raise self._error(
                    f"it needs the {event.name.lower()} of stage {stage}, microbatch {microbatch} before it"
                )
            return
        kind = ChannelKind.ACTIVATION if event is Event.FORWARD else ChannelKind.GRADIENT
        key = (kind, own, microbatch)
        if key not in self.arrived:
            raise self._error(f"{_message_text(key)} has not arrived: wait for it, or hand it over, first")

    def _check_end(self) -> None:
        where = f"rank {self.rank}, end of the program"
        for slot, held in self.slots.items():
            raise ProgramError(f"{where}: slot {slot} still holds {_message_text(held.key)}; free it")
        for number, (key, _) in self.sends.items():
            raise ProgramError(f"{where}: send {number} of {_message_text(key)} is never waited for")
        for key, position in self.unsent.items():
            raise ProgramError(
                f"rank {self.rank}, position {position}: {_message_text(key)} is computed here and never sent or "
                "handed over"
            )
        self._check_computed(where)

    def _check_computed(self, where: str) -> None:
        placement, count = self.program.placement, self.program.num_microbatches
        wanted = [Event.FORWARD] if self.program.forward_only else list(Event)
        for stage in placement.stages_of(self.rank):
            for microbatch in range(count):
                if placement.rank_of(stage, placement.route_of(microbatch, count)) != self.rank:
                    continue
                for event in wanted:
                    if (event, stage, microbatch) not in self.happened:
                        what = {Event.FORWARD: "F", Event.BACKWARD: "B or I", Event.WEIGHT: "B or W"}[event]
                        raise ProgramError(f"{where}: stage {stage}, microbatch {microbatch} had no {what}")


def _check_channels(program: Program, checks: list[_RankCheck]) -> None:
    """On every channel the messages are received in the order in which they are sent."""
    for number, channel in enumerate(program.channels):
        sent = checks[channel.source].sent[number]
        received = checks[channel.destination].received[number]
        for index in range(max(len(sent), len(received))):
            name = f"channel {number} ({channel}), message {index}"
            if index >= len(received):
                key, position = sent[index]
                raise ProgramError(
                    f"{name}: rank {channel.source} sends {_message_text(key)} at position {position}, and rank "
                    f"{channel.destination} never receives it"
                )
            if index >= len(sent):
                key, position = received[index]
                raise ProgramError(
                    f"{name}: rank {channel.destination} receives {_message_text(key)} at position {position}, and "
                    f"rank {channel.source} never sends it"
                )
            (out, at), (into, to) = sent[index], received[index]
            if out != into:
                raise ProgramError(
                    f"{name}: rank {channel.source} sends {_message_text(out)} at position {at}, while rank "
                    f"{channel.destination} receives {_message_text(into)} at position {to}: messages have no tag, "
                    "so the receiver would take one for the other"
                )


def _describe_cycle(program: Program, outcome: Outcome, lanes: Sequence[int]) -> str:
    """Follow the waits from any blocked rank until a transfer comes again.

    Args:
        outcome: of a run that got stuck, of a program in which every send has its receive.
    """
    path: list[Transfer] = []
    lines: list[str] = []
    head, behind = _head_of(outcome, outcome.blocked[min(outcome.blocked)], lanes)
    while head not in path:
        peer = program.channels[head.channel].peer_of(head.rank)
        path.append(head)
        lines.append(_text(program, outcome, head, behind, peer))
        head, behind = _head_of(outcome, _what_holds_up(outcome, head, peer, lanes), lanes)
    return "ranks wait in a cycle: " + "; ".join(lines[path.index(head) :])


def _head_of(outcome: Outcome, transfer: Transfer, lanes: Sequence[int]) -> tuple[Transfer, Transfer]:
    """What stands at the head of the transfer's queue, and the transfer itself."""
    return outcome.queues[lanes[transfer.channel], transfer.rank][0], transfer


def _what_holds_up(outcome: Outcome, head: Transfer, peer: int, lanes: Sequence[int]) -> Transfer:
    """Why a peer does not answer a head: another transfer is at its own head, or it has not come that far."""
    queue = outcome.queues.get((lanes[head.channel], peer))
    return queue[0] if queue else outcome.blocked[peer]


def _text(program: Program, outcome: Outcome, head: Transfer, behind: Transfer, peer: int) -> str:
    blocked = outcome.blocked.get(head.rank)
    where = "" if blocked is None else f" (blocked in its wait for position {blocked.position})"
    instruction = program[head.rank][head.position]
    lane = "" if head is behind else f", ahead of position {behind.position} in the same lane,"
    text = program[head.rank].text(instruction)
    return f"rank {head.rank}{where}: position {head.position}, {text}{lane} waits for rank {peer}"
