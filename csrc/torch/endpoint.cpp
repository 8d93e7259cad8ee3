#include "endpoint.h"

#include <utility>

namespace fastpipe {

namespace {

std::vector<std::unique_ptr<TensorPayload>> payloads(std::int32_t count) {
  std::vector<std::unique_ptr<TensorPayload>> made(count);
  for (auto& payload : made) payload = std::make_unique<TensorPayload>(at::Device(at::kCPU));
  return made;
}

}  // namespace

Endpoint::Endpoint(TransportSource& source, const RankProgram& program, double timeout_seconds)
    : program_(program),
      slots_(payloads(program.num_slots())),
      sends_(payloads(program.num_sends())),
      transport_(source.connect(program, timeout_seconds)) {}

void Endpoint::begin(std::int64_t signature, bool announce) {
  end(true);
  transport_->begin_step(signature, announce);
  in_step_ = true;
}

void Endpoint::end(bool complete) {
  for (const auto& payload : slots_) payload->clear();
  for (const auto& payload : sends_) payload->clear();
  if (std::exchange(in_step_, false)) transport_->end_step(complete);
}

Transfer Endpoint::transfer(std::size_t position) const {
  const Instruction it = program_[position];
  return {position, it.channel, it.stage, it.microbatch};
}

void Endpoint::post_receive(std::size_t position) {
  const std::int32_t slot = program_[position].slot;
  transport_->post_receive(transfer(position), slot, *slots_.at(slot));
}

std::optional<std::vector<at::Tensor>> Endpoint::wait_receive(std::int32_t slot) {
  TensorPayload& payload = *slots_.at(slot);
  std::optional<std::vector<at::Tensor>> found;
  if (transport_->wait_receive(slot)) found = payload.tensors();
  // The caller's from now on; when it lets go of them, the sender may have the memory.
  payload.clear();
  return found;
}

void Endpoint::send(std::size_t position, const std::optional<std::vector<at::Tensor>>& tensors) {
  const std::int32_t number = program_[position].slot;
  if (!tensors) return transport_->post_stand_in(transfer(position), number);
  TensorPayload& payload = *sends_.at(number);
  payload.clear();
  for (const at::Tensor& tensor : *tensors) payload.add(tensor);
  payload.pack();
  transport_->post_send(transfer(position), number, payload);
}

void Endpoint::wait_send(std::int32_t number) {
  transport_->wait_send(number);
  sends_.at(number)->clear();
}

}  // namespace fastpipe
