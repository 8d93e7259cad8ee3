#include "copy_engine_transport.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "common.h"

namespace fastpipe {

namespace {

constexpr std::chrono::milliseconds kWatchSlice{50};
// After a death is seen, in which every process learns of it: what its device has not done by then is aborted
// (fastpipe/runtime/executor/ranks.py), and reported as the death of that rank. Nobody trusts what comes of an aborted
// queue, as LinkWords says that it is; this is so that what was there before is known to be good.
constexpr std::chrono::milliseconds kDeathGrace{250};

// The rank because of which a peer has aborted: perhaps this one.
std::int32_t blamed_by(const SharedMemoryPeer& peer) {
  const std::uint32_t word = peer.words<LinkWords>().aborted_by.load();
  return word == 0 ? peer.rank() : static_cast<std::int32_t>(word) - 1;
}

// Further than the messages of any step that can be under way, and not so far that it would count as behind.
constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;
constexpr std::uint64_t kKinds = 2;               // of channels between two ranks, each way
constexpr std::chrono::microseconds kPause{100};  // where a host waits for another, or for its device
constexpr std::chrono::seconds kMoment{1};
constexpr double kLastSeconds = 30;              // at the end, for what is under way
constexpr std::chrono::milliseconds kGrace{10};  // in which a queue that does not wait would go on

// On the circle of 32 bits.
constexpr bool has_come(std::uint32_t flag, std::uint32_t value) {
  return static_cast<std::int32_t>(flag - value) >= 0;
}

template <typename Condition>
bool comes_true(double seconds, const Condition& condition) {
  const Clock::time_point deadline = Clock::now() + as_duration(seconds);
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

struct TrialFlags {
  alignas(kSharedLine) SharedWord go;
  alignas(kSharedLine) SharedWord gone;
};

}  // namespace

// --- the watchdog ---------------------------------------------------------------------------------------------------

bool CopyWatchdog::Line::waits() const {
  return !has_come(flag_.load(), expected_.load(std::memory_order_relaxed));
}

CopyWatchdog::CopyWatchdog(std::int32_t rank, double timeout_seconds, SharedWord& aborted_by)
    : timeout_seconds_(timeout_seconds),
      aborted_by_(aborted_by),
      broken_(rank),
      thread_(std::make_unique<std::thread>([this] { work(); })) {}

CopyWatchdog::~CopyWatchdog() {
  if (!fork_guard_.same_process()) {
    static_cast<void>(thread_.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_->join();
}

CopyWatchdog::Line& CopyWatchdog::add(SharedWord& flag, SharedWord& aborted, std::shared_ptr<SharedMemoryPeer> peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lines_.emplace_back(flag, aborted, std::move(peer));
}

bool CopyWatchdog::waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.waits(); });
}

void CopyWatchdog::abort(std::int32_t peer, const std::string& why, std::int32_t blamed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  abort_locked(peer, why, blamed);
}

void CopyWatchdog::abort_locked(std::int32_t peer, const std::string& why, std::int32_t blamed) {
  if (broken_.has(peer)) return;
  // Before anything is released: a rank that has what came of it then sees this, on whatever way it came.
  std::uint32_t nobody = 0;
  aborted_by_.compare_exchange_strong(nobody, static_cast<std::uint32_t>(blamed) + 1);
  broken_.add(peer, why);
  for (Line& line : lines_) {
    if (line.peer_->rank() == peer) line.aborted_.store(1);
  }
  any_broken_.store(true);
  release();
}

bool CopyWatchdog::broken(std::int32_t peer) const {
  if (!any_broken_.load()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_.has(peer);
}

BrokenPeers CopyWatchdog::broken_peers() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

void CopyWatchdog::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ending_) {
    const Clock::time_point now = Clock::now();
    for (Line& line : lines_) look(line, now);
    release();
    changed_.wait_for(lock, kWatchSlice);
  }
}

void CopyWatchdog::look(Line& line, Clock::time_point now) {
  const std::int32_t peer = line.peer_->rank();
  if (broken_.has(peer)) return;
  // Asked before the last look at the flag, as what it sent before it died counts.
  const bool alive = !line.waits() || line.peer_->alive();
  const bool aborted = line.aborted_.load() != 0;  // likewise
  if (alive) line.dead_ = {};
  if (!alive && line.dead_ == Clock::time_point{}) line.dead_ = now;
  const std::uint32_t flag = line.flag_.load();
  if (!line.waits()) {
    line.since_ = {};
    return;
  }
  if (line.since_ == Clock::time_point{} || line.seen_ != flag) line.since_ = now;
  line.seen_ = flag;
  if (!alive && now - line.dead_ > kDeathGrace) return abort_locked(peer, "its process died", peer);
  if (aborted) return abort_locked(peer, "it has aborted", blamed_by(*line.peer_));
  if (now - line.since_ < as_duration(timeout_seconds_)) return;
  abort_locked(peer, "nothing came of it in " + std::to_string(timeout_seconds_) + " s", peer);
}

// Every time, since what the peer had under way may set a flag back.
void CopyWatchdog::release() {
  if (!broken_.any()) return;
  for (Line& line : lines_) {
    if (!broken_.has(line.peer_->rank())) continue;
    // Also for what has not been expected yet, as a queue may get its wait at any time.
    line.flag_.store(line.expected_.load(std::memory_order_relaxed) + kFarAhead);
  }
}

// --- the receiver's end ---------------------------------------------------------------------------------------------

CopyIncoming::CopyIncoming(std::shared_ptr<CopyEngine> engine, CopyWords& words, CopyWatchdog::Line& line)
    : engine_(std::move(engine)),
      words_(words),
      line_(line),
      queue_(engine_->make_queue()),
      granted_(engine_->make_mark()) {}

void CopyIncoming::prepare(std::size_t count, std::size_t bytes) {
  if (count <= places_.size() && bytes <= place_bytes_) return;
  // Of what grows twice the last, so that all that is left behind is no more than what is in use.
  if (bytes > place_bytes_) bytes = std::max(bytes, 2 * place_bytes_);
  if (count > places_.size()) count = std::max(count, 2 * places_.size());
  bytes = whole_blocks(std::max(bytes, place_bytes_));
  count = std::max(count, places_.size());
  try {
    memories_.push_back(engine_->allocate(bytes * count));
    words_.ticket = engine_->ticket(*memories_.back());
    while (places_.size() < count) places_.push_back(std::make_shared<CopyPlace>(engine_->make_mark()));
  } catch (...) {
    words_.refused.store(1);
    throw;
  }
  place_bytes_ = bytes;
  words_.num_places.store(count);
  words_.place_bytes.store(bytes);
}

std::uint64_t CopyIncoming::post(std::int32_t place) {
  const CopyPlace& it = *places_.at(place);
  if (it.lent) throw Error("a receive is posted into a slot that was not freed; lower the schedule again");
  const std::uint64_t message = posted_++;
  queue_->wait(*it.unused);
  queue_->write(words_.granted, static_cast<std::uint32_t>(message + 1));
  queue_->record(*granted_);
  return message;
}

CopyLoan CopyIncoming::take(std::uint64_t message, std::int32_t place, std::int32_t stage) {
  const auto count = static_cast<std::uint32_t>(message + 1);
  line_.expect(count);
  CopyQueue& current = engine_->current();
  current.wait(words_.arrived, count);
  std::unique_ptr<CopyMark>& waited = waited_[stage];
  if (!waited) waited = engine_->make_mark();
  current.record(*waited);
  if (is_stand_in(message)) return {};
  return {engine_, places_[place], memories_.back(), memories_.back()->data() + place * place_bytes_};
}

bool CopyIncoming::idle() const {
  return granted_->reached() &&
         std::all_of(waited_.begin(), waited_.end(), [](const auto& it) { return it.second->reached(); });
}

bool CopyIncoming::holds(const std::byte* data) const {
  const std::less<const std::byte*> before;
  return std::any_of(memories_.begin(), memories_.end(), [&](const auto& memory) {
    return !before(data, memory->data()) && before(data, memory->data() + memory->size());
  });
}

// After the first of a step all are. A device's queue comes to it after the host, which then only may have seen it.
bool CopyIncoming::is_stand_in(std::uint64_t message) const {
  const std::uint64_t first = words_.stand_ins.load();
  return first > first_ && first <= message + 1;
}

// --- the sender's end -----------------------------------------------------------------------------------------------

CopyOutgoing::CopyOutgoing(std::shared_ptr<CopyEngine> engine, CopyWords& words, CopyWatchdog::Line& line)
    : engine_(std::move(engine)),
      words_(words),
      line_(line),
      queue_(engine_->make_queue()),
      made_(engine_->make_mark()),
      last_(engine_->make_mark()) {}

CopyOutgoing::~CopyOutgoing() {
  memories_.clear();
  words_.aborted.store(1);
  words_.holding.store(0);
}

bool CopyOutgoing::prepare(std::size_t count, std::size_t bytes) {
  if (count <= num_places_ && bytes <= place_bytes_) return true;
  const std::uint64_t shown = words_.place_bytes.load();
  const std::uint64_t places = words_.num_places.load();
  if (shown >= bytes && places >= count) {
    words_.holding.store(1);
    memories_.push_back(engine_->open(words_.ticket));
    place_bytes_ = shown;
    num_places_ = places;
    return true;
  }
  if (words_.aborted.load() != 0) throw Error("it has aborted");
  if (words_.refused.load() == 0) return false;
  throw Error("it has no memory on its device for " + std::to_string(count) + " messages of " + std::to_string(bytes) +
              " bytes");
}

void CopyOutgoing::send(std::int32_t place, const std::vector<CopyPart>& parts, CopyMark& copied) {
  engine_->current().record(*made_);
  queue_->wait(*made_);
  std::byte* to = begin(place);
  for (const CopyPart& part : parts) {
    if (part.bytes > 0) queue_->copy(to, part.data, part.bytes);
    to += whole_blocks(part.bytes);
  }
  end(copied);
}

void CopyOutgoing::stand_in(std::int32_t place, std::size_t bytes, CopyMark& copied) {
  if (words_.stand_ins.load() <= first_) words_.stand_ins.store(sent_ + 1);
  std::byte* const to = begin(place);
  if (bytes > 0) queue_->zero(to, bytes);
  end(copied);
}

std::byte* CopyOutgoing::begin(std::int32_t place) {
  const auto count = static_cast<std::uint32_t>(sent_ + 1);
  line_.expect(count);
  queue_->wait(words_.granted, count);
  return memories_.back()->data() + place * place_bytes_;
}

void CopyOutgoing::end(CopyMark& copied) {
  queue_->write(words_.arrived, static_cast<std::uint32_t>(++sent_));
  queue_->record(copied);
  queue_->record(*last_);
}

// --- the link -------------------------------------------------------------------------------------------------------

CopyEngineLink::CopyEngineLink(std::shared_ptr<SharedMemoryLink> host, std::shared_ptr<CopyEngine> engine,
                               double timeout_seconds)
    : host_(std::move(host)),
      engine_(std::move(engine)),
      timeout_seconds_(timeout_seconds),
      segment_(SharedMemorySegment::make(host_->num_ranks() * kKinds * sizeof(CopyWords))),
      exposed_(engine_->expose(segment_)),
      watchdog_(host_->rank(), timeout_seconds, host_->aborted_by()) {
  host_->publish_copies(*segment_);
}

CopyEngineLink::~CopyEngineLink() {
  if (fork_guard_.same_process()) {
    finish();
    return;
  }
  // A forked child has copies of what is the parent's to end.
  for (auto& [key, outgoing] : outgoing_) static_cast<void>(outgoing.release());
  for (auto& [key, incoming] : incoming_) static_cast<void>(incoming.release());
}

void CopyEngineLink::finish() {
  const double patience = std::min(timeout_seconds_, kLastSeconds);
  comes_true(patience, [&] { return watchdog_.any_broken() || (!watchdog_.waiting() && !busy()); });
  std::vector<std::int32_t> peers;
  for (const auto& [key, outgoing] : outgoing_) peers.push_back(key.first);
  for (const auto& [key, incoming] : incoming_) peers.push_back(key.first);
  for (const std::int32_t peer : peers) {
    if (watchdog_.waiting()) watchdog_.abort(peer, "the transport was closed", host_->rank());
  }
  // What was released runs out. Until then it needs the flags.
  comes_true(patience, [&] { return !busy(); });
  outgoing_.clear();
  const Clock::time_point deadline = Clock::now() + kMoment;
  while (held() && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
}

bool CopyEngineLink::busy() const noexcept {
  const auto works = [](const auto& it) { return !it.second->idle(); };
  try {
    return std::any_of(outgoing_.begin(), outgoing_.end(), works) ||
           std::any_of(incoming_.begin(), incoming_.end(), works);
  } catch (const std::exception&) {
    return false;  // a device that is lost does nothing any more
  }
}

// What another process has open must not be freed.
bool CopyEngineLink::held() const {
  return std::any_of(incoming_.begin(), incoming_.end(), [&](const auto& it) {
    return it.second->held_by_sender() && host_->peer(it.first.first)->alive();
  });
}

CopyWords& CopyEngineLink::words_in(const SharedMemorySegment& segment, std::int32_t source, ChannelKind kind) {
  return segment.at<CopyWords>(0)[static_cast<std::uint64_t>(source) * kKinds + static_cast<std::uint64_t>(kind)];
}

CopyIncoming& CopyEngineLink::incoming(const Channel& channel) {
  const Key key{channel.source, channel.kind};
  if (const auto found = incoming_.find(key); found != incoming_.end()) return *found->second;
  CopyWords& words = words_in(*segment_, channel.source, channel.kind);
  CopyWatchdog::Line& line = watchdog_.add(words.arrived, words.aborted, host_->peer(channel.source));
  return *incoming_.emplace(key, std::make_unique<CopyIncoming>(engine_, words, line)).first->second;
}

CopyOutgoing* CopyEngineLink::outgoing(const Channel& channel) {
  const Key key{channel.destination, channel.kind};
  if (const auto found = outgoing_.find(key); found != outgoing_.end()) return found->second.get();
  const auto& peer = host_->peer(channel.destination);
  auto shown = shown_.find(channel.destination);
  if (shown == shown_.end()) {
    auto segment = copies_of(*peer);
    if (!segment) return nullptr;
    auto exposed = engine_->expose(segment);
    shown = shown_.emplace(channel.destination, Shown{std::move(segment), std::move(exposed)}).first;
  }
  CopyWords& words = words_in(*shown->second.segment, host_->rank(), channel.kind);
  auto made = std::make_unique<CopyOutgoing>(engine_, words, watchdog_.add(words.granted, words.aborted, peer));
  return outgoing_.emplace(key, std::move(made)).first->second.get();
}

bool CopyEngineLink::lies_in_place(const std::byte* data) const {
  return std::any_of(incoming_.begin(), incoming_.end(), [&](const auto& it) { return it.second->holds(data); });
}

// --- what a device must be able to do -------------------------------------------------------------------------------

std::optional<std::string> obstacle_to_flags(CopyEngine& engine, double timeout_seconds) {
  try {
    const auto segment = SharedMemorySegment::make(sizeof(TrialFlags));
    const auto exposed = engine.expose(segment);
    TrialFlags& flags = *segment->at<TrialFlags>(0);
    const auto queue = engine.make_queue();
    const auto before = engine.make_mark();
    const auto after = engine.make_mark();
    queue->record(*before);
    queue->wait(flags.go, 1);
    queue->write(flags.gone, 1);
    queue->record(*after);
    if (!comes_true(timeout_seconds, [&] { return before->reached(); }))
      return "a stream of the device does not come to its work";
    std::this_thread::sleep_for(kGrace);
    if (after->reached() || flags.gone.load() != 0) return "a stream does not wait for a flag in the host's memory";
    flags.go.store(1 + kFarAhead);
    if (!comes_true(timeout_seconds, [&] { return after->reached(); }))
      return "a stream does not see a flag that the host sets";
    if (flags.gone.load() != 1) return "the host does not see a flag that a stream writes";
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

Connect over_copy_engines(std::shared_ptr<CopyEngineLink> link, std::shared_ptr<const SharedMemoryChannels> announced,
                          std::vector<CopyPlaces> places) {
  return [link = std::move(link), announced = std::move(announced), places = std::move(places)](
             const RankProgram& program, double timeout_seconds) {
    announced->check(program);
    return std::make_unique<CopyEngineTransport>(link, *announced, places, program, timeout_seconds);
  };
}

void add_places(const RankProgram& program, std::vector<CopyPlaces>& places) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> place_of;  // by channel and slot
  for (std::size_t position = 0; position < program.size(); ++position) {
    const Instruction it = program[position];
    if (it.op != Op::kPostRecv) continue;
    CopyPlaces& channel = places.at(it.channel);
    const auto [found, is_new] = place_of.try_emplace({it.channel, it.slot}, channel.count);
    channel.count += is_new ? 1 : 0;
    channel.of_message.push_back(found->second);
  }
}

CopyEngineTransport::CopyEngineTransport(std::shared_ptr<CopyEngineLink> link, const SharedMemoryChannels& announced,
                                         std::vector<CopyPlaces> places, const RankProgram& program,
                                         double timeout_seconds)
    : link_(std::move(link)),
      codec_(announced.codec()),
      program_(program),
      places_(std::move(places)),
      timeout_seconds_(timeout_seconds),
      specs_(program.size()),
      announced_(announced, program, timeout_seconds),
      incoming_(program.channels().size()),
      outgoing_(program.channels().size()),
      num_messages_(program.channels().size()),
      receives_(program.num_slots()),
      sends_(program.num_sends()) {
  for (Send& send : sends_) send.copied = link_->engine()->make_mark();
}

void CopyEngineTransport::begin_step(std::int64_t signature, bool announce) {
  link_->watchdog().broken_peers().require_none();
  specs_.open(signature, announce);
  signature_ = signature;
  announcing_ = announce;
  std::fill(num_messages_.begin(), num_messages_.end(), 0);
  if (announce) return announced_.begin_step(signature, true);
  make_room(signature);
}

void CopyEngineTransport::make_room(std::int64_t signature) {
  const std::vector<Channel>& channels = program_.channels();
  const auto used = [&](std::size_t i, std::int32_t end) {
    return !channels[i].local() && end == program_.rank() && places_[i].count > 0;
  };
  if (prepared_.count(signature) == 0) {
    const std::vector<std::size_t> bytes = count_bytes();
    for (std::size_t i = 0; i < channels.size(); ++i) {
      if (!used(i, channels[i].destination)) continue;
      try {
        incoming_[i] = &link_->incoming(channels[i]);
        incoming_[i]->prepare(static_cast<std::size_t>(places_[i].count), bytes[i]);
      } catch (const std::exception& error) {
        abort_peer(channels[i].source, error.what());
      }
    }
    for (std::size_t i = 0; i < channels.size(); ++i) {
      if (used(i, channels[i].source)) wait_for_room(i, bytes[i]);
    }
    prepared_.insert(signature);
  }
  for (CopyIncoming* incoming : incoming_) {
    if (incoming != nullptr) incoming->begin_step();
  }
  for (CopyOutgoing* outgoing : outgoing_) {
    if (outgoing != nullptr) outgoing->begin_step();
  }
}

// By channel: the largest message. At least a line, so that there is a place.
std::vector<std::size_t> CopyEngineTransport::count_bytes() const {
  std::vector<std::size_t> bytes(program_.channels().size(), kSharedLine);
  for (std::size_t position = 0; position < program_.size(); ++position) {
    const Instruction it = program_[position];
    if (it.op != Op::kPostRecv && it.op != Op::kSend) continue;
    bytes[it.channel] = std::max(bytes[it.channel], codec_->size(specs_.at(position)));
  }
  return bytes;
}

void CopyEngineTransport::wait_for_room(std::size_t channel, std::size_t bytes) {
  const std::int32_t peer = program_.peer_of(channel);
  const Clock::time_point deadline = Clock::now() + as_duration(timeout_seconds_);
  while (true) {
    // Asked before the look, for what it showed before it died counts.
    const bool alive = link_->host()->peer(peer)->alive();
    try {
      CopyOutgoing* const outgoing = outgoing_[channel] = link_->outgoing(program_.channels()[channel]);
      if (outgoing != nullptr && outgoing->prepare(static_cast<std::size_t>(places_[channel].count), bytes)) return;
    } catch (const std::exception& error) {
      abort_peer(peer, error.what());
    }
    if (!alive) abort_peer(peer, "its process died");
    if (Clock::now() >= deadline) abort_peer(peer, "it did not begin the step");
    std::this_thread::sleep_for(kPause);
  }
}

bool CopyEngineTransport::usable(std::int32_t channel) {
  if (!link_->watchdog().broken(program_.peer_of(channel))) return true;
  report_broken();
  return false;
}

void CopyEngineTransport::report_broken() {
  if (link_->watchdog().any_broken() && !std::exchange(reported_, true)) fail();
}

// Of all ranks, as what came of a queue that another rank aborted may have come through others to this one.
void CopyEngineTransport::check() const {
  if (link_->watchdog().any_broken()) fail();
  if (const auto found = link_->host()->find_abort()) {
    const auto [rank, blamed] = *found;
    throw TransportError(blamed, "rank " + std::to_string(program_.rank()) + ": what rank " + std::to_string(rank) +
                                     " sent may be no message, as it waits no more for rank " + std::to_string(blamed) +
                                     "; see what that rank was doing, or set a longer timeout");
  }
}

void CopyEngineTransport::abort_peer(std::int32_t peer, const std::string& why) {
  link_->watchdog().abort(peer, why, peer);
  reported_ = true;
  fail();
}

void CopyEngineTransport::fail() const {
  const BrokenPeers broken = link_->watchdog().broken_peers();
  BrokenPeers::refuse(broken.first(), "rank " + std::to_string(program_.rank()), broken.why());
}

void CopyEngineTransport::post_receive(const Transfer& transfer, std::int32_t slot, Payload& into) {
  Receive& receive = receives_[slot];
  receive = {false, transfer, 0, 0, &into};
  if (announcing_) return announced_.post_receive(transfer, slot, into);
  if (!usable(transfer.channel)) return;
  try {
    receive.place = next_place(transfer.channel);
    receive.message = incoming_[transfer.channel]->post(receive.place);
  } catch (const std::exception& error) {
    abort_peer(program_.peer_of(transfer.channel), error.what());
  }
  receive.posted = true;
}

bool CopyEngineTransport::wait_receive(std::int32_t slot) {
  Receive& receive = receives_[slot];
  if (announcing_) {
    if (!announced_.wait_receive(slot)) return false;
    specs_.learn(receive.transfer.position, receive.into->spec());
    return true;
  }
  if (!std::exchange(receive.posted, false) || !usable(receive.transfer.channel)) return false;
  CopyIncoming& incoming = *incoming_[receive.transfer.channel];
  CopyLoan loan = incoming.take(receive.message, receive.place, receive.transfer.stage);
  // What waits in the host's own time may have been released just now.
  if (!usable(receive.transfer.channel) || !loan.active()) return false;
  codec_->adopt(*receive.into, specs_.at(receive.transfer.position), std::move(loan));
  return true;
}

void CopyEngineTransport::post_send(const Transfer& transfer, std::int32_t send, const Payload& from) {
  specs_.learn_or_check(transfer.position, from, program_);
  if (announcing_) {
    // It may be copied later, when another stage has its turn, and the host copies it.
    wait_for_current(*sends_[send].copied);
    return announced_.post_send(transfer, send, from);
  }
  hand_over(transfer, send, [&](CopyOutgoing& outgoing, Send& it) {
    parts_.clear();
    codec_->list(from, parts_);
    // Its place may be granted again before it is sent.
    if (std::any_of(parts_.begin(), parts_.end(), [&](const auto& part) { return link_->lies_in_place(part.data); })) {
      it.kept = codec_->duplicate(parts_);
    }
    outgoing.send(next_place(transfer.channel), parts_, *it.copied);
  });
}

// The host waits for all that the current queue has.
void CopyEngineTransport::wait_for_current(CopyMark& mark) {
  link_->engine()->current().record(mark);
  while (!mark.reached()) std::this_thread::sleep_for(kPause);
}

void CopyEngineTransport::post_stand_in(const Transfer& transfer, std::int32_t send) {
  if (announcing_) return announced_.post_stand_in(transfer, send);
  hand_over(transfer, send, [&](CopyOutgoing& outgoing, Send& it) {
    outgoing.stand_in(next_place(transfer.channel), codec_->size(specs_.at(transfer.position)), *it.copied);
  });
}

template <typename Body>
void CopyEngineTransport::hand_over(const Transfer& transfer, std::int32_t send, const Body& body) {
  Send& it = sends_[send];
  it.posted = false;
  it.channel = transfer.channel;
  if (!usable(transfer.channel)) return;
  try {
    body(*outgoing_[transfer.channel], it);
  } catch (const std::exception& error) {
    abort_peer(program_.peer_of(transfer.channel), error.what());
  }
  it.posted = true;
}

double CopyEngineTransport::wait_send(std::int32_t send) {
  if (announcing_) return announced_.wait_send(send);
  Send& it = sends_[send];
  if (!std::exchange(it.posted, false)) return 0;
  link_->engine()->current().wait(*it.copied);
  it.kept.reset();
  usable(it.channel);
  return 0;
}

void CopyEngineTransport::end_step(bool complete) {
  specs_.close(complete);
  if (announcing_) {
    prepared_.erase(signature_);
    return announced_.end_step(complete);
  }
  report_broken();
  const auto posted = [](const auto& it) { return it.posted; };
  const bool left =
      std::any_of(receives_.begin(), receives_.end(), posted) || std::any_of(sends_.begin(), sends_.end(), posted);
  if (left && !link_->watchdog().any_broken()) link_->watchdog().broken_peers().refuse_undrained();
}

}  // namespace fastpipe
