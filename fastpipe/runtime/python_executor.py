"""The reference interpreter of a program: plain Python, the same bits as the native one."""

from __future__ import annotations

import time

import numpy as np
import torch

from fastpipe.action import NONE, ActionKind
from fastpipe.dependencies import feeds
from fastpipe.program import ChannelKind, Instruction, Op
from fastpipe.runtime.executor import Drained, Executor, Seconds
from fastpipe.runtime.tensors import Tensors, handed_over
from fastpipe.runtime.transport import Message

_LABEL_PREFIX = "PP:"
"""As torch's pipelines label theirs. Without it torch's profiler takes "2F0" for a mangled C++ name and shows "F0"."""


class PythonExecutor(Executor):
    """Interprets one rank's program; see `Executor`."""

    def _prepare(self) -> None:
        self.instructions = list(self.program[self.rank])
        self.split = {(it.stage, it.microbatch) for it in self.instructions if it.op is Op.I}
        self.endpoint = self.transport.endpoint(self.program, self.rank, self.timeout)
        self.handlers = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.OVERLAP_F_B: self._overlapped,
            Op.POST_RECV: self._post_recv,
            Op.WAIT_RECV: self._wait_recv,
            Op.SEND: self._send,
            Op.WAIT_SEND: self._wait_send,
            Op.HAND_OVER: self._hand_over,
            Op.FREE: self._free,
            # nothing is sharded, and gradients that two ranks hold are summed after the step
            Op.UNSHARD: self._nothing,
            Op.RESHARD: self._nothing,
            Op.REDUCE_GRAD: self._nothing,
        }
        self.failed = False
        self.error: BaseException | None = None
        self.arrived: dict[Message, Tensors] = {}
        self.made: dict[Message, Tensors] = {}

    def fail(self) -> None:
        """Drain from the next instruction on."""
        self.failed = True

    def run(self, signature: int, announce: bool) -> tuple[Seconds, Seconds]:
        """Run one step; see `Executor.run`."""
        starts = np.full(len(self.instructions), np.nan)
        ends = np.full(len(self.instructions), np.nan)
        self.failed, self.error = False, None
        self.endpoint.begin(signature, announce)
        sends: dict[int, int] = {}
        for position, instruction in enumerate(self.instructions):
            starts[position] = time.perf_counter()
            self._execute(position, instruction)
            ends[position] = time.perf_counter()
            if instruction.op is Op.SEND:
                sends[instruction.slot] = position
            elif instruction.op is Op.WAIT_SEND:
                ends[sends[instruction.slot]] = ends[position]
        self._finish()
        return starts, ends

    def _finish(self) -> None:
        self.arrived.clear()
        self.made.clear()
        if not self.failed:
            return
        for stage in self.stages.values():
            stage.end()
        self.endpoint.end()
        error, self.error = self.error, None
        raise error if error is not None else Drained

    def _execute(self, position: int, instruction: Instruction) -> None:
        handler = self.handlers[instruction.op]
        try:
            if instruction.action is None:
                handler(instruction)
            elif not self.failed:
                with torch.profiler.record_function(f"{_LABEL_PREFIX}{instruction.action}"):
                    handler(instruction)
        except BaseException as error:
            self._fail_at(position, error)
            if instruction.op is Op.SEND:
                # it was refused before anything was sent: the receiver still waits for a message
                self._send_stand_in(position, instruction)

    def _send_stand_in(self, position: int, instruction: Instruction) -> None:
        try:
            self.endpoint.send(self._produced(instruction), instruction.channel, instruction.slot, None)
        except BaseException as error:
            self._fail_at(position, error)

    def _fail_at(self, position: int, error: BaseException) -> None:
        self.failed = True
        if self.error is None:
            self.error = error
            self.on_failure(position, error)

    def _message(self, instruction: Instruction) -> Message:
        kind = self.program.channels[instruction.channel].kind
        return Message(kind, instruction.stage, instruction.microbatch)

    def _produced(self, instruction: Instruction) -> Message:
        """The message of a SEND, whose stage is the producer."""
        kind = self.program.channels[instruction.channel].kind
        step = 1 if kind is ChannelKind.ACTIVATION else -1
        return Message(kind, instruction.stage + step, instruction.microbatch)

    def _forward(self, instruction: Instruction) -> None:
        self._run_forward(instruction.stage, instruction.microbatch)

    def _run_forward(self, stage: int, microbatch: int) -> None:
        inputs = self.arrived.get(Message(ChannelKind.ACTIVATION, stage, microbatch), ())
        outputs = self.stages[stage].forward(microbatch, inputs, splits=(stage, microbatch) in self.split)
        self._keep(Op.F, stage, microbatch, outputs)

    def _keep(self, op: Op, stage: int, microbatch: int, tensors: Tensors) -> None:
        """What a compute action made, until it is sent or handed over."""
        target = feeds(ActionKind(op), stage, self.program.num_stages)
        if target != NONE:
            kind = ChannelKind.ACTIVATION if op is Op.F else ChannelKind.GRADIENT
            self.made[Message(kind, target, microbatch)] = tensors

    def _grads(self, stage: int, microbatch: int) -> Tensors:
        return self.arrived.get(Message(ChannelKind.GRADIENT, stage, microbatch), ())

    def _backward(self, instruction: Instruction) -> None:
        self._run_backward(instruction.stage, instruction.microbatch)

    def _run_backward(self, stage: int, microbatch: int) -> None:
        grads = self.stages[stage].backward(microbatch, self._grads(stage, microbatch))
        self._keep(Op.B, stage, microbatch, grads)

    def _backward_input(self, instruction: Instruction) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        grads = self.stages[stage].backward_input(microbatch, self._grads(stage, microbatch))
        self._keep(Op.I, stage, microbatch, grads)

    def _backward_weight(self, instruction: Instruction) -> None:
        self.stages[instruction.stage].backward_weight(instruction.microbatch)

    def _overlapped(self, instruction: Instruction) -> None:
        self._run_forward(instruction.stage, instruction.microbatch)
        self._run_backward(instruction.pair_stage, instruction.pair_microbatch)

    def _post_recv(self, instruction: Instruction) -> None:
        self.endpoint.post_recv(self._message(instruction), instruction.channel, instruction.slot)

    def _wait_recv(self, instruction: Instruction) -> None:
        tensors = self.endpoint.wait_recv(instruction.channel, instruction.slot)
        if tensors is None:
            self.failed = True
        else:
            self.arrived[self._message(instruction)] = tensors

    def _send(self, instruction: Instruction) -> None:
        message = self._produced(instruction)
        tensors = self.made.pop(message, None)
        self.endpoint.send(message, instruction.channel, instruction.slot, None if self.failed else tensors)

    def _wait_send(self, instruction: Instruction) -> None:
        self.endpoint.wait_send(instruction.slot)

    def _hand_over(self, instruction: Instruction) -> None:
        message = self._message(instruction)
        tensors = self.made.pop(message, None)
        if tensors is not None and not self.failed:
            self.arrived[message] = handed_over(tensors)

    def _free(self, instruction: Instruction) -> None:
        self.arrived.pop(self._message(instruction), None)

    def _nothing(self, instruction: Instruction) -> None:
        """An instruction that needs no work here."""
