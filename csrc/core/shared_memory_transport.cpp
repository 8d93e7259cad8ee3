#include "shared_memory_transport.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common.h"
#include "host_memory.h"

namespace fastpipe {

SharedMemoryLease::SharedMemoryLease(ReceivedCell cell) : cell_(std::move(cell)), process_(::getpid()) {}

SharedMemoryLease::~SharedMemoryLease() {
  // A forked process (a data loader's, say) has copies of the tensors and shares their memory: it must not free it.
  if (cell_.words == nullptr || ::getpid() != process_) return;
  cell_.words->state.store(kCellFree);
  cell_.sender->wake_if_starved();
}

void ReceivedCell::report_freed() {
  const ReceivedCell cell = std::exchange(*this, {});
  std::uint64_t expected = cell.used;
  // It fails when the cell is free, or has the next message already, whose number differs.
  if (cell.words != nullptr && cell.words->state.compare_exchange_strong(expected, cell.used | kHeldMark)) {
    cell.sender->wake_if_starved();
  }
}

namespace {

// So many messages more than the receiver asks for, so that the sender can run ahead while it computes; of small ones
// as many as a step has.
constexpr std::size_t kAhead = 2;
constexpr std::size_t kSmallBytes = std::size_t{1} << 20;

}  // namespace

bool SharedMemoryCells::Part::idle() const {
  for (std::size_t cell = 0; cell < num_cells; ++cell) {
    if (words(cell).state.load() != kCellFree) return false;
  }
  return true;
}

CellWords* SharedMemoryCells::find(RingEntry& entry) {
  const std::size_t bytes = entry.bytes;
  std::size_t usable = 0;
  for (const Part& part : parts_) {
    if (part.capacity < bytes || part.retired()) continue;
    // The first that is free: few cells are touched, and these stay in the cache.
    for (std::size_t cell = 0; cell < part.num_cells; ++cell) {
      const std::uint64_t state = part.words(cell).state.load();
      if (state == kCellFree) return take(part, cell, entry);
      if ((state & kHeldMark) == 0) ++usable;
    }
  }
  const std::size_t enough = wanted(bytes);
  if (usable >= enough) return nullptr;
  grow(bytes, enough - usable);
  return take(parts_.back(), 0, entry);
}

std::size_t SharedMemoryCells::wanted(std::size_t bytes) const {
  const std::size_t small = std::min<std::size_t>(num_messages_, kSmallBytes / std::max<std::size_t>(bytes, 1));
  return std::max<std::size_t>(slots_ + kAhead, small);
}

CellWords* SharedMemoryCells::take(const Part& part, std::size_t index, RingEntry& entry) {
  entry.segment = part.number;
  entry.segment_bytes = part.memory->size();
  entry.offset = part.offset(index);
  entry.descriptor = part.memory->descriptor();
  return &part.words(index);
}

void SharedMemoryCells::grow(std::size_t bytes, std::size_t num_cells) {
  std::size_t largest = 0;
  for (const Part& part : parts_) largest = std::max(largest, part.capacity);
  // Twice the last, so that messages that grow bit by bit do not leave one segment each behind.
  const std::size_t capacity = whole_lines(bytes > largest ? std::max(bytes, 2 * largest) : largest);
  Part part{nullptr, num_parts_ + 1, std::max(capacity, kSharedLine), num_cells};
  part.memory = SharedMemorySegment::make(part.offset(num_cells));
  retire_below(part.capacity);
  parts_.push_back(std::move(part));
  ++num_parts_;
}

void SharedMemoryCells::retire_below(std::size_t capacity) {
  for (const Part& part : parts_) {
    if (part.capacity < capacity) part.memory->at<CellSegmentWords>(0)->retired.store(1);
  }
}

void SharedMemoryCells::sweep() {
  const auto done = [](const Part& part) { return part.retired() && part.idle(); };
  parts_.erase(std::remove_if(parts_.begin(), parts_.end(), done), parts_.end());
}

namespace {

void require(bool holds) {
  if (holds) return;
  throw Error("shared memory: what was received makes no sense; run the same version of fastpipe on every rank");
}

}  // namespace

SharedMemoryInbox::SharedMemoryInbox(std::int32_t channel, std::shared_ptr<SharedMemoryPeer> peer, std::size_t program,
                                     std::uint64_t fingerprint)
    : channel_(channel), peer_(std::move(peer)), program_(program), fingerprint_(fingerprint) {}

bool SharedMemoryInbox::arrived() {
  return (ring_ != nullptr || open()) && ring_->sent.load() > taken_;
}

bool SharedMemoryInbox::open() {
  auto rings = rings_of(*peer_, program_, fingerprint_);
  if (!rings) return false;
  const std::uint64_t offset = rings->at<std::uint64_t>(0)[channel_];
  require(offset > 0 && offset + sizeof(RingWords) <= rings->size());
  ring_ = rings->at<RingWords>(offset);
  require(offset + sizeof(RingWords) + ring_->num_entries * sizeof(RingEntry) <= rings->size());
  sender_ = std::make_shared<CellSender>(CellSender{std::move(rings), ring_, peer_});
  return true;
}

SharedMemoryMessage SharedMemoryInbox::take() {
  const RingEntry entry = reinterpret_cast<const RingEntry*>(ring_ + 1)[taken_ % ring_->num_entries];
  SharedMemoryMessage message;
  message.stage = entry.stage;
  message.microbatch = entry.microbatch;
  message.stand_in = entry.stand_in != 0;
  if (!message.stand_in) read_cell(entry, message);
  ++taken_;
  ring_->taken.store(taken_);
  sender_->wake_if_starved();
  return message;
}

void SharedMemoryInbox::read_cell(const RingEntry& entry, SharedMemoryMessage& message) {
  const auto& segment = segment_of(entry);
  const std::uint64_t begin = entry.offset + sizeof(CellWords);
  require(begin <= segment->size() && entry.bytes <= segment->size() - begin);
  auto* const words = segment->at<CellWords>(entry.offset);
  message.cell = {sender_, segment, words, words->state.load()};
  message.bytes = {segment->data() + begin, entry.bytes, entry.announced != 0};
  message.lease = SharedMemoryLease(message.cell);
}

const std::shared_ptr<SharedMemorySegment>& SharedMemoryInbox::segment_of(const RingEntry& entry) {
  auto found = segments_.find(entry.segment);
  if (found == segments_.end()) {
    auto opened = peer_->open(entry.descriptor, entry.segment_bytes);
    sweep();
    found = segments_.emplace(entry.segment, std::move(opened)).first;
  }
  return found->second;
}

// Tensors that are still in what the sender has retired keep it.
void SharedMemoryInbox::sweep() {
  for (auto it = segments_.begin(); it != segments_.end();) {
    const bool retired = it->second->at<CellSegmentWords>(0)->retired.load() != 0;
    it = retired ? segments_.erase(it) : std::next(it);
  }
}

SharedMemoryOutbox::SharedMemoryOutbox(const Codec& codec, std::int32_t channel, RingWords& ring,
                                       std::uint64_t num_entries, SharedMemoryCells cells,
                                       std::shared_ptr<SharedMemoryPeer> peer)
    : codec_(codec),
      channel_(channel),
      ring_(ring),
      entries_(reinterpret_cast<RingEntry*>(&ring + 1)),
      cells_(std::move(cells)),
      peer_(std::move(peer)) {
  ring_.num_entries = num_entries;
}

void SharedMemoryOutbox::post(SharedMemorySend& send) {
  if (queue_.empty() && copy(send)) return;
  send.state = SharedMemorySend::State::kPosted;
  queue_.push_back(&send);
}

bool SharedMemoryOutbox::advance() {
  while (!queue_.empty()) {
    SharedMemorySend& send = *queue_.front();
    try {
      if (!copy(send)) {
        // Said before the last look: whoever makes room after that look sees it and rings.
        if (ring_.starved.load(std::memory_order_relaxed) != 0) return false;
        ring_.starved.store(1);
        continue;
      }
    } catch (...) {
      replace_front();
      throw;
    }
    queue_.pop_front();
  }
  if (ring_.starved.load(std::memory_order_relaxed) != 0) ring_.starved.store(0, std::memory_order_relaxed);
  return true;
}

void SharedMemoryOutbox::replace_front() {
  // No memory, say. The receiver must get something in its place; an entry needs none.
  SharedMemorySend& send = *queue_.front();
  send.from = nullptr;
  if (copy(send)) queue_.pop_front();
}

bool SharedMemoryOutbox::copy(SharedMemorySend& send) {
  if (sent_ - ring_.taken.load() >= ring_.num_entries) return false;
  RingEntry entry{};
  entry.stage = send.stage;
  entry.microbatch = send.microbatch;
  entry.stand_in = send.from == nullptr ? 1 : 0;
  entry.announced = send.announced ? 1 : 0;
  if (send.from != nullptr && !copy_payload(send, entry)) return false;
  publish(send, entry);
  return true;
}

bool SharedMemoryOutbox::copy_payload(const SharedMemorySend& send, RingEntry& entry) {
  entry.bytes = codec_.size(*send.from, send.announced);
  CellWords* const cell = cells_.find(entry);
  if (cell == nullptr) return false;
  codec_.write(*send.from, {reinterpret_cast<std::byte*>(cell + 1), entry.bytes, send.announced});
  cell->state.store(used_cell(sent_), std::memory_order_relaxed);  // the receiver sees it when it sees `sent`
  return true;
}

void SharedMemoryOutbox::publish(SharedMemorySend& send, const RingEntry& entry) {
  entries_[sent_ % ring_.num_entries] = entry;
  ++sent_;
  ring_.sent.store(sent_);
  peer_->wakeup().notify(for_channel(channel_));
  send.state = SharedMemorySend::State::kCopied;
  send.completed = now_seconds();
}

std::vector<bool> channels_between_ranks(const std::vector<Channel>& channels) {
  std::vector<bool> found;
  for (const Channel& channel : channels) found.push_back(!channel.local());
  return found;
}

void count_needs(const RankProgram& program, std::vector<ChannelNeeds>& needs) {
  std::vector<std::int32_t> in_use(needs.size());
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.channel == kNone || program.channels()[it.channel].local()) continue;
    ChannelNeeds& channel = needs.at(it.channel);
    if (it.op == Op::kPostRecv) {
      ++channel.messages;
      channel.slots = std::max(channel.slots, ++in_use[it.channel]);
    } else if (it.op == Op::kFree) {
      --in_use[it.channel];
    }
  }
}

SharedMemoryChannels::SharedMemoryChannels(std::shared_ptr<SharedMemoryLink> link, std::shared_ptr<const Codec> codec,
                                           std::vector<ChannelNeeds> needs, std::vector<bool> carried)
    : link_(std::move(link)),
      codec_(std::move(codec)),
      needs_(std::move(needs)),
      carried_(std::move(carried)),
      number_(link_->number_program()) {}

Connect over_shared_memory(std::shared_ptr<const SharedMemoryChannels> channels) {
  return [channels = std::move(channels)](const RankProgram& program, double timeout_seconds) {
    channels->check(program);
    return std::make_unique<SharedMemoryTransport>(*channels, program, timeout_seconds);
  };
}

void SharedMemoryChannels::check(const RankProgram& program) const {
  if (program.rank() == link_->rank() && program.channels().size() == needs_.size()) return;
  throw ArgumentError("this shared memory was made for " + std::to_string(needs_.size()) + " channels and rank " +
                      std::to_string(link_->rank()) + ", the program has " + std::to_string(program.channels().size()) +
                      " and is rank " + std::to_string(program.rank()) + "'s; make a source for each program");
}

std::uint64_t SharedMemoryChannels::fingerprint() const {
  std::uint64_t sum = 0xcbf29ce484222325;  // FNV
  for (const ChannelNeeds& channel : needs_) {
    for (const std::int32_t number : {channel.slots, channel.messages}) {
      sum = (sum ^ static_cast<std::uint64_t>(number)) * 0x100000001b3;
    }
  }
  return sum;
}

namespace {

// Entries beyond a step's messages, so that the next step can begin before the last is taken.
constexpr std::uint64_t kSpareEntries = 8;

std::uint64_t num_entries(const ChannelNeeds& needs) {
  return static_cast<std::uint64_t>(needs.messages) + kSpareEntries;
}

}  // namespace

SharedMemoryTransport::SharedMemoryTransport(const SharedMemoryChannels& source, const RankProgram& program,
                                             double timeout_seconds)
    : link_(source.link()),
      codec_(source.codec()),
      program_(program),
      timeout_seconds_(timeout_seconds),
      specs_(program.size()),
      outboxes_(program.channels().size()),
      inboxes_(program.channels().size()),
      queues_(program.channels().size()),
      receives_(program.num_slots()),
      sends_(program.num_sends()),
      broken_(program.rank()) {
  make_rings(source);
  const std::vector<Channel>& channels = program_.channels();
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (!source.carries(i) || channels[i].destination != program_.rank()) continue;
    inboxes_[i] = std::make_unique<SharedMemoryInbox>(static_cast<std::int32_t>(i), link_->peer(channels[i].source),
                                                      source.number(), source.fingerprint());
  }
}

// A table of where each channel's ring is, and the rings of those that this rank sends on.
void SharedMemoryTransport::make_rings(const SharedMemoryChannels& source) {
  const std::vector<Channel>& channels = program_.channels();
  const auto sends_on = [&](std::size_t i) { return source.carries(i) && channels[i].source == program_.rank(); };
  std::vector<std::uint64_t> offsets(channels.size());
  std::size_t size = std::max(kSharedLine, whole_lines(channels.size() * sizeof(std::uint64_t)));
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (!sends_on(i)) continue;
    offsets[i] = size;
    size += sizeof(RingWords) + num_entries(source.needs(i)) * sizeof(RingEntry);
  }
  rings_ = SharedMemorySegment::make(size);
  std::copy(offsets.begin(), offsets.end(), rings_->at<std::uint64_t>(0));
  for (std::size_t i = 0; i < channels.size(); ++i) {
    if (!sends_on(i)) continue;
    const ChannelNeeds& needs = source.needs(i);
    outboxes_[i] = std::make_unique<SharedMemoryOutbox>(
        *codec_, static_cast<std::int32_t>(i), *rings_->at<RingWords>(offsets[i]), num_entries(needs),
        SharedMemoryCells(needs.slots, needs.messages), link_->peer(channels[i].destination));
  }
  link_->publish(source.number(), *rings_, source.fingerprint());
}

void SharedMemoryTransport::begin_step(std::int64_t signature, bool announce) {
  broken_.require_none();
  report_held_cells();
  specs_.open(signature, announce);
}

void SharedMemoryTransport::post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) {
  Receive& receive = receives_[slot];
  receive.cell.report_freed();
  receive.state = Receive::State::kIdle;
  if (broken_.has(program_.peer_of(transfer.channel))) return;
  receive.transfer = transfer;
  receive.into = &into;
  receive.state = Receive::State::kPosted;
  queues_[transfer.channel].push_back(slot);
}

bool SharedMemoryTransport::wait_receive(std::int32_t slot) {
  Receive& receive = receives_[slot];
  while (receive.state == Receive::State::kPosted && !broken_.has(program_.peer_of(receive.transfer.channel))) {
    receive_next(receive.transfer.channel);
  }
  const bool arrived = receive.state == Receive::State::kArrived;
  receive.state = Receive::State::kIdle;
  return arrived && !receive.stand_in;
}

void SharedMemoryTransport::receive_next(std::int32_t channel) {
  SharedMemoryInbox& inbox = *inboxes_[channel];
  Receive& receive = receives_[queues_[channel].front()];
  const std::size_t position = receive.transfer.position;
  wait(inbox.peer(), for_channel(channel), position, [&] { return arrived(inbox, position); });
  queues_[channel].pop_front();
  receive.state = Receive::State::kIdle;  // should it fail, it is not tried again
  try {
    deliver(receive, inbox.take());
  } catch (const std::exception& error) {
    drop_peer(inbox.peer().rank(), error.what());
    refuse_message(inbox.peer(), position, error);
  }
  receive.state = Receive::State::kArrived;
}

// Who cannot open a ring cannot take what comes in it either, and the next step would find it there. The peer is broken
// when this step has ended: until then it waits for what it is sent.
bool SharedMemoryTransport::arrived(SharedMemoryInbox& inbox, std::size_t position) {
  try {
    return inbox.arrived();
  } catch (const std::exception& error) {
    dropped_.emplace_back(inbox.peer().rank(), error.what());
    refuse_message(inbox.peer(), position, error);
  }
}

void SharedMemoryTransport::deliver(Receive& receive, SharedMemoryMessage message) {
  const Transfer& transfer = receive.transfer;
  if (message.stage != transfer.stage || message.microbatch != transfer.microbatch) {
    throw Error("it sent the message for stage " + std::to_string(message.stage) + ", microbatch " +
                std::to_string(message.microbatch));
  }
  receive.stand_in = message.stand_in;
  if (message.stand_in) return;
  if (message.bytes.announced != specs_.announcing()) throw Error("one rank announces this step and one does not");
  if (message.bytes.announced) specs_.learn(transfer.position, codec_->read_spec(message.bytes));
  receive.cell = std::move(message.cell);
  codec_->adopt(*receive.into, specs_.at(transfer.position), message.bytes, std::move(message.lease));
}

void SharedMemoryTransport::post_send(const Transfer& transfer, std::int32_t send, const Payload& from) {
  specs_.learn_or_check(transfer.position, from, program_);
  hand_over(transfer, send, &from);
}

void SharedMemoryTransport::post_stand_in(const Transfer& transfer, std::int32_t send) {
  hand_over(transfer, send, nullptr);
}

void SharedMemoryTransport::hand_over(const Transfer& transfer, std::int32_t send, const Payload* from) {
  SharedMemorySend& it = sends_[send];
  it = SharedMemorySend{};
  it.channel = transfer.channel;
  it.stage = transfer.consumer(program_.channels()[transfer.channel].kind);
  it.microbatch = transfer.microbatch;
  it.from = from;
  it.announced = specs_.announcing();
  it.position = transfer.position;
  if (broken_.has(program_.peer_of(transfer.channel))) return;
  SharedMemoryOutbox& outbox = *outboxes_[it.channel];
  outbox.advance();
  outbox.post(it);
}

double SharedMemoryTransport::wait_send(std::int32_t send) {
  SharedMemorySend& it = sends_[send];
  const SharedMemorySend::State posted = SharedMemorySend::State::kPosted;
  if (it.state == posted && !broken_.has(program_.peer_of(it.channel))) {
    wait(outboxes_[it.channel]->peer(), kForSpace, it.position, [&] { return it.state != posted; });
  }
  it.state = SharedMemorySend::State::kIdle;
  return it.completed;
}

bool SharedMemoryTransport::advance() {
  bool idle = true;
  for (const auto& outbox : outboxes_) {
    if (outbox && !outbox->idle()) idle = outbox->advance() && idle;
  }
  return idle;
}

void SharedMemoryTransport::report_held_cells() {
  for (Receive& receive : receives_) {
    if (receive.cell.words != nullptr && receive.into->empty()) receive.cell.report_freed();
  }
}

void SharedMemoryTransport::wait(const SharedMemoryPeer& peer, std::uint32_t reason, std::size_t position,
                                 FunctionRef<bool()> ready) {
  const auto look = [&] {
    advance();
    return ready();
  };
  if (comes_true_soon(link_->spin(), look)) return;
  report_held_cells();
  SharedMemoryWakeup& wakeup = link_->wakeup();
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds_);
  while (true) {
    const auto waited = wakeup.wait(reason, look);
    if (waited == SharedMemoryWakeup::Waited::kNot) return;
    const bool woken = waited == SharedMemoryWakeup::Waited::kUntilWoken;
    // Asked before the last look, for what it sent before it died counts.
    const bool alive = woken || peer.alive();
    if (look()) return;
    if (!woken) check_signals();
    if (const auto lost = link_->lost()) {
      const std::string why = *lost < 0 ? "a rank was lost" : "rank " + std::to_string(*lost) + " was lost";
      drop_all_peers(why);
      BrokenPeers::refuse(*lost, program_.place(position), why);
    }
    if (!alive) abort_peer(peer.rank(), position, "its process died");
    if (Clock::now() >= deadline) {
      abort_peer(peer.rank(), position, "nothing came of it in " + std::to_string(timeout_seconds_) + " s");
    }
  }
}

void SharedMemoryTransport::check_signals() {
  try {
    link_->check();
  } catch (...) {
    drop_all_peers("a wait was interrupted");
    throw;
  }
}

void SharedMemoryTransport::drop_all_peers(const std::string& why) {
  broken_.add_all(why);
  for (const auto& outbox : outboxes_) {
    if (outbox) outbox->drop();
  }
}

void SharedMemoryTransport::serve(const std::atomic<bool>& over) {
  const auto served = [&] { return advance() || over.load(); };
  while (!over.load() && link_->wakeup().wait(kForSpace, served) != SharedMemoryWakeup::Waited::kNot) {
  }
}

void SharedMemoryTransport::abort_peer(std::int32_t peer, std::size_t position, const std::string& why) {
  drop_peer(peer, why);
  BrokenPeers::refuse(peer, program_.place(position), why);
}

void SharedMemoryTransport::refuse_message(const SharedMemoryPeer& peer, std::size_t position,
                                           const std::exception& error) const {
  // The memory of a process that has died cannot be opened either.
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr && peer.alive()) {
    throw TransportError(program_.rank(), program_.place(position) + ": " + error.what());
  }
  BrokenPeers::refuse(peer.rank(), program_.place(position), error.what());
}

void SharedMemoryTransport::drop_peer(std::int32_t peer, const std::string& why) {
  broken_.add(peer, why);
  for (std::size_t channel = 0; channel < outboxes_.size(); ++channel) {
    const Channel& it = program_.channels()[channel];
    if (outboxes_[channel] && it.destination == peer) outboxes_[channel]->drop();
  }
}

void SharedMemoryTransport::end_step(bool complete) {
  specs_.close(complete);
  bool left = std::any_of(sends_.begin(), sends_.end(),
                          [](const SharedMemorySend& send) { return send.state == SharedMemorySend::State::kPosted; });
  for (const auto& queue : queues_) left = left || !queue.empty();
  for (const auto& outbox : outboxes_) {
    if (outbox) outbox->sweep();
  }
  for (const auto& [peer, why] : dropped_) drop_peer(peer, why);
  dropped_.clear();
  if (left && !broken_.any()) broken_.refuse_undrained();
}

}  // namespace fastpipe
